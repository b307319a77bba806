"""Which files a source has: a walk over a folder, in an order that is the same everywhere."""

import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from danlu.base.errors import DataError
from danlu.data.source import MARK, SourceFile, printable

__all__ = ["compressed", "matcher", "plain_name", "select", "walk"]

_COMPRESSED = (".gz", ".zst")


def compressed(path: str) -> bool:
    """Whether the name says that the file is compressed."""
    return path.lower().endswith(_COMPRESSED)


def plain_name(path: str) -> str:
    """The name of what a compressed file holds; any other name as it is."""
    return path.rsplit(".", 1)[0] if compressed(path) else path


def matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a relative path matches one of `patterns`.

    A pattern matches at any depth and covers what lies below a folder: `*.py`, `docs/*.md`,
    `node_modules`. A compressed file matches by its own name and by that of what it holds.
    """
    both = [q for p in patterns for q in (p.strip("/"), p.strip("/") + "/*")]
    expression = re.compile("|".join(f"(?:.*/)?{fnmatch.translate(p)}" for p in both), re.DOTALL)
    if not both:
        return lambda path: False
    return lambda path: bool(expression.match(path) or expression.match(plain_name(path)))


def walk(root: Path, unwanted: Callable[[str], bool]) -> Iterator[SourceFile]:
    """All regular files below `root` by relative path, or `root` itself when it is a file.

    What is `unwanted` is left out, folders without a look into them; so are hidden files and
    folders, and folders that danlu made. Links are followed, each folder at most once, so that a
    link to a folder above does not turn in a circle. A file that cannot be looked at is listed with
    size 0: reading it says why.
    """
    if root.is_file():
        yield _file(root, root.name)
        return
    seen: set[tuple[int, int]] = set()
    folders = [""]
    while folders:
        inside = folders.pop()
        try:
            identity = os.stat(root / inside)
            entries = sorted(os.scandir(root / inside), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(
                printable(str(root / inside)),
                f"the folder cannot be read ({error.strerror}).",
                "Change its permissions, or name another folder.",
            ) from None
        names = {entry.name for entry in entries}
        if MARK in names or (identity.st_dev, identity.st_ino) in seen:
            continue
        seen.add((identity.st_dev, identity.st_ino))
        for entry in entries:
            path = f"{inside}/{entry.name}" if inside else entry.name
            if entry.name.startswith(".") or unwanted(path):
                continue
            if _is_folder(entry):
                folders.append(path)
            elif _may_be_read(entry):
                yield _file(root / path, path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _may_be_read(entry: os.DirEntry[str]) -> bool:
    """Not a pipe, socket or device, which could block forever; a broken link is let through."""
    try:
        return stat.S_ISREG(entry.stat().st_mode)
    except OSError:
        return True


def _file(path: Path, relative: str) -> SourceFile:
    try:
        found = path.stat()
    except OSError:
        return SourceFile(relative, 0, 0)
    return SourceFile(relative, found.st_size, found.st_mtime_ns)


def select(
    root: Path,
    *,
    key: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    usual: Callable[[str], bool],
) -> tuple[SourceFile, ...]:
    """The files of a source, sorted by path.

    Args:
        root: a folder, or one file, which is then taken whatever its name.
        key: where the source stands in the config.
        include: patterns that a file must match; when empty, `usual` decides.
        exclude: patterns that a file must not match.
        usual: whether a file of that name is what the kind of source reads by default.

    Raises:
        DataError: no file is left, or a folder cannot be read.
    """
    wanted = matcher(include) if include else usual
    found = list(walk(root, matcher(exclude)))
    if root.is_file():
        return tuple(found)
    kept = [file for file in found if wanted(file.path)]
    if not kept:
        asked = f" that match {list(include)}" if include else " of this kind"
        raise DataError(
            f"{key}.path",
            f"{str(root)!r} holds no files{asked} ({len(found)} others).",
            "Name another folder, or change include and exclude.",
        )
    return tuple(sorted(kept, key=lambda file: file.path))
