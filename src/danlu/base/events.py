"""The run's log of what happened and why: one JSON object a line, appended, never rewritten.

`events.jsonl` holds decisions and incidents (a resume, a checkpoint, a NaN, a changed setting),
`metrics.jsonl` holds numbers over steps. Both are read with `read_lines`, which forgives the one
thing a crash can leave behind: a last line without its end.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["JsonLines", "read_lines"]


class JsonLines:
    """An append-only file of JSON objects. Every line reaches the operating system at once.

    Args:
        path: the file; made with its folder at the first line.
        rank: written into each line when not 0, so that files of many ranks can be merged.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path, self.rank = path, rank
        self._handle: int | None = None

    def write(self, **fields: Any) -> None:
        """Appends one object with the current time (`time`, Unix seconds) and `fields`."""
        line: dict[str, Any] = {"time": round(time.time(), 3)}
        if self.rank:
            line["rank"] = self.rank
        text = json.dumps(line | fields, ensure_ascii=False, default=str)
        if self._handle is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._finish_broken_line()
        os.write(self._handle, (text + "\n").encode())

    def _finish_broken_line(self) -> None:
        """A crash can leave a line without its end; what follows must not be glued to it."""
        size = self.path.stat().st_size
        if size and self._handle is not None:
            with open(self.path, "rb") as file:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    os.write(self._handle, b"\n")

    def close(self) -> None:
        """Closes the file; a later `write` opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file in order, without broken lines; no file, no lines."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value
