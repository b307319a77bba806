"""From text to a corpus of token shards, in parallel, resumable, whole or not there at all.

The folder's manifest is written last: a corpus with one is complete. Until then `work/` keeps what
each finished unit gave, so that a preparation that was killed goes on where it was and ends with
the same bytes as one that was not. Many processes may ask for the same corpus at once: one of them,
by a lock on the folder, does the work, and the others wait for it.
"""

import contextlib
import fcntl
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from danlu.base.errors import DataError
from danlu.base.files import danlu_home, explain_disk_full
from danlu.config.data import DataConfig
from danlu.config.load import expand_path
from danlu.config.run import fingerprint
from danlu.data.corpus import Corpus
from danlu.data.manifest import FORMAT, Manifest
from danlu.data.preparation import Preparation, PrepareStep, Watch
from danlu.data.source import MARK, Source, build_sources
from danlu.data.tokenizer import configured_tokenizer

__all__ = ["PrepareStep", "Watch", "prepare"]


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
        preparation = Preparation(config, seed, folder, made_from, sources, watch)
        with _explained(folder):
            _prepare_once(preparation)
    _check_same(folder, made_from)
    return Corpus.open(folder)


def _complete(folder: Path) -> bool:
    with _explained(folder):
        return Manifest.exists(folder) and not (folder / "work").exists()


def _prepare_once(preparation: Preparation) -> None:
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
        tokenizer = {"fingerprint": configured_tokenizer(config.tokenizer).fingerprint}
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
        place = Path(str(error.filename))
        if folder != place and folder not in place.parents and place not in folder.parents:
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
