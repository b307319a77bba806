"""The first pass over a corpus: what there is, what is bad, what is held out.

Every text is hashed once. The hash alone decides where it goes: the smallest hashes are the
validation split, the next ones train the tokenizer when the corpus is larger than that needs. So
copies of a text land on one side wherever they stand, and neither choice depends on file order or
on the number of workers.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from danlu.base.files import atomic_write
from danlu.config.data import SourceConfig
from danlu.data.source import Document, Reject, Source, Unit, build_sources
from danlu.data.workers import Progress

__all__ = [
    "Job",
    "Scan",
    "ScanUnit",
    "Split",
    "choose_split",
    "salt_of",
    "sample_texts",
    "text_hash",
]

Hashes = npt.NDArray[np.uint64]

_ALL = (1 << 64) - 1
_EXACT = 1 << 24
"""Above this number of texts the share of hashes below a limit is as good as a sorted count."""
_KEPT_REJECTS = 1000
_REPORT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """A unit of work with its number in the corpus and the index of its source."""

    number: int
    source: int
    unit: Unit


@dataclass(frozen=True, slots=True)
class Scan:
    """What a unit holds.

    Attributes:
        hashes: of its texts, or parts of texts, in order; shape (n,).
        sizes: their UTF-8 bytes; shape (n,).
        documents: how many texts end in it, without empty ones.
        empty: how many had nothing in them.
        rejected: how many were no text.
        rejects: where and why, of the first thousand.
    """

    hashes: Hashes
    sizes: npt.NDArray[np.int64]
    documents: int
    empty: int
    rejected: int
    rejects: tuple[Reject, ...]

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self.sizes.sum())

    @property
    def digest(self) -> int:
        """A number that another reading of the same texts gives again."""
        return int(self.hashes.sum(dtype=np.uint64))

    def save(self, path: Path) -> None:
        """Writes the scan, whole or not at all."""
        rejects = json.dumps([[r.path, r.reason] for r in self.rejects]).encode()
        with atomic_write(path, "wb") as file:
            np.savez(
                file,
                hashes=self.hashes,
                sizes=self.sizes,
                counts=np.array([self.documents, self.empty, self.rejected]),
                rejects=np.frombuffer(rejects, dtype=np.uint8),
            )

    @classmethod
    def load(cls, path: Path) -> "Scan | None":
        """The scan that `save` wrote; None when there is none, or a damaged one."""
        try:
            with open(path, "rb") as file, np.load(file) as arrays:
                rejects = json.loads(arrays["rejects"].tobytes())
                documents, empty, rejected = arrays["counts"].tolist()
                hashes, sizes = arrays["hashes"], arrays["sizes"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        kept = tuple(Reject(where, reason) for where, reason in rejects)
        return cls(hashes, sizes, documents, empty, rejected, kept)


@dataclass
class _Counter:
    """Collects what becomes a `Scan`."""

    salt: bytes
    hashes: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    documents: int = 0
    empty: int = 0
    rejected: int = 0

    def add(self, item: Document | Reject) -> int:
        """Counts `item`; gives its bytes of text."""
        if isinstance(item, Reject):
            self.rejected += 1
            if len(self.rejects) < _KEPT_REJECTS:
                self.rejects.append(Reject(item.path, _writable(item.reason)))
            return 0
        if not item.text:
            self.empty += 1
            return 0
        data = item.text.encode()
        self.documents += item.last
        self.hashes.append(text_hash(data, self.salt))
        self.sizes.append(len(data))
        return len(data)

    def result(self) -> Scan:
        return Scan(
            np.array(self.hashes, dtype=np.uint64),
            np.array(self.sizes, dtype=np.int64),
            self.documents,
            self.empty,
            self.rejected,
            tuple(self.rejects),
        )


@dataclass(frozen=True)
class ScanUnit:
    """The task that scans a unit and leaves the result in a file, unless it is there already."""

    sources: tuple[SourceConfig, ...]
    folder: Path
    salt: bytes

    def __call__(self, job: Job, progress: Progress) -> None:
        """Scans `job`; `progress` counts bytes of text as the source estimated them."""
        path = self.path(job.number)
        if Scan.load(path) is None:
            counter, unseen = _Counter(self.salt), 0
            for item in self._built[job.source].read_unit(job.unit):
                unseen += counter.add(item)
                if unseen >= _REPORT_BYTES:
                    progress(unseen)
                    unseen = 0
            progress(unseen)
            counter.result().save(path)

    @cached_property
    def _built(self) -> list[Source]:
        return build_sources(self.sources)

    def path(self, number: int) -> Path:
        """Where the result of unit `number` is."""
        return self.folder / f"scan-{number:05d}.npz"


@dataclass(frozen=True, slots=True)
class Split:
    """Where a text goes, by its hash.

    Attributes:
        validation_below: hashes below this are held out.
        sample_upto: other hashes up to this one train the tokenizer.
    """

    validation_below: int
    sample_upto: int = _ALL

    def held_out(self, hash_: int) -> bool:
        """Whether the text belongs to the validation split."""
        return hash_ < self.validation_below

    def in_sample(self, hash_: int) -> bool:
        """Whether the text trains the tokenizer."""
        return self.validation_below <= hash_ <= self.sample_upto


def choose_split(
    scans: Sequence[Scan], fraction: float, *, sampled: Iterable[int], sample_bytes: int
) -> Split:
    """The limits between the hashes of a corpus.

    Args:
        scans: of all units.
        fraction: share of the texts to hold out. At least one text is held out, and one is not,
            when there are two different ones. Copies count, so a text that is most of the corpus
            can make the share larger.
        sampled: which units the tokenizer is trained on.
        sample_bytes: the most text it is trained on; one text at least.
    """
    limit = _validation_limit([scan.hashes for scan in scans], fraction)
    chosen = [scans[index] for index in sampled]
    hashes = np.concatenate([scan.hashes for scan in chosen])
    sizes = np.concatenate([scan.sizes for scan in chosen])[hashes >= np.uint64(limit)]
    hashes = hashes[hashes >= np.uint64(limit)]
    order = np.argsort(hashes)
    fitting = int(np.searchsorted(np.cumsum(sizes[order]), sample_bytes, side="right"))
    if fitting >= len(hashes):
        return Split(limit)
    return Split(limit, int(hashes[order][max(fitting, 1) - 1]))


def _validation_limit(hashes: Sequence[Hashes], fraction: float) -> int:
    count = sum(map(len, hashes))
    if fraction == 0:
        return 0
    if count > _EXACT:
        return int(fraction * 2.0**64)
    values, copies = np.unique(np.concatenate(hashes), return_counts=True)
    if len(values) < 2:
        return 0
    below = np.cumsum(copies)[:-1]
    return int(values[np.abs(below - fraction * count).argmin() + 1])


def salt_of(seed: int) -> bytes:
    """What makes the hashes of one seed differ from those of another."""
    return hashlib.blake2b(str(seed).encode(), digest_size=16).digest()


def text_hash(data: bytes, salt: bytes) -> int:
    """64 bits of BLAKE2b of a text's bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=salt).digest(), "little")


def sample_texts(
    sources: tuple[SourceConfig, ...], jobs: Iterable[Job], split: Split, salt: bytes
) -> Iterator[str]:
    """The texts of `jobs` that train the tokenizer, in order."""
    built = build_sources(sources)
    for job in jobs:
        for item in built[job.source].read_unit(job.unit):
            if isinstance(item, Reject) or not item.text:
                continue
            if split.in_sample(text_hash(item.text.encode(), salt)):
                yield item.text


def _writable(text: str) -> str:
    """`text` on one line of at most 300 characters that UTF-8 can hold."""
    one_line = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return one_line if len(one_line) <= 300 else one_line[:299] + "…"
