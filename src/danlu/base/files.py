"""Files that are whole or absent, never half-written."""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from danlu.base.errors import UserError

__all__ = [
    "atomic_write",
    "checksum",
    "danlu_home",
    "explain_disk_full",
    "fsync_folder",
    "write_json",
]


def danlu_home() -> Path:
    """Where danlu remembers things between runs: `$DANLU_HOME`, else `~/.cache/danlu`."""
    return Path(os.environ.get("DANLU_HOME") or Path.home() / ".cache" / "danlu")


@contextlib.contextmanager
def atomic_write(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a file that takes its name only when the block ends well, and is on disk by then.

    Args:
        path: the final name; its folder is made when missing.
        mode: "w" (text, UTF-8) or "wb".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):  # what went wrong first is what matters
            part.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable (a no-op where folders cannot be synced)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all."""
    with atomic_write(path) as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")


def checksum(path: Path) -> str:
    """BLAKE2b (128 bit, hex) of a file's bytes, read in pieces."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def explain_disk_full(folder: Path, fix: str) -> Iterator[None]:
    """Turns "no space left on device" inside the block into one clear line.

    Raises:
        UserError: with `folder`, and `fix` as the advice.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(str(folder), "the disk is full.", fix) from error
