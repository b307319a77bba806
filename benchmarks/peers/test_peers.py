"""Promises of the arithmetic and of the protocol: ``pytest benchmarks/peers``."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from benchmarks.peers.environments import REQUIREMENTS, families
from benchmarks.peers.figures import summarize
from benchmarks.peers.process import Turn
from benchmarks.peers.protocol import Gate, Peer
from benchmarks.peers.registry import PEAK, REFERENCE, Entry, choose, discover
from benchmarks.peers.report import page
from benchmarks.peers.rounds import EntryRecord, Record, TimedTurn, groups, turn_order
from benchmarks.peers.workload import PRESETS, Workload

WORK = PRESETS["28m"]


def entry(name: str) -> Entry:
    peer, _, setting = name.partition(":")
    return Entry(Peer(peer, None, "torch", {setting: "as given"}), setting, "none")


def scalars(timed: TimedTurn) -> dict[str, float]:
    return {name: values[0] for name, values in timed.turn.figures.items()}


def turn(*walls: float, **figures: float) -> Turn:
    named = {key: [value] for key, value in figures.items()}
    return Turn(list(walls), [2 * wall for wall in walls], [1.0 for _ in walls], named, 100, 0.0)


def record(names: list[str], rounds: list[dict[str, float]]) -> Record:
    """A record in which every entry's steps take the given seconds in each round."""
    entries = {name: EntryRecord(entry(name), warm_up=turn(9.0)) for name in names}
    made = Record(entries)
    for index, seconds in enumerate(rounds):
        for position, name in enumerate(turn_order([entry(n) for n in names], index)):
            peak = {
                f"{k}_{s}_{w}": 0.5
                for k in ("bf16", "fp32")
                for s in (1024, 2048)
                for w in ("best", "median")
            }
            done = turn(1.0, **peak) if name == PEAK else turn(seconds[name], seconds[name])
            made.turns.append(TimedTurn(name, 0, index, position, done))
    return made


NAMES = ["danlu:best", REFERENCE, "fast:best", "slow:best", PEAK]


def test_ratios_hold_when_the_machine_halves_its_speed_between_rounds() -> None:
    quiet = {"danlu:best": 1.0, REFERENCE: 4.0, "fast:best": 2.0, "slow:best": 3.0}
    busy = {name: 2 * seconds for name, seconds in quiet.items()}
    result = summarize(record(NAMES, [quiet, busy, busy, quiet, busy]), WORK)
    assert result["ratio_to_plain_fp32"] == 4.0
    assert result["ratio_to_best_peer"] == 2.0
    assert result["best_peer"] == "fast:best"
    assert result["tokens_per_second"]["danlu"] == WORK.tokens_per_step / 2.0


def test_rivals_are_compared_through_danlu_when_the_machine_slows_inside_a_round() -> None:
    seconds = {"danlu:best": 1.0, REFERENCE: 4.0, "fast:best": 2.0, "slow:best": 3.0}
    measured = record(NAMES, [seconds])
    slowed = [
        replace(timed, turn=turn(3 * timed.step_seconds, **scalars(timed)))
        if timed.position > 5
        else timed
        for timed in measured.turns
    ]
    measured.turns[:] = slowed
    details = summarize(measured, WORK)["details"]["entries"]
    assert details["slow:best"]["ratio_to_plain_fp32"]["median"] == pytest.approx(1.333, abs=1e-3)


def test_without_danlu_its_figures_are_null_and_the_rest_stands() -> None:
    seconds = {REFERENCE: 4.0, "fast:best": 2.0, "slow:best": 3.0}
    result = summarize(record(NAMES[1:], [seconds]), WORK)
    assert result["tokens_per_second"]["danlu"] is None
    assert result["mfu"] is None
    assert result["ratio_to_best_peer"] is None
    assert result["best_peer"] == "fast:best"
    assert result["tokens_per_second"]["fast"] == {"default": 1024.0, "best": 1024.0}


