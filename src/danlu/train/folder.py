"""The run's folder: one place for everything a run leaves behind, owned by one config.

`config.yaml plan.json data.json tokenizer/ events.jsonl metrics.jsonl report.html checkpoints/
logs/`
"""

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from danlu.base.errors import CheckpointError, UserError
from danlu.base.files import atomic_write
from danlu.config.load import expand_path, load
from danlu.config.run import RunConfig, fingerprint

__all__ = ["RunFolder", "identity"]

_IDENTITY: Mapping[str, tuple[str, ...]] = {
    "model": (),
    "data_pipeline": (
        "sources",
        "tokenizer",
        "validation_fraction",
        "attention_within_documents",
        "sampling",
        "augmentation",
        "quality_checks",
    ),
    "train": ("duration", "batch_tokens", "seed"),
    "optimizer": (),
    "schedule": (),
    "precision": (),
}
"""What makes two configs the same run: the keys that decide what is learned. How it is computed
(ranks, threads, kernels), shown and saved may change, and `train.steps` may grow."""


def identity(config: RunConfig) -> dict[str, Any]:
    """The part of a config that a run folder belongs to."""
    tree = config.to_dict()
    return {
        block: {k: v for k, v in tree[block].items() if not keys or k in keys}
        for block, keys in _IDENTITY.items()
    }


class RunFolder:
    """Paths of a run, and the check that they belong to this config."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.plan = path / "config.yaml", path / "plan.json"
        self.data, self.checkpoints = path / "data.json", path / "checkpoints"
        self.events, self.metrics = path / "events.jsonl", path / "metrics.jsonl"
        self.report, self.logs = path / "report.html", path / "logs"
        self.tokenizer = path / "tokenizer"
        self.fresh = False
        self._lock: IO[str] | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "RunFolder":
        """The folder that a config names: `folder`, else `runs/NAME`."""
        if config.folder != "auto":
            return cls(expand_path(config.folder, "folder"))
        return cls(Path("runs") / (config.name or "run"))

    @classmethod
    def existing(cls, path: str | Path) -> "RunFolder":
        """A folder that must already hold a run.

        Raises:
            UserError: it does not.
        """
        folder = cls(Path(path))
        if not folder.config.is_file():
            raise UserError(str(path), "this is not a run folder.", _known_runs(Path(path)))
        return folder

    def check(self, config: RunConfig) -> bool:
        """Whether the folder already holds this run; changes nothing.

        Raises:
            CheckpointError: it belongs to another config, or holds something else.
        """
        if not self.config.exists():
            strange = [p.name for p in self.path.glob("*") if not p.name.startswith(".")]
            if strange or self.path.is_file():
                raise CheckpointError(
                    str(self.path),
                    f"it holds something else ({', '.join(strange[:1]) or 'a file'}).",
                    "Use folder=… to name an empty or new folder.",
                )
            return False
        before = load(self.config)
        key, old, new = _first_difference(identity(before), identity(config), "")
        if key:
            raise CheckpointError(
                str(self.path),
                f"the folder belongs to another config ({key} is {old} there, {new} here).",
                "Use folder=… for a new run, or delete the folder.",
            )
        return True

    def claim(self, config: RunConfig) -> None:
        """Takes the folder for `config`, which `check` found right, and for this process.

        Raises:
            CheckpointError: the folder cannot be made, or a run is going on in it.
        """
        self.fresh = not self.config.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                str(self.path), f"the folder cannot be made ({error.strerror}).", "Use folder=…"
            ) from None
        self._take_lock()
        with atomic_write(self.config) as file:
            yaml.safe_dump(config.to_dict(), file, sort_keys=False, allow_unicode=True)

    def discard(self) -> None:
        """Removes the folder where this process made it, and nothing was or is learned in it."""
        if not self.fresh or self.checkpoints.exists() or self.metrics.exists():
            return
        with contextlib.suppress(CheckpointError):  # another process has taken it since
            if self._lock is None:
                self._take_lock()
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def read_config(self) -> RunConfig:
        """The config that the folder belongs to."""
        return load(self.config)

    def identity_hash(self) -> str:
        """What checkpoints of this run carry."""
        return fingerprint(identity(self.read_config()))

    def _take_lock(self) -> None:
        try:
            self._lock = (self.path / ".lock").open("w", encoding="utf-8")  # held for life
        except OSError as error:
            raise CheckpointError(
                str(self.path), f"the folder cannot be written ({error.strerror}).", "Use folder=…"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(
                str(self.path),
                "another process is training in this folder.",
                "Wait for it, or use folder=… for a run of its own.",
            ) from None

    def __getstate__(self) -> dict[str, object]:
        """The lock stays with the process that took it."""
        return self.__dict__ | {"_lock": None}

    def release(self) -> None:
        """Lets other processes train in the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _first_difference(old: Any, new: Any, key: str) -> tuple[str, Any, Any]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            inner = f"{key}.{name}" if key else name
            found = _first_difference(old.get(name), new.get(name), inner)
            if found[0]:
                return found
        return "", None, None
    return ("", None, None) if old == new else (key, json.dumps(old), json.dumps(new))


def _known_runs(path: Path) -> str:
    """A sentence that names the runs near `path`."""
    found = sorted(str(p.parent) for p in _candidates(path))
    return f"Runs here: {', '.join(found[:8])}." if found else "Train one first: danlu train."


def _candidates(path: Path) -> Iterator[Path]:
    yield from Path("runs").glob("*/config.yaml")
    yield from path.glob("*/config.yaml")
