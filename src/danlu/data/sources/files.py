"""A file, or a folder of text and code: a file is a document.

A file that is more than 1/64 of its source is cut at paragraph or line ends into parts of at most
16 KiB. One book in one file would otherwise be one document, with nothing left to hold out for
validation; a folder of many files keeps them whole. Only the last part ends the document.
"""

import contextlib
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
_EXPANSION = 4
"""Bytes of text guessed for one compressed byte, to balance the work."""

_NOT_TEXT = frozenset(
    """
    7z a ai aac arrow avi avif bin bmp bz2 cab ckpt class dat db deb dll dmg doc docx dylib egg eot
    eps exe feather flac flv gguf gif h5 hdf5 heic icns ico iso jar jpeg jpg lib lz4 lzma m4a mid
    mkv mo mov mp3 mp4 mpeg mpg msi npy npz o obj odp ods odt ogg onnx orc otf parquet pb pdf pickle
    pkl png ppt pptx psd pt pth pyc pyd pyo rar rpm safetensors snap so sqlite sqlite3 swf tar tbz2
    tgz tif tiff ttf txz wasm wav webm webp whl wma wmv woff woff2 xls xlsx xz zip
    """.split()
)
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
        """Whole files; a plain one of more than `size` bytes as ranges of lines."""
        sizes = [_text_size(file) for file in self.files()]
        cut_above = min(max(sum(sizes) // 64, PART_BYTES), _LONGEST_DOCUMENT)
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
    """The documents, or parts of one, in a piece of a text file at `path`.

    What is not UTF-8 text is rejected: the whole file, or, where a file is too large to be held
    (compressed, or more than one unit), all that follows the first bad part.

    Raises:
        DataError: compressed data is corrupt or cut off.
    """
    ranged = piece.start > 0 or piece.stop is not None
    try:
        if ranged:
            stream = _bytes.chunks_of_lines(path, piece.start, piece.stop)
        elif _files.compressed(piece.path):
            stream = _bytes.chunks(path)
        else:
            stream = iter([path.read_bytes()])
        ends = piece.stop is None
        with contextlib.closing(_parts(stream, piece.cut_above)) as parts:
            whole = list(parts) if not ranged and not _files.compressed(piece.path) else parts
        yield from _decoded(whole, piece)
    except OSError as error:
        yield Reject(printable(piece.path), f"it cannot be read: {error.strerror}")
