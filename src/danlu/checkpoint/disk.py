"""Checkpoints on disk: PyTorch's distributed checkpoint format, made safe.

The format reshards (any layout loads any other's), but by itself it loads a file with a flipped bit
without a word and leaves half a checkpoint behind when the disk is full. So a checkpoint is written
into a hidden folder, summed up in a manifest with the checksum of every file, and takes its name
only then; before it is loaded every checksum is verified, and when one is wrong the checkpoint
before it is used.
"""

import errno
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.optim import Optimizer

from danlu.base.errors import CheckpointError
from danlu.base.files import checksum, fsync_folder, write_json
from danlu.base.units import format_bytes
from danlu.checkpoint.state import CheckpointFacts, read_state, write_state
from danlu.hardware.comm import Comm

__all__ = ["CheckpointStore", "read_facts"]

_MANIFEST, _FACTS = "manifest.json", "checkpoint.json"


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: holds one folder a checkpoint, `step-00001000`.
        comm: all ranks; every method is called by all of them together.
        keep: newest checkpoints that stay.
        warn: told about a checkpoint that is broken or cannot be written.
    """

    def __init__(self, folder: Path, comm: Comm, *, keep: int, warn: Callable[[str], None]) -> None:
        self.folder, self.comm, self.keep, self.warn = folder, comm, keep, warn

    def save(self, model: nn.Module, optimizer: Optimizer, facts: CheckpointFacts) -> Path:
        """Writes a checkpoint; when it returns, it is whole and on disk.

        Raises:
            CheckpointError: the disk is full; what was there before is untouched.
        """
        final = self.folder / f"step-{facts.step:08d}"
        part = final.with_name(f".{final.name}.part")
        try:
            self._together(final, lambda: self._make(part))
            self._together(final, lambda: self._write(part, model, optimizer))
            self._together(final, lambda: self._commit(part, final, facts))
        except BaseException:
            if self.comm.first:
                shutil.rmtree(part, ignore_errors=True)
            raise
        return final

    def _together(self, final: Path, work: Callable[[], None]) -> None:
        """Every rank's share of some work; returns when all are done.

        Raises:
            CheckpointError: the disk is full for one of them.
        """
        problem: str | None = None
        run = self.folder.parent
        try:
            work()
        except (OSError, RuntimeError, CheckpointException) as error:
            if not _disk_is_full(error, run):
                raise
            problem = f"the disk is full ({format_bytes(shutil.disk_usage(run).free)} free)."
        if self.comm.largest(float(problem is not None)):
            raise CheckpointError(
                str(final), problem or "another rank could not write.", "Earlier ones are whole."
            )

    def _make(self, part: Path) -> None:
        if self.comm.first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)

    def _write(self, part: Path, model: nn.Module, optimizer: Optimizer) -> None:
        state = read_state(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about running without a group
            save_distributed(state, checkpoint_id=part, no_dist=self.comm.world == 1)

    def _commit(self, part: Path, final: Path, facts: CheckpointFacts) -> None:
        if not self.comm.first:
            return
        write_json(part / _FACTS, facts.to_dict())
        files = sorted(p for p in part.iterdir() if p.name != _MANIFEST)
        write_json(part / _MANIFEST, {p.name: [p.stat().st_size, checksum(p)] for p in files})
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
        fsync_folder(self.folder)
        for old in list(self.all())[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)

    def all(self) -> Iterator[Path]:
        """The checkpoints' folders, newest first."""
        if self.folder.is_dir():
            yield from sorted(self.folder.glob("step-*"), reverse=True)

    def newest(self) -> Path | None:
        """The newest checkpoint whose checksums are all right; broken ones are told and passed."""
        found: Path | None = None
        if self.comm.first:
            for path in self.all():
                problem = damage(path)
                if problem is None:
                    found = path
                    break
                self.warn(f"checkpoint {path.name} is not used: {problem}.")
        return self.comm.share(found)  # type: ignore[no-any-return]

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer | None) -> CheckpointFacts:
        """Fills model and optimizer in place from a checkpoint of any layout.

        Raises:
            CheckpointError: a checkpoint of another model, or one that cannot be read.
        """
        facts = read_facts(path)
        state = read_state(model, optimizer)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                load_distributed(state, checkpoint_id=path, no_dist=self.comm.world == 1)
        except (RuntimeError, CheckpointException, KeyError, ValueError, OSError) as error:
            reason = str(error).strip().splitlines()[-1][:200]
            raise CheckpointError(
                str(path), f"it does not fit this model ({reason}).", "Use one of this model."
            ) from None
        write_state(model, optimizer, state)
        return facts


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None: sizes first, then every checksum."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except OSError:
        return "it has no manifest"
    except (ValueError, RecursionError):
        return "its manifest is broken"
    if not _lists_files(manifest):
        return "its manifest is broken"
    for name, (size, digest) in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        try:
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if checksum(file) != digest:
                return f"{name} has a wrong checksum"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _lists_files(manifest: Any) -> bool:
    """Whether it maps names to [size, checksum], and has the facts and at least one file more."""
    return (
        isinstance(manifest, dict)
        and _FACTS in manifest
        and len(manifest) > 1
        and all(isinstance(v, list) and list(map(type, v)) == [int, str] for v in manifest.values())
    )


def read_facts(path: Path) -> CheckpointFacts:
    """What a checkpoint says about itself.

    Raises:
        CheckpointError: the folder is not a checkpoint.
    """
    try:
        return CheckpointFacts.from_dict(json.loads((path / _FACTS).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(
            str(path), "this is not a whole checkpoint.", "Give a folder like step-00001000."
        ) from None


def _disk_is_full(error: BaseException, folder: Path) -> bool:
    """Whether `error`, or one it came from, is "no space left" (the format wraps it in its own)."""
    text = repr(error) + repr(getattr(error, "failures", ""))
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        seen = seen.__cause__ or seen.__context__
    return "No space left" in text or shutil.disk_usage(folder).free < 2**20
