"""A prepared corpus, opened: its numbers, its tokenizer, and its tokens as two long streams."""

import bisect
import itertools
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from danlu.base.errors import DataError
from danlu.base.facts import DataFacts
from danlu.data.manifest import Manifest, ShardRecord, SplitName
from danlu.data.shards import Shard, open_shard
from danlu.data.tokenizer import Tokenizer

__all__ = ["Corpus", "TokenStream"]

_MOST_OPEN = 64
"""Shards mapped at once: each takes a file handle, of which a process may have only 256."""


class TokenStream:
    """Shards read as one sequence of tokens. Safe to read from several threads.

    Args:
        shards: in their order.
        dtype: of what is read; that of the shards.
    """

    def __init__(self, shards: Sequence[Shard], dtype: np.dtype[Any]) -> None:
        self._shards = tuple(shards)
        self._ends = list(itertools.accumulate(shard.length for shard in shards))
        self.dtype = dtype
        self._mapped = lru_cache(maxsize=_MOST_OPEN)(self._map)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _map(self, index: int) -> npt.NDArray[Any]:
        return self._shards[index].tokens()

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """A copy of tokens start … start + count - 1, across shards; shape (count,)."""
        assert min(start, count) >= 0, "outside the stream"
        assert start + count <= len(self), "outside the stream"
        tokens = np.empty(count, dtype=self.dtype)
        index, filled = bisect.bisect_right(self._ends, start), 0
        while filled < count:
            shard = self._mapped(index)
            begin = start + filled - (self._ends[index] - len(shard))
            part = shard[begin : begin + count - filled]
            tokens[filled : filled + len(part)] = part
            filled, index = filled + len(part), index + 1
        return tokens


class Corpus:
    """A folder of token shards with its manifest. Made by `prepare`, opened by `Corpus.open`.

    Attributes:
        folder: where it is.
        manifest: what was read, and every shard.
        tokenizer: the one that made the shards.
        facts: the corpus in numbers.
        fingerprint: twelve hex digits that name the very tokens in their order; a resumed run
            compares it.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, tokenizer: Tokenizer, shards: Sequence[Shard]
    ) -> None:
        self.folder, self.manifest, self.tokenizer = folder, manifest, tokenizer
        self.fingerprint = manifest.fingerprint
        self._shards = tuple(shards)
        self.facts = DataFacts(
            train_tokens=manifest.total("train", "tokens"),
            validation_tokens=manifest.total("validation", "tokens"),
            train_bytes=manifest.total("train", "bytes"),
            validation_bytes=manifest.total("validation", "bytes"),
            documents=sum(source.documents for source in manifest.sources),
            vocab_size=tokenizer.size,
            tokenizer=f"{manifest.tokenizer['type']}:{tokenizer.fingerprint}",
        )

    @property
    def left_out(self) -> str:
        """A sentence on the texts that cannot be read (not UTF-8, broken records); "" for none."""
        count = sum(source.rejected for source in self.manifest.sources)
        if not count:
            return ""
        texts = "1 text" if count == 1 else f"{count} texts"
        return f"{texts} cannot be read and left out: {self.folder / 'quarantine.jsonl'}"

    @classmethod
    def open(cls, folder: Path) -> "Corpus":
        """Opens a prepared corpus: reads the manifest and looks at the head of each shard.

        Raises:
            DataError: there is no complete corpus, a shard is missing, cut off or not the one of
                the manifest, or the tokenizer is not the one of the shards.
        """
        manifest = Manifest.read(folder)
        tokenizer = Tokenizer.load(folder)
        if tokenizer.fingerprint != manifest.tokenizer["fingerprint"]:
            raise DataError(
                str(folder / "tokenizer.json"),
                "this is not the tokenizer that made the token shards.",
                "Put the right one back, or delete the folder and run danlu prepare again.",
            )
        shards = [_checked(folder, record, tokenizer) for record in manifest.shards]
        return cls(folder, manifest, tokenizer, shards)

    def stream(self, split: SplitName) -> TokenStream:
        """The tokens of a split; an empty stream when nothing was held out."""
        records = zip(self._shards, self.manifest.shards, strict=True)
        return TokenStream(
            [shard for shard, record in records if record.split == split], self.tokenizer.dtype
        )

    def verify(self) -> None:
        """Reads every token and compares checksums.

        Raises:
            DataError: a shard is damaged.
        """
        for shard in self._shards:
            shard.verify()


def _checked(folder: Path, record: ShardRecord, tokenizer: Tokenizer) -> Shard:
    shard = open_shard(folder / record.name)
    if shard.tokenizer != tokenizer.fingerprint:
        problem = "was made by another tokenizer than the one beside it."
    elif shard.length != record.tokens or f"{shard.crc:08x}" != record.crc:
        problem = "is not the shard that the manifest names."
    else:
        return shard
    raise DataError(str(shard.path), problem, "Delete the folder and run danlu prepare again.")
