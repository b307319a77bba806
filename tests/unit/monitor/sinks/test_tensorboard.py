import math
import sys
from pathlib import Path

import pytest

from danlu.base.errors import ConfigError
from danlu.monitor.sinks.tensorboard import TensorboardSink

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def record(folder: Path, *steps: int, loss: float = 3.0) -> None:
    sink = TensorboardSink()
    sink.open(folder)
    for step in steps:
        values = {"loss": loss, "mfu": None, "tokens": 100, "note": "x"}
        sink.write({"kind": "step", "time": 1e9 + step, "step": step, **values})
    sink.write({"kind": "evaluation", "time": 2e9, "step": steps[-1], "bits_per_byte": 1.2})
    sink.close()


def scalars(folder: Path, tag: str) -> dict[int, float]:
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {e.step: e.value for e in events.Scalars(tag)}


def test_numbers_become_scalars(tmp_path: Path) -> None:
    record(tmp_path, 1, 2, 3)
    assert scalars(tmp_path, "train/loss") == {1: 3.0, 2: 3.0, 3: 3.0}
    assert scalars(tmp_path, "train/tokens") == {1: 100.0, 2: 100.0, 3: 100.0}
    assert scalars(tmp_path, "validation/bits_per_byte") == {3: pytest.approx(1.2)}


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    record(tmp_path, 1, 2, 3, 4, loss=3.0)
    record(tmp_path, 3, loss=2.0)
    assert scalars(tmp_path, "train/loss") == {1: 3.0, 2: 3.0, 3: 2.0}


def test_a_loss_that_is_not_finite_is_taken(tmp_path: Path) -> None:
    record(tmp_path, 1, loss=math.nan)
    assert math.isnan(scalars(tmp_path, "train/loss")[1])


def test_without_the_package_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(ConfigError, match=r"pip install 'danlu\[tensorboard\]'"):
        TensorboardSink().open(tmp_path)
    assert not (tmp_path / "tensorboard").exists()
