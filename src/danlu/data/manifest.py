"""What a prepared corpus is: `manifest.json`, written last, so that with it the corpus is whole."""

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from danlu.base.errors import DataError
from danlu.base.files import write_json
from danlu.config.run import fingerprint

__all__ = ["FORMAT", "Manifest", "ShardRecord", "SourceRecord", "SplitName", "danlu_version"]

FORMAT = 1
"""Of the folder as a whole; another number is prepared again."""

SplitName = Literal["train", "validation"]

_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A token shard: file, split, index of its source, and what is in it."""

    name: str
    split: SplitName
    source: int
    tokens: int
    bytes: int
    documents: int
    crc: str


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """What was read from a source (`bytes` of UTF-8 text) and what was not.

    `digest` is a checksum of all its texts, in any order.
    """

    name: str
    type: str
    files: int
    documents: int
    empty: int
    rejected: int
    bytes: int
    tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A corpus in numbers.

    Attributes:
        made_from: a fingerprint of each thing that decides what the corpus is (`sources`, `files`,
            `tokenizer`, `split`, `shards`), so that a difference can be named.
        tokenizer: its `type`, `size` and `fingerprint`.
        split: `validation_fraction`, `seed`, and the hash `validation_below` which texts are held
            out.
    """

    made_from: Mapping[str, str]
    tokenizer: Mapping[str, Any]
    split: Mapping[str, Any]
    sources: tuple[SourceRecord, ...]
    shards: tuple[ShardRecord, ...]

    def total(self, split: SplitName, what: Literal["tokens", "bytes", "documents"]) -> int:
        """The sum of a number over the shards of a split."""
        return sum(getattr(shard, what) for shard in self.shards if shard.split == split)

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that name the very tokens in their order."""
        shards = [[s.split, s.tokens, s.crc] for s in self.shards]
        return fingerprint([self.tokenizer["fingerprint"], shards])

    def write(self, folder: Path) -> None:
        """Writes `manifest.json` into `folder`; from then on the corpus counts as complete."""
        splits: tuple[SplitName, SplitName] = ("train", "validation")
        totals = {
            split: {what: self.total(split, what) for what in ("tokens", "bytes", "documents")}
            for split in splits
        }
        head = {"format": FORMAT, "danlu": danlu_version(), "fingerprint": self.fingerprint}
        write_json(folder / _NAME, head | {"totals": totals} | asdict(self))

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether `folder` holds a complete corpus."""
        return (folder / _NAME).is_file()

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest in `folder`.

        Raises:
            DataError: there is none, or it is broken, or of another format.
        """
        path = folder / _NAME
        if not path.is_file():
            raise DataError(str(folder), "there is no prepared corpus here.", "Run danlu prepare.")
        again = "Delete the folder and run danlu prepare again."
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if value["format"] != FORMAT:
                problem = f"format {value['format']} is not this danlu's ({FORMAT})."
                raise DataError(str(path), problem, again)
            return cls(
                made_from=dict(value["made_from"]),
                tokenizer=dict(value["tokenizer"]),
                split=dict(value["split"]),
                sources=tuple(SourceRecord(**source) for source in value["sources"]),
                shards=tuple(ShardRecord(**shard) for shard in value["shards"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                str(path), f"this is no manifest of a corpus ({error!r}).", again
            ) from None


def danlu_version() -> str:
    """The installed version of danlu; `unknown` when it runs from a folder."""
    try:
        return importlib.metadata.version("danlu")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
