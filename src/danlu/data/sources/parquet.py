"""Parquet files: a row is a document, its text in one column."""

import contextlib
import errno
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from danlu.base.errors import ConfigError, DataError
from danlu.data.source import (
    Document,
    Piece,
    Reject,
    Source,
    SourceFile,
    printable,
    required_path,
)
from danlu.data.sources import _files

__all__ = ["Parquet"]

_ENDINGS = (".parquet", ".pq")
_ROWS = 1024


class Parquet(Source):
    """A `.parquet` file or a folder of them."""

    def files(self) -> tuple[SourceFile, ...]:
        """The files that match `include` and `exclude`; by default .parquet and .pq."""
        return self._files

    @cached_property
    def _files(self) -> tuple[SourceFile, ...]:
        return _files.select(
            self._root,
            key=self.key,
            include=self.config.include,
            exclude=self.config.exclude,
            usual=lambda path: path.lower().endswith(_ENDINGS),
        )

    @cached_property
    def _root(self) -> Path:
        return required_path(self.config, self.key)

    def _path(self, file: SourceFile | Piece) -> Path:
        return self._root if self._root.is_file() else self._root / file.path

    def pieces(self, size: int) -> Iterator[Piece]:
        """Runs of row groups of about `size` bytes of text, uncompressed.

        Raises:
            ConfigError: pyarrow is missing, or a file has no such column of text.
            DataError: a file is no Parquet, or is cut off.
        """
        for file in self.files():
            try:
                with self._opened(self._path(file)) as opened:
                    sizes = self._row_group_sizes(opened)
            except OSError:  # a link to nowhere: reading it says so
                yield Piece(file.path, 0)
                continue
            start = filled = 0
            for index, bytes_ in enumerate(sizes):
                if index > start and filled + bytes_ > size:
                    yield Piece(file.path, filled, start=start, stop=index)
                    start, filled = index, 0
                filled += bytes_
            yield Piece(file.path, filled, start=start, stop=len(sizes))

    def _row_group_sizes(self, opened: Any) -> list[int]:
        """Bytes of text in each row group, after a check that the column holds text."""
        self._check_column(opened)
        metadata, name = opened.metadata, self.config.text_field
        column = [metadata.schema.column(i).path for i in range(len(metadata.schema))].index(name)
        return [
            metadata.row_group(i).column(column).total_uncompressed_size
            for i in range(metadata.num_row_groups)
        ]

    def _check_column(self, opened: Any) -> None:
        import pyarrow as pa

        schema, name = opened.schema_arrow, self.config.text_field
        texts = {f.name for f in schema if _holds_text(pa, f.type)}
        if name not in texts:
            there = ", ".join(sorted(texts)) or "none"
            problem = "is not text" if name in schema.names else "does not exist"
            raise ConfigError(
                f"{self.key}.text_field",
                f"column {name!r} {problem} in {self.name}.",
                f"Its columns of text: {there}.",
            )

    def read(self, piece: Piece) -> Iterator[Document | Reject]:
        """The texts of a piece's rows; null is no document."""
        name, groups = self.config.text_field, range(piece.start, piece.stop or 0)
        row = 0
        try:
            with self._opened(self._path(piece)) as opened:
                before = sum(opened.metadata.row_group(i).num_rows for i in range(piece.start))
                batches = opened.iter_batches(
                    _ROWS, row_groups=list(groups), columns=[name], use_threads=False
                )
                for data in _values(batches):
                    row += 1
                    where = f"{printable(piece.path)}:{before + row}"
                    yield _document(data or b"", piece.path, where)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            yield Reject(printable(piece.path), f"it cannot be read ({reason})")

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        """The open file; whatever pyarrow finds wrong with it is one clear line.

        Raises:
            OSError: there is no file, or only a link to nowhere.
        """
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise ConfigError(
                f"{self.key}.type", "parquet needs pyarrow.", "pip install 'danlu[parquet]'"
            ) from None
        try:
            with pq.ParquetFile(path) as opened:
                yield opened
        except PermissionError as error:
            raise DataError(
                printable(str(path)), f"{error.strerror}.", "Make it readable."
            ) from None
        except (pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None) in (errno.ENOENT, errno.ELOOP):
                raise
            raise DataError(
                printable(str(path)),
                f"the Parquet data is corrupt or cut off ({_first_line(error)}).",
                "Replace the file, or leave it out with the source's exclude.",
            ) from None


def _holds_text(pa: Any, type_: Any) -> bool:
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    tests = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary")
    return any(getattr(pa.types, test)(type_) for test in tests if hasattr(pa.types, test))


def _values(batches: Iterator[Any]) -> Iterator[bytes | None]:
    """The raw bytes of each row, not yet trusted to be UTF-8."""
    import pyarrow as pa

    for batch in batches:
        column = batch.column(0)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        yield from column.cast(pa.large_binary()).to_pylist()


def _document(data: bytes, path: str, where: str) -> Document | Reject:
    try:
        return Document(data.decode(), path)
    except UnicodeDecodeError as error:
        return Reject(where, f"it is not UTF-8 (byte 0x{data[error.start]:02x} at {error.start})")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
