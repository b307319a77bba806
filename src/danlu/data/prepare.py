"""From text to a corpus of token shards, in parallel, resumable, whole or not there at all.

The folder's manifest is written last: a corpus with one is complete. Until then `work/` keeps what
each finished unit gave, so that a preparation that was killed goes on where it was and ends with
the same bytes as one that was not. Many processes may ask for the same corpus at once: one of them,
by a lock on the folder, does the work, and the others wait for it.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from danlu.base.errors import ConfigError, DataError
from danlu.base.files import atomic_write, danlu_home, explain_disk_full, write_json
from danlu.config.data import DataConfig, TokenizerConfig
from danlu.config.load import expand_path
from danlu.config.run import fingerprint
from danlu.data.corpus import Corpus
from danlu.data.encode import EncodeJob, EncodeUnit
from danlu.data.manifest import FORMAT, Manifest, ShardRecord, SourceRecord
from danlu.data.scan import Job, Scan, ScanUnit, Split, choose_split, salt_of, sample_texts
from danlu.data.source import MARK, Source, build_sources
from danlu.data.tokenizer import Tokenizer, tokenizer_threads
from danlu.data.workers import Workers

__all__ = ["PrepareStep", "Watch", "prepare"]

_SAMPLED_UNITS = 64
"""A tokenizer's sample comes from at most about this many units, evenly spread over the corpus:
enough variety, and no third reading of terabytes."""


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


def prepare(config: DataConfig, *, seed: int = 0, watch: Watch | None = None) -> Corpus:
    """The corpus that `config` describes: opened when it is there, made when not.

    Args:
        config: the block `data_pipeline`.
        seed: chooses which texts are held out. Runs that differ in it do not share a corpus.
        watch: called with the progress, several times a second.

    Raises:
        UserError: anything the user can mend, as one line: a path that does not exist, no text,
            more bad files than `bad_file_limit`, a corrupt file, a full disk.
        MachineError: a worker process died; what is done is kept.
    """
    watch = watch or (lambda step: None)
    sources = build_sources(config.sources)
    made_from = _settings(config, seed)
    folder = None
    if config.folder != "auto":
        folder = expand_path(config.folder, "data_pipeline.folder").absolute()
    if folder and _complete(folder):
        # A corpus may outlive its sources: prepared on one machine, trained on another.
        with contextlib.suppress(DataError):
            made_from["files"] = _listing(sources)
    else:
        made_from["files"] = _listing(sources)
        folder = folder or _automatic_folder(sources, made_from)
        preparation = _Preparation(config, seed, folder, made_from, sources, watch)
        with _explained(folder):
            _prepare_once(preparation)
    _check_same(folder, made_from)
    return Corpus.open(folder)


def _complete(folder: Path) -> bool:
    with _explained(folder):
        return Manifest.exists(folder) and not (folder / "work").exists()


def _prepare_once(preparation: "_Preparation") -> None:
    """Runs the preparation unless the corpus is there, or another process makes it meanwhile."""
    if _complete(preparation.folder):
        return
    with _locked(preparation.folder, preparation.watch):
        if not Manifest.exists(preparation.folder):
            preparation.run()
        shutil.rmtree(preparation.work, ignore_errors=True)


def _settings(config: DataConfig, seed: int) -> dict[str, str]:
    """A fingerprint of each thing in the config that decides what the corpus is."""
    tokenizer = config.tokenizer.model_dump(mode="json")
    if config.tokenizer.type != "bpe":  # what the tokenizer is, not where it is or how it is made
        tokenizer = {"fingerprint": _given_tokenizer(config.tokenizer).fingerprint}
    return {
        "sources": fingerprint([source.model_dump(mode="json") for source in config.sources]),
        "tokenizer": fingerprint(tokenizer),
        "split": fingerprint([config.validation_fraction, seed]),
        "shards": fingerprint([FORMAT, config.shard_bytes]),
    }


def _listing(sources: Sequence[Source]) -> str:
    files = [[[f.path, f.size, f.modified] for f in source.files()] for source in sources]
    return fingerprint(files)


def _automatic_folder(sources: Sequence[Source], made_from: Mapping[str, str]) -> Path:
    names = "-".join(source.name for source in sources)
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", names).strip("-.")[:40] or "corpus"
    return danlu_home().absolute() / "data" / f"{readable}-{fingerprint(dict(made_from))}"


_KEYS = {
    "sources": "data_pipeline.sources",
    "tokenizer": "data_pipeline.tokenizer",
    "split": "data_pipeline.validation_fraction or the seed",
    "shards": "data_pipeline.shard_bytes",
    "files": "the files of data_pipeline.sources",
}


def _check_same(folder: Path, made_from: Mapping[str, str]) -> None:
    """Refuses a corpus that is not the one the config describes."""
    there = Manifest.read(folder).made_from
    for part, value in made_from.items():
        if there.get(part) != value:
            raise DataError(
                "data_pipeline.folder",
                f"the corpus in {folder} was made with other settings ({_KEYS[part]}).",
                "Name another folder, or delete this one to prepare it again.",
            )


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turns whatever the file system refuses in `folder` into one clear line."""
    fix = "Free some space and run again (what is done is kept), or set data_pipeline.folder."
    try:
        with explain_disk_full(folder, fix):
            yield
    except OSError as error:
        if not str(error.filename).startswith(str(folder)):
            raise
        raise DataError(
            str(folder),
            f"the folder cannot be used ({error.strerror}).",
            "Set data_pipeline.folder to a place that can be written.",
        ) from None


