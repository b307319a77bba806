"""The bytes of a file in pieces of bounded size, whatever it is compressed with."""

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import zstandard

from danlu.base.errors import DataError
from danlu.data.source import printable

__all__ = ["chunks", "chunks_between", "line_range", "lines"]

_CHUNK = 1 << 20
_ZSTD_INPUT = 1 << 13
"""Compressed bytes taken at once: zstd gives up to 32,000 times as many, which must fit."""
_ZSTD_WINDOW = 1 << 31
"""The largest window that `zstd --long` writes."""


def chunks(path: Path) -> Iterator[bytes]:
    """What a file holds, decompressed when its name ends with .gz or .zst.

    Raises:
        OSError: the file cannot be read.
        DataError: its compressed data is corrupt or cut off.
    """
    suffix = path.suffix.lower()
    try:
        with open(path, "rb") as file:
            if suffix == ".zst":
                yield from _zstd_chunks(file)
            elif suffix == ".gz":
                with gzip.open(file) as text:
                    while chunk := text.read(_CHUNK):
                        yield chunk
            else:
                while chunk := file.read(_CHUNK):
                    yield chunk
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError) as error:
        raise DataError(
            printable(str(path)),
            f"the {suffix} data is corrupt or cut off ({error}).",
            "Replace the file, or leave it out with the source's exclude.",
        ) from None


def _zstd_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """All frames of a zstd file; the library's own reader takes a cut-off one for complete."""
    decoder, rest = None, b""
    while data := rest or file.read(_ZSTD_INPUT):
        if decoder is None:
            decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        if chunk := decoder.decompress(data):
            yield chunk
        rest = decoder.unused_data
        if decoder.eof:
            decoder = None
    if decoder is not None:
        raise EOFError("the last frame has no end")


def chunks_between(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """The bytes [begin, end) of an uncompressed file.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        file.seek(begin)
        while chunk := file.read(min(_CHUNK, end - begin)):
            begin += len(chunk)
            yield chunk


def line_range(path: Path, start: int, stop: int | None) -> tuple[int, int, bool]:
    """The bytes [begin, end) of the lines that begin in [start, stop), and whether they are last.

    Ranges that meet cover a file exactly once, whatever the lengths of its lines. Only a range in
    which a line begins is read beyond its stop, so a file without line ends is read once, too.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = _line_begin(file, start, limit=size if stop is None else stop)
        if stop is None:
            return begin, size, True
        end = _line_begin(file, stop, limit=size) if begin < stop else begin
    return begin, end, end == size


def _line_begin(file: IO[bytes], position: int, *, limit: int) -> int:
    """Where the first line that begins at `position` or later begins; `limit` if none before it."""
    if position == 0:
        return 0
    before = file.seek(position - 1)
    while before < limit and (chunk := file.read(min(_CHUNK, limit - before))):
        if (found := chunk.find(b"\n")) >= 0:
            return before + found + 1
        before += len(chunk)
    return limit


def lines(pieces: Iterator[bytes], limit: int) -> Iterator[bytes | None]:
    """The lines in a stream of bytes, without their ends; None for one of more than `limit` bytes.

    Memory stays within a few times `limit` even when there is no line end at all.
    """
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        *whole, rest = piece.split(b"\n")
        for line in whole:
            size += len(line)
            yield b"".join([*held, line]) if size <= limit else None
            held, size = [], 0
        size += len(rest)
        held = [*held, rest] if size <= limit else []
    if size:
        yield b"".join(held) if size <= limit else None
