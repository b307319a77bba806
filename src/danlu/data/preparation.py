"""The steps that make a corpus, each of which goes on where an earlier run ended."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from danlu.base.errors import DataError
from danlu.base.files import atomic_write, write_json
from danlu.config.data import DataConfig
from danlu.data.encode import EncodeJob, EncodeUnit
from danlu.data.manifest import Manifest, ShardRecord, SourceRecord
from danlu.data.scan import Job, Scan, ScanUnit, Split, choose_split, salt_of, sample_texts
from danlu.data.source import Source
from danlu.data.tokenizer import Tokenizer, configured_tokenizer, tokenizer_threads
from danlu.data.workers import Workers
from danlu.hardware.cluster import usable_cpus

__all__ = ["Preparation", "PrepareStep", "Watch"]

_SAMPLED_UNITS = 64
"""A tokenizer's sample comes from about this many units, evenly spread over the corpus: enough
variety, and no third reading of terabytes."""


@dataclass(frozen=True, slots=True)
class PrepareStep:
    """How far a preparation is.

    Attributes:
        phase: `wait` (another process prepares it), `scan`, `train tokenizer` or `tokenize`.
        done: of `total`, in `unit`.
        total: an estimate while compressed files are scanned.
        unit: `bytes` of text, or `seconds` of waiting.
    """

    phase: str
    done: int
    total: int
    unit: str


Watch = Callable[[PrepareStep], None]


class Preparation:
    """Makes one corpus; the caller holds the folder's lock.

    Args:
        config: the block `data_pipeline`.
        seed: chooses which texts are held out.
        folder: where the corpus comes to be.
        made_from: what decides what it is, as in `Manifest`.
        sources: of the config.
        watch: called with the progress.
    """

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        folder: Path,
        made_from: Mapping[str, str],
        sources: Sequence[Source],
        watch: Watch,
    ) -> None:
        self.config, self.seed, self.folder, self.made_from = config, seed, folder, made_from
        self.sources, self.watch = sources, watch
        self.work = folder / "work"
        self.salt = salt_of(seed)
        self.workers = Workers(usable_cpus() if config.workers == "auto" else config.workers)

    def run(self) -> None:
        """All steps; each finds what an earlier run left and goes on from there."""
        self._start()
        try:
            with self.workers, tokenizer_threads(many=self.workers.count > 1):
                jobs = self._jobs()
                scans = self._scan(jobs)
                self._quarantine(jobs, scans)
                self._check(jobs, scans)
                total = sum(scan.bytes for scan in scans)
                sampled = _spread(len(jobs), total, self.config.tokenizer.training_bytes)
                split = self._split(scans, sampled)
                self._put_tokenizer([jobs[index] for index in sampled], split, total)
                shards = self._encode(jobs, scans, split)
            self._finish(jobs, scans, split, shards)
        finally:
            self._clear_parts()

    def _start(self) -> None:
        """Clears what a killed process left half-written, and all of another preparation."""
        if _read_or_none(self.work / "made_from.json") != self.made_from:
            shutil.rmtree(self.work, ignore_errors=True)
            for file in self.folder.iterdir():
                if re.fullmatch(r"(train|validation)-\d+\.bin|tokenizer\.json", file.name):
                    file.unlink()
            write_json(self.work / "made_from.json", dict(self.made_from))
        self._clear_parts()

    def _clear_parts(self) -> None:
        """Removes what a process that was ended in the middle of a file left of it."""
        for place in (self.folder, self.work):
            for part in place.glob(".*.part"):
                part.unlink(missing_ok=True)

    def _jobs(self) -> list[Job]:
        units = [
            (index, unit)
            for index, source in enumerate(self.sources)
            for unit in source.units(self.config.shard_bytes)
        ]
        return [Job(number, index, unit) for number, (index, unit) in enumerate(units)]

    def _progress(self, phase: str, total: int) -> Callable[[int], None]:
        done = -1

        def advance(amount: int) -> None:
            nonlocal done
            before, done = done, min(total, max(done, 0) + amount)
            if done != before:
                self.watch(PrepareStep(phase, done, total, "bytes"))

        advance(0)
        return advance

    def _scan(self, jobs: Sequence[Job]) -> list[Scan]:
        total = sum(job.unit.size for job in jobs)
        progress = self._progress("scan", total)
        task = ScanUnit(self.config.sources, self.work, self.salt)
        largest_first = sorted(jobs, key=lambda job: -job.unit.size)
        self.workers.run(task, largest_first, progress=progress)
        progress(total)
        scans = [Scan.load(task.path(job.number)) for job in jobs]
        return [scan for scan in scans if scan is not None]

    def _quarantine(self, jobs: Sequence[Job], scans: Sequence[Scan]) -> None:
        """Lists what is left out, and why, in `quarantine.jsonl`."""
        path = self.folder / "quarantine.jsonl"
        if not any(scan.rejected for scan in scans):
            path.unlink(missing_ok=True)
            return
        with atomic_write(path) as file:
            for job, scan in zip(jobs, scans, strict=True):
                head = {"source": self.sources[job.source].name}
                for reject in scan.rejects:
                    line = head | {"path": reject.path, "reason": reject.reason}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                if more := scan.rejected - len(scan.rejects):
                    line = head | {"path": "", "reason": f"{more} more in the same files"}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _check(self, jobs: Sequence[Job], scans: Sequence[Scan]) -> None:
        """Stops when a source has too much that is bad, or there is no text at all."""
        for index, source in enumerate(self.sources):
            own = [scan for job, scan in zip(jobs, scans, strict=True) if job.source == index]
            bad = sum(scan.rejected for scan in own)
            read = bad + sum(scan.documents + scan.empty for scan in own)
            if bad > self.config.bad_file_limit * read:
                first = next(reject for scan in own for reject in scan.rejects)
                raise DataError(
                    source.key,
                    f"{bad} of {read} texts in {source.name} cannot be read "
                    f"(the first: {first.path}: {first.reason}).",
                    f"Mend them, see {self.folder / 'quarantine.jsonl'}, or raise "
                    "data_pipeline.bad_file_limit.",
                )
        if not any(len(scan.hashes) for scan in scans):
            files = sum(len(source.files()) for source in self.sources)
            raise DataError(
                "data_pipeline.sources",
                f"there is no text in them ({files} files, all empty or bad).",
                "Name a source that holds text.",
            )

    def _split(self, scans: Sequence[Scan], sampled: Sequence[int]) -> Split:
        return choose_split(
            scans,
            self.config.validation_fraction,
            sampled=sampled,
            sample_bytes=self.config.tokenizer.training_bytes,
        )

    def _put_tokenizer(self, sampled: Sequence[Job], split: Split, total: int) -> None:
        """Puts the tokenizer into the folder; one is trained on at most `total` bytes."""
        wanted = self.config.tokenizer
        if wanted.type != "bpe":
            configured_tokenizer(wanted).save(self.folder)
        elif not self._has_tokenizer():
            most = wanted.training_bytes
            progress = self._progress("train tokenizer", min(total, most))
            texts = sample_texts(self.config.sources, sampled, split, self.salt)
            counted = _counted((text[:most] for text in texts), progress)
            Tokenizer.train_bpe(counted, wanted.vocab_size).save(self.folder)
            progress(most)

    def _has_tokenizer(self) -> bool:
        """Whether an earlier run of this preparation has trained it."""
        try:
            Tokenizer.load(self.folder)
        except DataError:
            return False
        return True

    def _encode(
        self, jobs: Sequence[Job], scans: Sequence[Scan], split: Split
    ) -> list[ShardRecord]:
        items = [
            EncodeJob(job, scan.bytes, scan.digest) for job, scan in zip(jobs, scans, strict=True)
        ]
        items.sort(key=lambda item: -item.bytes)
        progress = self._progress("tokenize", sum(item.bytes for item in items))
        task = EncodeUnit(self.config.sources, self.folder, self.work, split, self.salt)
        results = self.workers.run(task, items, progress=progress)
        in_order = sorted(zip(items, results, strict=True), key=lambda pair: pair[0].job.number)
        return [record for _, records in in_order for record in records]

    def _finish(
        self,
        jobs: Sequence[Job],
        scans: Sequence[Scan],
        split: Split,
        shards: Sequence[ShardRecord],
    ) -> None:
        """Writes the manifest: from here on the corpus exists."""
        tokenizer = Tokenizer.load(self.folder)
        records = []
        for index, source in enumerate(self.sources):
            own = [scan for job, scan in zip(jobs, scans, strict=True) if job.source == index]
            records.append(
                SourceRecord(
                    name=source.name,
                    type=source.config.type,
                    files=len(source.files()),
                    documents=sum(scan.documents for scan in own),
                    empty=sum(scan.empty for scan in own),
                    rejected=sum(scan.rejected for scan in own),
                    bytes=sum(scan.bytes for scan in own),
                    tokens=sum(shard.tokens for shard in shards if shard.source == index),
                    digest=f"{sum(scan.digest for scan in own) % (1 << 64):016x}",
                )
            )
        Manifest(
            made_from=self.made_from,
            tokenizer={
                "type": self.config.tokenizer.type,
                "size": tokenizer.size,
                "fingerprint": tokenizer.fingerprint,
            },
            split={
                "validation_fraction": self.config.validation_fraction,
                "seed": self.seed,
                "validation_below": split.validation_below,
            },
            sources=tuple(records),
            shards=tuple(shards),
        ).write(self.folder)


def _spread(count: int, total: int, wanted: int) -> list[int]:
    """Which of `count` units a sample of `wanted` out of `total` bytes is taken from."""
    if total <= wanted:
        return list(range(count))
    taken = min(count, max(_SAMPLED_UNITS, 2 * wanted * count // total))
    return [index * count // taken for index in range(taken)]


def _counted(texts: Iterator[str], progress: Callable[[int], None]) -> Iterator[str]:
    for text in texts:
        progress(len(text))
        yield text


def _read_or_none(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