@contextlib.contextmanager
def _locked(folder: Path, watch: Watch) -> Iterator[None]:
    """Makes `folder` and holds its lock, which the system takes back from a killed process."""
    if folder.is_dir() and not (folder / MARK).exists() and any(folder.iterdir()):
        raise DataError(
            "data_pipeline.folder",
            f"{folder} holds other files.",
            "Name an empty folder, or one that does not exist.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with open(folder / MARK, "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = round(time.monotonic() - start)
                watch(PrepareStep("wait", waited, waited, "seconds"))
                time.sleep(0.1)
        yield


class _Preparation:
    """Makes one corpus; the caller holds the folder's lock."""

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
        self.workers = Workers(_cpus() if config.workers == "auto" else config.workers)

    def run(self) -> None:
        """All steps; each finds what an earlier run left and goes on from there."""
        self._start()
        try:
            with self.workers, tokenizer_threads(many=self.workers.count > 1):
                jobs = self._jobs()
                scans = self._scan(jobs)
                self._quarantine(jobs, scans)
                self._check(jobs, scans)
                split = self._tokenizer(jobs, scans)
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
        done = 0

        def advance(amount: int) -> None:
            nonlocal done
            done = min(total, done + amount)
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

    def _tokenizer(self, jobs: Sequence[Job], scans: Sequence[Scan]) -> Split:
        """Puts the tokenizer into the folder; gives the split its training text belongs to."""
        wanted, most = self.config.tokenizer, self.config.tokenizer.training_bytes
        total = sum(scan.bytes for scan in scans)
        sampled = _spread(len(jobs), total=total, wanted=most)
        split = choose_split(
            scans, self.config.validation_fraction, sampled=sampled, sample_bytes=most
        )
        if wanted.type != "bpe":
            _given_tokenizer(wanted).save(self.folder)
        elif not self._has_tokenizer():
            progress = self._progress("train tokenizer", min(total, most))
            texts = sample_texts(
                self.config.sources, [jobs[index] for index in sampled], split, self.salt
            )
            counted = _counted((text[:most] for text in texts), progress)
            Tokenizer.train_bpe(counted, wanted.vocab_size).save(self.folder)
            progress(most)
        return split

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


def _given_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that needs no training: raw bytes, or the user's file."""
    if config.type == "bytes":
        return Tokenizer.raw_bytes()
    if not config.path:
        raise ConfigError(
            "data_pipeline.tokenizer.path", "type file needs one.", "Name a tokenizer.json."
        )
    path = expand_path(config.path, "data_pipeline.tokenizer.path")
    return Tokenizer.from_file(path, end_token=config.end_token)


def _spread(count: int, *, total: int, wanted: int) -> list[int]:
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


def _cpus() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
