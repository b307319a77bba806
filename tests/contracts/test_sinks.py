"""What every sink promises, whoever wrote it. A new file in `danlu/monitor/sinks` is found here."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from danlu.base.events import JsonLines, read_lines
from danlu.monitor.recorder import Recorder
from danlu.monitor.sinks._base import SINKS


def _records(*steps: int) -> list[dict[str, Any]]:
    numbers = {"loss": 3.0, "mfu": None, "memory_bytes": 2**40, "gradient_norm": float("nan")}
    return [{"kind": "step", "time": 1e9 + step, "step": step, **numbers} for step in steps]


def _write(name: str, folder: Path, records: list[dict[str, Any]]) -> None:
    sink = SINKS.find(name)()
    sink.open(folder)
    for record in records:
        sink.write(record)
    sink.close()


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=SINKS.names())
def name(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


def test_it_has_a_description(name: str) -> None:
    assert SINKS.find(name).__doc__


def test_records_are_there_after_close(name: str, tmp_path: Path) -> None:
    _write(name, tmp_path, _records(1))
    one = sum(map(len, _files(tmp_path).values()))
    other = tmp_path / "other"
    other.mkdir()
    _write(name, other, _records(*range(1, 101)))
    assert sum(map(len, _files(other).values())) > one + 99 * 10  # no record takes less


def test_a_resumed_run_appends_and_rewrites_nothing(name: str, tmp_path: Path) -> None:
    _write(name, tmp_path, _records(1, 2, 3))
    before = _files(tmp_path)
    _write(name, tmp_path, _records(3, 4))
    after = _files(tmp_path)
    assert all(after[path].startswith(content) for path, content in before.items())
    assert sum(map(len, after.values())) > sum(map(len, before.values()))


def test_it_may_be_opened_and_closed_without_a_record(name: str, tmp_path: Path) -> None:
    _write(name, tmp_path, [])
    SINKS.find(name)().close()


def test_it_takes_records_of_kinds_and_values_it_does_not_know(name: str, tmp_path: Path) -> None:
    odd = {"kind": "later", "time": 1e9, "step": 5, "word": "x", "nothing": None, "list": [1]}
    _write(name, tmp_path, [odd, {"kind": "evaluation", "time": 1e9, "step": 5, "loss": 1.0}])


def test_it_does_not_change_the_record(name: str, tmp_path: Path) -> None:
    record = _records(1)[0] | {"mfu": 0.5, "gradient_norm": 1.0}
    copy = dict(record)
    _write(name, tmp_path, [record])
    assert record == copy


def test_training_neither_waits_for_it_nor_loses_a_record(name: str, tmp_path: Path) -> None:
    events = JsonLines(tmp_path / "events.jsonl")
    with Recorder(tmp_path, [name], events=events) as recorder:
        began = time.perf_counter()
        for record in _records(*range(1, 1001)):
            recorder.write(record)
        waited = time.perf_counter() - began
    assert waited < 1.0
    assert list(read_lines(events.path)) == []
    assert sum(map(len, _files(tmp_path).values())) > 10_000


@pytest.mark.parametrize("moment", ["open", "write"])
def test_its_failure_is_an_event_and_the_run_goes_on(
    name: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(SINKS.find(name), moment, fail)
    events = JsonLines(tmp_path / "events.jsonl")
    with Recorder(tmp_path, [name], events=events) as recorder:
        for record in _records(1, 2, 3):
            recorder.write(record)
    (event,) = read_lines(events.path)
    assert (event["kind"], event["sink"], event["reason"]) == (
        "sink_failed",
        name,
        "OSError: no room",
    )


def test_its_slowness_is_not_training_s(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = SINKS.find(name)
    write = kind.write

    def slow(self: Any, record: Mapping[str, Any]) -> None:
        time.sleep(0.02)
        write(self, record)

    monkeypatch.setattr(kind, "write", slow)
    recorder = Recorder(tmp_path, [name], events=JsonLines(tmp_path / "events.jsonl"))
    began = time.perf_counter()
    for record in _records(*range(1, 21)):
        recorder.write(record)
    assert time.perf_counter() - began < 0.2
    recorder.close()
