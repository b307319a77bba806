"""Who measures when: groups that fit into memory, rounds, turns around danlu's.

In a round every entry of the group gets one turn of a few steps. When danlu takes part it gets a
turn before and after each of them: an entry is then compared with the mean of its two neighbours,
seconds away, and a machine that slows down during the round slows down both. The order rotates
from round to round, so that nobody always comes first. The matrix peak is measured beside each of
danlu's turns, for MFU needs a neighbour as well.

When memory does not hold all at once, entries run in groups; the plain loop, danlu and the peak
are in every group, so ratios stay pairs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.peers.machine import CpuClock, meminfo_mib
from benchmarks.peers.process import RunnerError, RunnerProcess, Turn
from benchmarks.peers.registry import PEAK, REFERENCE, Entry
from benchmarks.peers.workload import Workload

READY_SECONDS = 900  # includes compiling a tool's own C++ operators, once
WARM_UP_SECONDS = 1200  # includes torch.compile on a loaded machine
TURN_SECONDS = 60
STEP_SECONDS = 60
RUNNER_MIB = 1900  # the 28m model in fp32; compiled bf16 settings need about 1200
RESERVE_MIB = 3000


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int
    steps: int
    warm_up_steps: int
    group_size: int | None = None


@dataclass(frozen=True)
class TimedTurn:
    """One turn and its place; position counts the turns of a round."""

    entry: str
    group: int
    round: int
    position: int
    turn: Turn

    @property
    def step_seconds(self) -> float:
        """Mean wall seconds of a step in this turn."""
        return sum(self.turn.wall_seconds) / len(self.turn.wall_seconds)

    @property
    def step_cpu_seconds(self) -> float:
        """Mean CPU seconds of a step in this turn, all threads."""
        return sum(self.turn.cpu_seconds) / len(self.turn.cpu_seconds)


@dataclass(frozen=True)
class RoundFacts:
    """What the machine did during a round."""

    group: int
    round: int
    seconds: float
    load_1min: float
    others_cpu_share: float
    stolen_cpu_share: float


@dataclass
class EntryRecord:
    """What is known of one entry besides its turns."""

    entry: Entry
    error: str | None = None
    build_seconds: float | None = None
    parameters: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    compile_cache: str | None = None
    warm_up: Turn | None = None


@dataclass
class Record:
    """Everything measured in a run."""

    entries: dict[str, EntryRecord]
    turns: list[TimedTurn] = field(default_factory=list)
    rounds: list[RoundFacts] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)


class Say(Protocol):
    """Shows progress; ``lasting`` for lines a log should keep."""

    def __call__(self, text: str, *, lasting: bool = False) -> None:
        """Show one line."""


def measure(record: Record, work: Workload, plan: Plan, say: Say) -> None:
    """Measure all entries of ``record`` that have not failed yet, and fill it."""
    waiting = [known.entry for known in record.entries.values() if known.error is None]
    size = plan.group_size or fitting_group_size()
    for index, group in enumerate(groups(waiting, size)):
        record.groups.append([entry.name for entry in group])
        _Group(record, index, group, work, plan, say).run()


def fitting_group_size() -> int:
    """How many runners fit into the memory that is free now; never less than one rival."""
    return max(4, (meminfo_mib("MemAvailable") - RESERVE_MIB) // RUNNER_MIB)


def groups(entries: Sequence[Entry], size: int) -> list[list[Entry]]:
    """Split entries into groups of at most ``size``, each with the peak, the reference and danlu.

    A peer's settings stay together where they fit. Groups are filled evenly.
    """
    common = [entry for entry in entries if is_common(entry)]
    others = [entry for entry in entries if not is_common(entry)]
    room = max(1, size - len(common))
    count = max(1, -(-len(others) // room))
    share = -(-len(others) // count)
    starts = range(0, max(1, len(others)), max(1, share))
    return [[*common, *others[start : start + share]] for start in starts]


def is_common(entry: Entry) -> bool:
    """Whether an entry is needed in every group."""
    return entry.is_ours or entry.name in (REFERENCE, PEAK)


def turn_order(group: Sequence[Entry], round_: int) -> list[str]:
    """The turns of a round: rivals rotated, the peak and danlu before each and after the last."""
    rivals = [entry.name for entry in group if entry.is_rival]
    ours = [entry.name for entry in group if entry.is_ours]
    peak = [entry.name for entry in group if entry.name == PEAK]
    shift = round_ % len(rivals) if rivals else 0
    rivals = rivals[shift:] + rivals[:shift]
    order = [name for rival in rivals for name in (*peak, *ours, rival)]
    return [*order, *peak, *([*ours, *peak] if ours else [])]


class _Group:
    """One group from start to end: all its processes alive at once."""

    def __init__(
        self,
        record: Record,
        index: int,
        entries: Sequence[Entry],
        work: Workload,
        plan: Plan,
        say: Say,
    ) -> None:
        self.record, self.index, self.plan, self.say = record, index, plan, say
        self.work = work
        self.entries = [e for e in entries if record.entries[e.name].error is None]
        self.runners = {entry.name: RunnerProcess(entry, work) for entry in self.entries}

    def run(self) -> None:
        try:
            for entry in self.entries:
                self._start(entry)
            for round_ in range(self.plan.rounds):
                self._round(round_)
        finally:
            for runner in self.runners.values():
                runner.stop()

    def _start(self, entry: Entry) -> None:
        known = self.record.entries[entry.name]
        runner = self.runners[entry.name]
        warm = runner.has_cache()
        self.say(f"group {self.index + 1}: starting {entry.name}", lasting=True)
        try:
            ready = runner.start(READY_SECONDS)
            self._check_size(entry, ready["parameters"])
            turn = runner.steps(self.plan.warm_up_steps, WARM_UP_SECONDS)
        except RunnerError as error:
            self._drop(entry.name, error)
            return
        if known.warm_up is None:  # a common entry starts once a group; the first start counts
            known.compile_cache = "warm" if warm else "cold" if runner.has_cache() else None
            known.build_seconds = ready["build_seconds"]
            known.parameters = ready["parameters"]
            known.versions = ready["versions"]
            known.warm_up = turn

    def _check_size(self, entry: Entry, parameters: int | None) -> None:
        """Refuse to compare models of different sizes."""
        expected = self.work.parameters
        if entry.name != PEAK and parameters != expected:
            raise RunnerError(f"built a model of {parameters} parameters, not {expected}")

    def _round(self, round_: int) -> None:
        before, start, load = CpuClock.now(), time.monotonic(), os.getloadavg()[0]
        ours = 0.0
        for position, name in enumerate(turn_order(self.entries, round_)):
            if name not in self.runners:
                continue
            self.say(f"group {self.index + 1}: round {round_ + 1}/{self.plan.rounds}: {name}")
            steps = 1 if name == PEAK else self.plan.steps
            try:
                turn = self.runners[name].steps(steps, TURN_SECONDS + steps * STEP_SECONDS)
            except RunnerError as error:
                self._drop(name, error)
                continue
            ours += sum(turn.cpu_seconds) + turn.idle_cpu_seconds
            self.record.turns.append(TimedTurn(name, self.index, round_, position, turn))
        others, stolen = CpuClock.now().shares_since(before, ours=ours)
        facts = RoundFacts(
            self.index, round_, time.monotonic() - start, load, round(others, 3), round(stolen, 3)
        )
        self.record.rounds.append(facts)
        self.say(
            f"group {self.index + 1}: round {round_ + 1}/{self.plan.rounds}: "
            f"{facts.seconds:.0f} s, others used {others:.0%} of the CPUs",
            lasting=True,
        )

    def _drop(self, name: str, error: RunnerError) -> None:
        """Stop a runner that failed and note why; the others go on."""
        self.record.entries[name].error = str(error)
        self.runners.pop(name).stop()
        self.say(f"{name} failed: {error}", lasting=True)


def as_plain(facts: Any) -> dict[str, Any]:
    """A small dataclass as a JSON-ready mapping, floats rounded."""
    return {
        key: round(value, 4) if isinstance(value, float) else value
        for key, value in vars(facts).items()
    }
