"""`metrics.jsonl`: one JSON object a record, the file that the report and `danlu watch` read."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from danlu.base.events import JsonLines
from danlu.monitor.sinks._base import Sink

__all__ = ["JsonlSink"]


class JsonlSink(Sink):
    """Appends to `metrics.jsonl` in the run's folder.

    A number that is not finite is written as null: `NaN` is not JSON, and a reader other than
    Python's would stop there.
    """

    def __init__(self) -> None:
        self._lines: JsonLines | None = None

    def open(self, folder: Path) -> None:
        """Names the file; it appears with the first record."""
        self._lines = JsonLines(folder / "metrics.jsonl")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line, which reaches the operating system at once."""
        assert self._lines is not None, "open() comes before write()"
        self._lines.write(**{key: _finite(value) for key, value in record.items()})

    def close(self) -> None:
        """Closes the file."""
        if self._lines is not None:
            self._lines.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
