"""C++ built on the machine it runs on, once, and remembered.

A plain C interface and no PyTorch headers: a kernel compiles in about two seconds. The result is
named by what made it (source, compiler, flags, processor), so a stale one is never loaded, and it
takes its name only when it is whole, so a killed build leaves nothing behind. OpenMP threads are
those of PyTorch: both link libgomp, and the library that PyTorch has loaded is the one that is
used.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from danlu.base.files import danlu_home

__all__ = ["BuildError", "build", "compiler"]

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_OPS = Path(__file__).with_name("ops")


class BuildError(Exception):
    """No native variant on this machine, and why."""


@functools.cache
def compiler() -> tuple[str, str]:
    """Command and version of the C++ compiler: `$CXX` (`ccache g++`), else g++, else clang++.

    The command is quoted as for a shell; `shlex.split` gives its words.

    Raises:
        BuildError: there is none, or the one that `$CXX` names cannot be used.
    """
    if wanted := os.environ.get("CXX", "").strip():
        try:
            name, *arguments = shlex.split(wanted)
        except ValueError as error:
            raise BuildError(f"$CXX is {wanted!r}, which is no command ({error})") from None
        if (path := shutil.which(name)) is None:
            raise BuildError(f"$CXX is {wanted!r}, and there is no {name!r} that can be run")
        command = [path, *arguments]
    else:
        found = filter(None, map(shutil.which, ("g++", "clang++")))
        if (path := next(found, None)) is None:
            raise BuildError("there is no C++ compiler (g++ or clang++)")
        command = [path]
    answer = _run([*command, "--version"])
    if answer.returncode:
        raise BuildError(f"{shlex.join(command)} --version ends with code {answer.returncode}")
    return shlex.join(command), answer.stdout.split("\n", 1)[0]


def build(source: str, processor: str) -> ctypes.CDLL:
    """Compiles `kernels/ops/SOURCE` unless that has been done before, and loads it.

    Args:
        source: file name, e.g. `attention.cpp`.
        processor: what identifies this processor; part of the result's name.

    Raises:
        BuildError: no compiler, one that refuses the source (with its first error), or a
            `$DANLU_HOME` that cannot be written.
    """
    command, version = compiler()
    text = (_OPS / source).read_bytes() + (_OPS / "simd.h").read_bytes()
    identity = "\n".join((version, *shlex.split(command)[1:], *_FLAGS, processor)).encode()
    digest = hashlib.blake2b(text + identity, digest_size=8).hexdigest()
    library = danlu_home() / "kernels" / f"{Path(source).stem}-{digest}.so"
    try:
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            with _locked(library.with_suffix(".lock")):
                if not library.exists():
                    _compile(command, _OPS / source, library)
    except OSError as error:
        reason = error.strerror or error
        raise BuildError(f"{library.parent} cannot hold what is built ({reason})") from None
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{library} cannot be loaded ({error}); delete it") from None


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            check=False,
        )  # fmt: skip
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run ({error.strerror})") from None


def _compile(command: str, source: Path, library: Path) -> None:
    part = library.with_suffix(f".{os.getpid()}.part")
    answer = _run([*shlex.split(command), *_FLAGS, "-o", str(part), str(source), "-lm"])
    if answer.returncode:
        part.unlink(missing_ok=True)
        errors = [line for line in answer.stderr.splitlines() if "error" in line]
        raise BuildError(f"{source.name} does not compile: {(errors or ['no message'])[0][:200]}")
    os.replace(part, library)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process builds, the others wait; a lock of a dead process is no lock."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