@pytest.mark.parametrize("failed", ["danlu:best", "fast:best"])
def test_who_failed_late_has_no_figures(failed: str) -> None:
    seconds = {"danlu:best": 1.0, REFERENCE: 4.0, "fast:best": 2.0, "slow:best": 3.0}
    measured = record(NAMES, [seconds])
    measured.entries[failed].error = "exit code -9"
    result = summarize(measured, WORK)
    details = result["details"]["entries"][failed]
    assert (details["status"], details["error"]) == ("failed", "exit code -9")
    assert "tokens_per_second" not in details
    assert result["ratio_to_best_peer"] == (None if failed == "danlu:best" else 3.0)


def test_mfu_divides_by_the_peak_of_the_same_round() -> None:
    seconds = {"danlu:best": 1.0, REFERENCE: 4.0, "fast:best": 2.0, "slow:best": 3.0}
    result = summarize(record(NAMES, [seconds]), WORK)
    expected = WORK.tokens_per_step * WORK.flops_per_token / 0.5e12
    assert result["mfu"] == pytest.approx(expected, abs=1e-4)


def test_every_turn_of_a_rival_lies_between_two_of_danlu() -> None:
    order = turn_order([entry(name) for name in NAMES], 1)
    for position, name in enumerate(order):
        if name not in (PEAK, "danlu:best"):
            near = [n for n in order[position - 1 : position + 3] if n not in (PEAK, name)]
            assert near[:2] == ["danlu:best", "danlu:best"]
    assert order.count(PEAK) == len(NAMES)


def test_every_group_holds_the_common_entries_and_every_rival_once() -> None:
    names = [*NAMES, "a:best", "b:best", "c:best"]
    split = groups([entry(name) for name in names], 5)
    common = {"danlu:best", REFERENCE, PEAK}
    assert all(common <= {e.name for e in group} for group in split)
    rivals = [e.name for group in split for e in group if e.name not in common]
    assert sorted(rivals) == sorted(set(names) - common)
    assert max(map(len, split)) <= 5


def test_runners_name_known_environments_and_the_reference_is_there() -> None:
    found = discover()
    assert {REFERENCE, PEAK} <= {e.name for e in found}
    assert {e.peer.environment for e in found} - {None} == set(families())
    for file in REQUIREMENTS.glob("*.txt"):
        assert all("==" in line for line in file.read_text().splitlines())


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="no peer named nanotron"):
        choose(discover(), ["nanotron"])


def test_a_gate_answers_each_command_and_times_each_step() -> None:
    commands, replies = io.StringIO("steps 2\nsteps 1\n"), io.StringIO()
    gate = Gate(entry("some:best").peer, "best", WORK, (commands, replies))
    gate.ready(parameters=7)
    gate.tick(3.0)
    gate.tick(2.0)  # ends the first turn and takes the second command
    lines = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["ready", "steps"]
    assert lines[1]["losses"] == [3.0, 2.0]
    assert len(lines[1]["wall_seconds"]) == len(lines[1]["cpu_seconds"]) == 2


def test_a_workload_survives_the_command_line() -> None:
    assert Workload.from_json(WORK.to_json()) == WORK


def test_parameters_are_what_the_model_has() -> None:
    assert WORK.parameters == 27_662_848
    assert PRESETS["10m"].parameters == 10_621_184


def test_the_page_shows_failures_and_closest_rival() -> None:
    seconds = {"danlu:best": 1.0, REFERENCE: 4.0, "fast:best": 2.0, "slow:best": 3.0}
    measured = record(NAMES, [seconds])
    measured.entries["slow:best"].error = "no answer within 7 seconds"
    result = summarize(measured, WORK)
    result["details"] |= {
        "machine": {
            "cpu": "X",
            "cpu_family": 1,
            "cpu_model": 2,
            "cores": 2,
            "memory_gib": 1.0,
            "flags": {},
        },
        "workload": vars(WORK),
        "parameters": WORK.parameters,
        "flops_per_token": 1,
        "run": {
            "command": "c",
            "date": "d",
            "minutes": 1,
            "rounds": 1,
            "steps": 2,
            "warm_up_steps": 1,
        },
    }
    text = "\n".join(page(result))
    assert "2.00 x the closest rival (fast:best)" in text
    assert "- slow:best: no answer within 7 seconds" in text
