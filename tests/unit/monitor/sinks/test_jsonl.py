import json
import math
from pathlib import Path

from danlu.monitor.sinks.jsonl import JsonlSink


def test_every_line_is_json_that_any_reader_takes(tmp_path: Path) -> None:
    sink = JsonlSink()
    sink.open(tmp_path)
    sink.write({"kind": "step", "time": 1.0, "step": 1, "loss": math.nan, "norm": math.inf})
    sink.close()

    def refuse(word: str) -> None:
        raise AssertionError(word)

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    assert record == {"kind": "step", "time": 1.0, "step": 1, "loss": None, "norm": None}


def test_records_after_a_crash_are_not_glued_to_half_a_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "st')
    sink = JsonlSink()
    sink.open(tmp_path)
    sink.write({"kind": "step", "time": 1.0, "step": 1})
    sink.close()
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["step"] == 1
