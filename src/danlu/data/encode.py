"""The second pass: a unit's texts become one token shard of each split."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from danlu.base.errors import DataError
from danlu.base.files import write_json
from danlu.config.data import SourceConfig
from danlu.data.manifest import ShardRecord, SplitName
from danlu.data.scan import Job, Split, text_hash
from danlu.data.shards import ShardWriter, open_shard, write_shard
from danlu.data.source import Document, Reject, Source, build_sources
from danlu.data.tokenizer import Ids, Tokenizer
from danlu.data.workers import Progress

__all__ = ["EncodeJob", "EncodeUnit"]

_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """A unit, and what its scan found (`bytes`, `digest`): it must still be so."""

    job: Job
    bytes: int
    digest: int


@dataclass(frozen=True)
class EncodeUnit:
    """The task that writes a unit's shards and, after them, a record of what they hold.

    A unit whose record and shards are there and whole is not done again.

    Args:
        sources: the config's.
        folder: of the corpus; it holds the tokenizer.
        work: the folder for records.
        split: which texts are held out.
        salt: of the texts' hashes.
    """

    sources: tuple[SourceConfig, ...]
    folder: Path
    work: Path
    split: Split
    salt: bytes

    @cached_property
    def _built(self) -> list[Source]:
        return build_sources(self.sources)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    def __call__(self, item: EncodeJob, progress: Progress) -> tuple[ShardRecord, ...]:
        """The records of the unit's shards; `progress` counts bytes of text."""
        path = self.work / f"unit-{item.job.number:05d}.json"
        done = self._finished(path)
        if done is not None:
            progress(item.bytes)
            return done
        records = self._encode(item, progress)
        write_json(path, [asdict(record) for record in records])
        return records

    def _finished(self, path: Path) -> tuple[ShardRecord, ...] | None:
        """The records of a unit that an earlier run finished, once its shards are verified."""
        try:
            records = tuple(ShardRecord(**record) for record in json.loads(path.read_bytes()))
            for record in records:
                shard = open_shard(self.folder / record.name)
                shard.verify()
                if f"{shard.crc:08x}" != record.crc or shard.length != record.tokens:
                    return None
                if shard.tokenizer != self._tokenizer.fingerprint:
                    return None
        except (OSError, ValueError, TypeError, DataError):
            return None
        return records

    def _encode(self, item: EncodeJob, progress: Progress) -> tuple[ShardRecord, ...]:
        source = self._built[item.job.source]
        bytes_ = digest = 0
        with contextlib.ExitStack() as stack:
            train = _Side("train", item.job, self.folder, self._tokenizer, stack)
            validation = _Side("validation", item.job, self.folder, self._tokenizer, stack)
            for batch in _batches(source.read_unit(item.job.unit)):
                encoded = self._tokenizer.encode_batch([document.text for document in batch])
                before = bytes_
                for document, ids in zip(batch, encoded, strict=True):
                    data = document.text.encode()
                    hash_ = text_hash(data, self.salt)
                    side = validation if self.split.held_out(hash_) else train
                    side.add(document, ids, len(data))
                    bytes_, digest = bytes_ + len(data), digest + hash_
                progress(bytes_ - before)
            for side in (train, validation):
                side.finish()
            if (bytes_, digest % (1 << 64)) != (item.bytes, item.digest):
                raise DataError(
                    source.key,
                    "its files changed while they were being prepared.",
                    "Run again when nothing writes to them.",
                )
        return tuple(side.record() for side in (train, validation) if side.writer)


class _Side:
    """The shard of one split of a unit; there is none until a text goes to it.

    The end token follows the last part of a document that *this shard* has, so that what comes
    next, here or in the next shard, is never glued to it.
    """

    def __init__(
        self,
        split: SplitName,
        job: Job,
        folder: Path,
        tokenizer: Tokenizer,
        stack: contextlib.ExitStack,
    ) -> None:
        self.writer: ShardWriter | None = None
        self._name, self._split, self._source = f"{split}-{job.number:05d}.bin", split, job.source
        self._folder, self._tokenizer, self._stack = folder, tokenizer, stack
        self._bytes = self._documents = 0
        self._unended: str | None = None

    def add(self, document: Document, ids: Ids, size: int) -> None:
        if self.writer is None:
            dtype, tokenizer = self._tokenizer.dtype, self._tokenizer.fingerprint
            path = self._folder / self._name
            self.writer = self._stack.enter_context(
                write_shard(path, dtype=dtype, tokenizer=tokenizer)
            )
        if self._unended not in (None, document.path):
            self._end()
        self.writer.write(ids)
        self._bytes += size
        self._unended = document.path
        if document.last:
            self._end()

    def _end(self) -> None:
        assert self.writer is not None
        self.writer.write(np.array([self._tokenizer.end], self._tokenizer.dtype))
        self._documents += 1
        self._unended = None

    def finish(self) -> None:
        """Ends the document that is still open."""
        if self._unended is not None:
            self._end()

    def record(self) -> ShardRecord:
        assert self.writer is not None
        return ShardRecord(
            self._name,
            self._split,
            self._source,
            self.writer.length,
            self._bytes,
            self._documents,
            f"{self.writer.crc:08x}",
        )


def _batches(items: Iterable[Document | Reject]) -> Iterator[list[Document]]:
    """The texts among `items`, some megabytes at a time."""
    batch: list[Document] = []
    size = 0
    for item in items:
        if isinstance(item, Document) and item.text:
            batch.append(item)
            size += len(item.text)
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
