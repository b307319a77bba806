"""Where text comes from: the one interface that every kind of source fills in.

A source names its files, cuts them into *pieces* of known size, and reads a piece as documents. The
pieces, packed into *units* of about `shard_bytes`, are what worker processes prepare; they depend
on the files alone, never on the number of workers, so every preparation gives the same tokens.
"""

import abc
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from danlu.base.errors import ConfigError, DataError
from danlu.base.registry import Registry
from danlu.config.data import SourceConfig
from danlu.config.load import expand_path

__all__ = [
    "MARK",
    "SOURCES",
    "Document",
    "Piece",
    "Reject",
    "Source",
    "SourceFile",
    "Unit",
    "build_sources",
    "printable",
    "required_path",
]


MARK = ".danlu"
"""A folder that holds this file was made by danlu: what is in it is not text to train on."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was found: what must change for its text to have changed.

    Attributes:
        path: relative to the source, with `/`.
        size: bytes on disk.
        modified: modification time in nanoseconds.
    """

    path: str
    size: int
    modified: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one file that is read at once.

    Attributes:
        path: the file, relative to the source.
        size: bytes of text, or an estimate where the file is compressed.
        start: first byte of plain text, or first row group of Parquet.
        stop: the byte or row group after the last; None is the end of the file.
        cut_above: a text of more bytes than this is cut into parts; 0 is never.
    """

    path: str
    size: int
    start: int = 0
    stop: int | None = None
    cut_above: int = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """Pieces that one worker prepares into one shard of each split."""

    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes of text, estimated where files are compressed."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or a part of one.

    Attributes:
        text: never empty unless the whole document is.
        path: the file it comes from.
        last: whether the document ends here. The end-of-document token follows then, and after
            the last part of it that a shard has.
    """

    text: str
    path: str
    last: bool = True


@dataclass(frozen=True, slots=True)
class Reject:
    """Something that is not text: it is quarantined, and the run goes on.

    Attributes:
        path: the file, with the line or row where there is one.
        reason: what is wrong with it.
    """

    path: str
    reason: str


class Source(abc.ABC):
    """One place that text comes from, of one kind.

    A source is made from its block of the config, once in the process that prepares a corpus and
    once in each of its workers; it must hold nothing that only one of them has.

    Args:
        config: the block.
        key: where the block stands in the config, for error messages.
    """

    def __init__(self, config: SourceConfig, key: str = "data_pipeline.sources[0]") -> None:
        self.config, self.key = config, key

    @property
    def name(self) -> str:
        """The name in reports: `name`, else the path's last part, else the kind."""
        return self.config.name or Path(self.config.path or self.config.type).name or "root"

    @abc.abstractmethod
    def files(self) -> Sequence[SourceFile]:
        """The files there are, sorted by path.

        Raises:
            UserError: the place does not exist or holds no files.
        """

    @abc.abstractmethod
    def pieces(self, size: int) -> Iterator[Piece]:
        """All files, in order, cut into pieces of about `size` bytes where they can be cut.

        Raises:
            UserError: the place does not exist, or a file cannot be this kind of source.
        """

    @abc.abstractmethod
    def read(self, piece: Piece) -> Iterator[Document | Reject]:
        """What a piece holds, in order.

        Raises:
            DataError: a file that is broken as a whole (a cut-off archive), so that what it should
                have held is unknown.
        """

    def units(self, size: int) -> list[Unit]:
        """The pieces packed, in order, into units of at most `size` bytes or one piece."""
        units: list[Unit] = []
        packed: list[Piece] = []
        filled = 0
        for piece in self.pieces(size):
            if packed and filled + piece.size > size:
                units.append(Unit(tuple(packed)))
                packed, filled = [], 0
            packed.append(piece)
            filled += piece.size
        return [*units, Unit(tuple(packed))] if packed else units

    def read_unit(self, unit: Unit) -> Iterator[Document | Reject]:
        """What the pieces of a unit hold, in order."""
        for piece in unit.pieces:
            yield from self.read(piece)


SOURCES: Registry[Source] = Registry("danlu.data.sources", Source, "data_pipeline.sources[].type")
"""All kinds of source; a file in `danlu/data/sources` is one."""


def build_sources(configs: Iterable[SourceConfig]) -> list[Source]:
    """The sources that a config names, in its order.

    Raises:
        ConfigError: a kind that does not exist, or keys that its kind cannot use.
    """
    return [
        SOURCES.find(config.type)(config, f"data_pipeline.sources[{index}]")
        for index, config in enumerate(configs)
    ]


def required_path(config: SourceConfig, key: str) -> Path:
    """The file or folder that a source names, expanded and absolute.

    Raises:
        ConfigError: no path is given.
        DataError: there is nothing at that path, or something that is neither file nor folder.
    """
    if not config.path:
        raise ConfigError(
            f"{key}.path", f"a source of type {config.type} needs a path.", "Write path: FOLDER."
        )
    path = expand_path(config.path, f"{key}.path").absolute()
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise DataError(
            f"{key}.path",
            f"there is no {config.path!r}.",
            f"Check the spelling; a relative path starts at {Path.cwd()}.",
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{key}.path", f"{config.path!r}: {error}.", "Name another path.") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise DataError(
            f"{key}.path", f"{config.path!r} is not a file or folder.", "Name one of these."
        )
    return path


def printable(path: str) -> str:
    """A path as text that can be written as UTF-8, whatever bytes the file system allowed."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
