"""JSON lines: one object a line, its text in one field."""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from danlu.data.source import (
    Document,
    Piece,
    Reject,
    Source,
    SourceFile,
    printable,
    required_path,
)
from danlu.data.sources import _bytes, _files

__all__ = ["JsonLinesText"]

_LONGEST_LINE = 64 << 20
_EXPANSION = 4
_ENDINGS = (".jsonl", ".ndjson", ".json")


class JsonLinesText(Source):
    """A `.jsonl` file or a folder of them, plain or compressed."""

    def files(self) -> tuple[SourceFile, ...]:
        """The files that match `include` and `exclude`; by default .jsonl, .ndjson and .json."""
        return self._files

    @cached_property
    def _files(self) -> tuple[SourceFile, ...]:
        return _files.select(
            self._root,
            key=self.key,
            include=self.config.include,
            exclude=self.config.exclude,
            usual=lambda path: _files.plain_name(path).lower().endswith(_ENDINGS),
        )

    @cached_property
    def _root(self) -> Path:
        return required_path(self.config, self.key)

    def pieces(self, size: int) -> Iterator[Piece]:
        """Ranges of lines of about `size` bytes; a compressed file as a whole."""
        for file in self.files():
            if _files.compressed(file.path):
                yield Piece(file.path, file.size * _EXPANSION)
                continue
            for start in range(0, max(file.size, 1), size):
                stop = start + size if start + size < file.size else None
                yield Piece(file.path, min(size, file.size - start), start=start, stop=stop)

    def read(self, piece: Piece) -> Iterator[Document | Reject]:
        """The texts of a piece's lines; a line without one is rejected by its number."""
        path = self._root if self._root.is_file() else self._root / piece.path
        try:
            yield from self._read(path, piece)
        except OSError as error:
            yield Reject(printable(piece.path), f"it cannot be read ({error.strerror})")

    def _read(self, path: Path, piece: Piece) -> Iterator[Document | Reject]:
        begin = 0
        if _files.compressed(piece.path):
            stream = _bytes.chunks(path)
        else:
            begin, end, _ = _bytes.line_range(path, piece.start, piece.stop)
            stream = _bytes.chunks_between(path, begin, end)
        before: int | None = None if begin else 0
        for index, line in enumerate(_bytes.lines(stream, _LONGEST_LINE)):
            text, problem = self._text(line, first=begin == 0 and index == 0)
            if not problem:
                if text is not None:
                    yield Document(text, piece.path)
                continue
            if before is None:  # counted only when there is something to point at
                before = sum(c.count(b"\n") for c in _bytes.chunks_between(path, 0, begin))
            yield Reject(f"{printable(piece.path)}:{before + index + 1}", problem)

    def _text(self, line: bytes | None, *, first: bool) -> tuple[str | None, str]:
        """The text of a line, None for a blank one, and what is wrong with it, or nothing."""
        if line is None:
            return None, f"the line is longer than {_LONGEST_LINE >> 20} MiB"
        if first:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            return None, ""
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError as error:
            return None, f"it is not UTF-8 (byte 0x{line[error.start]:02x} at {error.start})"
        except (ValueError, RecursionError) as error:
            return None, f"it is not JSON ({error})"
        return self._field(value)

    def _field(self, value: object) -> tuple[str | None, str]:
        name = self.config.text_field
        if not isinstance(value, dict):
            return None, f"it is not an object with fields but {_kind(value)}"
        if name not in value:
            there = ", ".join(sorted(value)[:8]) or "none"
            return None, f"there is no field {name!r} (fields: {there})"
        text = value[name]
        if text is None:
            return "", ""
        if not isinstance(text, str):
            return None, f"field {name!r} is not text but {_kind(text)}"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return None, f"field {name!r} holds half a character (at {error.start})"
        return text, ""


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "null")
