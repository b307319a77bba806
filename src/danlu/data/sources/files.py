"""A file, or a folder of text and code: a file is a document.

A file that is more than 1/64 of its source is cut at paragraph or line ends into parts of at most
16 KiB. One book in one file would otherwise be one document, with nothing left to hold out for
validation; a folder of many files keeps them whole. Only the last part ends the document.
"""

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

__all__ = ["Files", "read_text"]

PART_BYTES = 16 << 10
_LONGEST_DOCUMENT = 1 << 20
_LARGEST_READ = 64 << 20
_EXPANSION = 4
"""Bytes of text guessed for one compressed byte, to balance the work."""

_BINARY_ENDINGS = """
    7z a ai aac arrow avi avif bin bmp bz2 cab ckpt class dat db deb dll dmg doc docx dylib
    egg eot eps exe feather flac flv gguf gif h5 hdf5 heic icns ico iso jar jpeg jpg lib lz4
    lzma m4a mid mkv mo mov mp3 mp4 mpeg mpg msi npy npz o obj odp ods odt ogg onnx orc otf
    parquet pb pdf pickle pkl png ppt pptx psd pt pth pyc pyd pyo rar rpm safetensors snap so
    sqlite sqlite3 swf tar tbz2 tgz tif tiff ttf txz wasm wav webm webp whl wma wmv woff woff2
    xls xlsx xz zip
"""
_NOT_TEXT = frozenset(_BINARY_ENDINGS.split())
"""Endings of files that hold no text; `include` reads them all the same."""


class Files(Source):
    """Text files below a folder, or one file, plain or compressed."""

    def files(self) -> tuple[SourceFile, ...]:
        """The files that match `include` and `exclude`; by default all but known binary kinds."""
        return self._files

    @cached_property
    def _files(self) -> tuple[SourceFile, ...]:
        return _files.select(
            self._root,
            key=self.key,
            include=self.config.include,
            exclude=self.config.exclude,
            usual=_may_be_text,
        )

    @cached_property
    def _root(self) -> Path:
        return required_path(self.config, self.key)

    def pieces(self, size: int) -> Iterator[Piece]:
        """Whole files; a plain one of more than `size` (or 64 MiB) bytes as ranges of lines."""
        sizes = [_text_size(file) for file in self.files()]
        cut_above = min(max(sum(sizes) // 64, PART_BYTES), _LONGEST_DOCUMENT)
        size = min(size, _LARGEST_READ)
        for file, bytes_ in zip(self.files(), sizes, strict=True):
            if bytes_ <= size or _files.compressed(file.path):
                yield Piece(file.path, bytes_, cut_above=cut_above)
                continue
            for start in range(0, bytes_, size):
                stop = start + size if start + size < bytes_ else None
                length = min(size, bytes_ - start)
                yield Piece(file.path, length, start=start, stop=stop, cut_above=cut_above)

    def read(self, piece: Piece) -> Iterator[Document | Reject]:
        """The text of a piece; a file that is not UTF-8 text is rejected whole if it fits."""
        path = self._root if self._root.is_file() else self._root / piece.path
        yield from read_text(path, piece)


def read_text(path: Path, piece: Piece) -> Iterator[Document | Reject]:
    """The document, or parts of one, in a piece of a text file at `path`.

    What is not UTF-8 text is rejected: the whole file, or, where a file is too large to be held
    (compressed, or cut into ranges), all that follows the first bad part.

    Raises:
        DataError: compressed data is corrupt or cut off.
    """
    try:
        yield from _read_text(path, piece)
    except OSError as error:
        yield Reject(printable(piece.path), f"it cannot be read ({error.strerror})")


def _read_text(path: Path, piece: Piece) -> Iterator[Document | Reject]:
    position, ends = 0, True
    ranged = piece.start > 0 or piece.stop is not None
    if ranged:
        position, end, ends = _bytes.line_range(path, piece.start, piece.stop)
        if position == end:
            return
        stream = _bytes.chunks_between(path, position, end)
    elif _files.compressed(piece.path):
        stream = _bytes.chunks(path)
    else:
        data = path.read_bytes()
        if problem := _problem(data):
            yield Reject(printable(piece.path), problem)
            return
        stream = iter([data])
    for part, last in _parts(stream, cut_above=-1 if ranged else piece.cut_above):
        if problem := _problem(part):
            yield Reject(f"{printable(piece.path)} from byte {position} on", problem)
            return
        text = part.decode().removeprefix("\ufeff" if position == 0 else "")
        yield Document(text, piece.path, last and ends)
        position += len(part)


def _parts(stream: Iterator[bytes], *, cut_above: int) -> Iterator[tuple[bytes, bool]]:
    """The bytes of `stream`, in parts when they are more than `cut_above`, each with "is last"."""
    held, cutting = b"", cut_above < 0
    for chunk in stream:
        held += chunk
        cutting = cutting or len(held) > cut_above > 0
        done = 0
        while cutting and len(held) - done > PART_BYTES:
            cut = _cut(held, done)
            yield held[done:cut], False
            done = cut
        held = held[done:]
    yield held, True


def _cut(data: bytes, start: int) -> int:
    """Where a part that begins at `start` ends: after a paragraph, else a line, word, character."""
    stop = start + PART_BYTES
    for mark, earliest in ((b"\n\n", stop - PART_BYTES // 2), (b"\n", start), (b" ", start)):
        found = data.rfind(mark, earliest, stop)
        if found >= 0:
            return found + len(mark)
    while stop > start + 1 and data[stop] & 0xC0 == 0x80:  # the middle of a character
        stop -= 1
    return stop


def _problem(data: bytes) -> str:
    """Why `data` is not text, or nothing."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it is not UTF-8 (it looks like UTF-16)"
    if (zero := data.find(b"\0")) >= 0:
        return f"it is not text (a zero byte at {zero})"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 (byte 0x{data[error.start]:02x} at {error.start})"
    return ""


def _text_size(file: SourceFile) -> int:
    return file.size * (_EXPANSION if _files.compressed(file.path) else 1)


def _may_be_text(path: str) -> bool:
    name = _files.plain_name(path).rsplit("/", 1)[-1]
    return "." not in name or name.rsplit(".", 1)[-1].lower() not in _NOT_TEXT
