import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from danlu.base.errors import ConfigError
from danlu.base.events import JsonLines, read_lines
from danlu.base.facts import Evaluation, StepReport
from danlu.monitor.recorder import Recorder
from danlu.monitor.sinks._base import Sink


class Kept(Sink):
    """Keeps what it is given; can be slow, stuck, or broken."""

    def __init__(self, *, delay: float = 0.0, fails_at: int = -1, fails_to: str = "") -> None:
        self.records: list[Mapping[str, Any]] = []
        self.delay, self.fails_at, self.fails_to = delay, fails_at, fails_to
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def open(self, folder: Path) -> None:
        if self.fails_to == "open":
            raise OSError("no room")

    def write(self, record: Mapping[str, Any]) -> None:
        self.gate.wait()
        time.sleep(self.delay)
        if len(self.records) == self.fails_at:
            raise OSError("no room")
        self.records.append(record)

    def close(self) -> None:
        self.closed = True
        if self.fails_to == "close":
            raise OSError("no room")


def open_recorder(folder: Path, *sinks: Sink, **more: Any) -> Recorder:
    return Recorder(folder, sinks, events=JsonLines(folder / "events.jsonl"), **more)


def events(folder: Path) -> list[dict[str, Any]]:
    return list(read_lines(folder / "events.jsonl"))


def report(step: int) -> StepReport:
    return StepReport(step, 100, 3.0, 1.0, 1e-3, 0.5, 200.0, None, 2**30, extra={"scale": 2.0})


def test_records_say_what_they_are_and_when(tmp_path: Path) -> None:
    sink = Kept()
    with open_recorder(tmp_path, sink) as recorder:
        recorder.step(report(7))
        recorder.evaluation(Evaluation(7, 3.1, 1.2, 1000, 0.5))
        recorder.write({"kind": "other", "step": 8, "time": 5.0})
    first, second, third = sink.records
    assert (first["kind"], first["step"], first["loss"], first["scale"]) == ("step", 7, 3.0, 2.0)
    assert (second["kind"], second["bits_per_byte"]) == ("evaluation", 1.2)
    assert abs(first["time"] - time.time()) < 60
    assert third == {"kind": "other", "step": 8, "time": 5.0}


def test_closing_waits_until_all_is_written(tmp_path: Path) -> None:
    sink = Kept(delay=0.001)
    recorder = open_recorder(tmp_path, sink)
    for step in range(200):
        recorder.step(report(step))
    recorder.close()
    assert [r["step"] for r in sink.records] == list(range(200))
    assert sink.closed
    assert events(tmp_path) == []


def test_a_slow_sink_delays_neither_training_nor_the_others(tmp_path: Path) -> None:
    slow, fast = Kept(), Kept()
    slow.gate.clear()
    recorder = open_recorder(tmp_path, slow, fast)
    began = time.perf_counter()
    for step in range(100):
        recorder.step(report(step))
    assert time.perf_counter() - began < 0.5
    while len(fast.records) < 100:
        time.sleep(0.001)
    slow.gate.set()
    recorder.close()
    assert len(slow.records) == 100


def test_a_sink_that_raises_is_switched_off_and_the_others_go_on(tmp_path: Path) -> None:
    broken, whole = Kept(fails_at=3), Kept()
    recorder = open_recorder(tmp_path, broken, whole)
    for step in range(50):
        recorder.step(report(step))
        time.sleep(0.001)
    recorder.close()
    assert len(whole.records) == 50
    assert broken.closed
    (event,) = events(tmp_path)
    assert (event["kind"], event["sink"]) == ("sink_failed", "Kept")
    assert event["reason"] == "OSError: no room"


@pytest.mark.parametrize("moment", ["open", "close"])
def test_a_sink_that_fails_to_open_or_close_is_told_too(tmp_path: Path, moment: str) -> None:
    with open_recorder(tmp_path, Kept(fails_to=moment)) as recorder:
        recorder.step(report(1))
    assert [e["kind"] for e in events(tmp_path)] == ["sink_failed"]


def test_a_sink_that_falls_far_behind_misses_records_and_says_how_many(tmp_path: Path) -> None:
    stuck = Kept()
    stuck.gate.clear()
    recorder = open_recorder(tmp_path, stuck, capacity=10)
    for step in range(100):
        recorder.step(report(step))
    stuck.gate.set()
    recorder.close()
    first, last = events(tmp_path)
    assert first["kind"] == last["kind"] == "warning"
    missed = 100 - len(stuck.records)
    assert 85 <= missed <= 90
    assert last["text"] == f"sink Kept missed {missed} records."


def test_a_sink_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    stuck = Kept()
    stuck.gate.clear()
    recorder = open_recorder(tmp_path, stuck)
    recorder.step(report(1))
    recorder.close(timeout_seconds=0.05)
    assert {e["kind"] for e in events(tmp_path)} == {"sink_failed", "warning"}
    stuck.gate.set()


def test_a_sink_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"monitor\.sinks: there is no 'jsnl'.*jsonl"):
        Recorder(tmp_path, ["jsnl"], events=JsonLines(tmp_path / "events.jsonl"))


def test_a_record_costs_microseconds(tmp_path: Path) -> None:
    with Recorder(tmp_path, ["jsonl"], events=JsonLines(tmp_path / "events.jsonl")) as recorder:
        reports = [report(step) for step in range(1000)]
        began = time.perf_counter()
        for each in reports:
            recorder.step(each)
        mean = (time.perf_counter() - began) / len(reports)
    assert mean < 0.5e-3
    assert sum(1 for _ in read_lines(tmp_path / "metrics.jsonl")) == 1000
