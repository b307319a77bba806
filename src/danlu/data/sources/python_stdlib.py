"""The sources of the Python that runs danlu: 11 MB of real text on every machine, no download."""

import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from danlu.base.errors import ConfigError, DataError
from danlu.data.source import Document, Piece, Reject, Source, SourceFile
from danlu.data.sources import _files
from danlu.data.sources.files import read_text

__all__ = ["PythonStdlib"]

_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")
"""Installed packages differ between machines; tests and the two big applications are mostly data
and would double the corpus."""


class PythonStdlib(Source):
    """The standard library's modules, one document each (about 600)."""

    def files(self) -> tuple[SourceFile, ...]:
        """The library's own `.py` files, without installed packages and tests."""
        return self._files

    @cached_property
    def _files(self) -> tuple[SourceFile, ...]:
        if self.config.path is not None:
            raise ConfigError(
                f"{self.key}.path", "python_stdlib has its own path.", "Leave it out."
            )
        if not self._root.is_dir():
            raise DataError(
                f"{self.key}.type",
                f"this Python has no library sources at {self._root}.",
                "Use a source of type files.",
            )
        return _files.select(
            self._root,
            key=self.key,
            include=self.config.include or ("*.py",),
            exclude=(*_LEFT_OUT, *self.config.exclude),
            usual=lambda path: False,
        )

    @cached_property
    def _root(self) -> Path:
        return Path(sysconfig.get_path("stdlib"))

    def pieces(self, size: int) -> Iterator[Piece]:
        """One piece a module."""
        return (Piece(file.path, file.size) for file in self.files())

    def read(self, piece: Piece) -> Iterator[Document | Reject]:
        """The text of a module."""
        return read_text(self._root / piece.path, piece)
