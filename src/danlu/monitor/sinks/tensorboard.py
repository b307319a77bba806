"""TensorBoard event files in the run's folder; needs the `tensorboard` package, not torch."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from danlu.base.errors import ConfigError
from danlu.monitor.sinks._base import Sink

__all__ = ["TensorboardSink"]

_GROUPS = {"step": "train", "evaluation": "validation"}
_NOT_SCALARS = {"kind", "time", "step", "rank"}
_FLUSH_SECONDS = 10


class TensorboardSink(Sink):
    """Writes `tensorboard/` in the run's folder; look at it with `tensorboard --logdir RUN`.

    A step's numbers become `train/loss`, `train/tokens_per_second` …, an evaluation's
    `validation/loss` ….
    """

    def __init__(self) -> None:
        self._writer: Any = None
        self._resumes = False

    def open(self, folder: Path) -> None:
        """Starts a new event file beside those of the run's earlier lives.

        Raises:
            ConfigError: the `tensorboard` package is not installed.
        """
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(
                "monitor.sinks",
                f"'tensorboard' cannot be used ({error}).",
                "Install it: pip install 'danlu[tensorboard]'",
            ) from None
        target = folder / "tensorboard"
        self._resumes = target.is_dir()
        self._writer = EventFileWriter(str(target), flush_secs=_FLUSH_SECONDS)

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes the record's numbers as scalars at its step."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        assert self._writer is not None, "open() comes before write()"
        step, when = int(record.get("step", 0)), float(record.get("time", time.time()))
        if self._resumes:
            # TensorBoard then drops the steps of the earlier life that this one repeats.
            mark = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(event_pb2.Event(wall_time=when, step=step, session_log=mark))
            self._resumes = False
        kind = str(record.get("kind", "other"))
        values = [
            summary_pb2.Summary.Value(
                tag=f"{_GROUPS.get(kind, kind)}/{name}", simple_value=float(value)
            )
            for name, value in record.items()
            if name not in _NOT_SCALARS and isinstance(value, int | float)
        ]
        summary = summary_pb2.Summary(value=values)
        self._writer.add_event(event_pb2.Event(wall_time=when, step=step, summary=summary))

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
