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
    """Path and version of the C++ compiler: `$CXX`, else g++, else clang++.

    Raises:
        BuildError: there is none.
    """
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        if path := shutil.which(name):
            answer = subprocess.run(
                [path, "--version"], capture_output=True, text=True, check=False
            )
            return path, answer.stdout.split("\n", 1)[0]
    raise BuildError("there is no C++ compiler (g++ or clang++)")


def build(source: str, processor: str) -> ctypes.CDLL:
    """Compiles `kernels/ops/SOURCE` unless that has been done before, and loads it.

    Args:
        source: file name, e.g. `attention.cpp`.
        processor: what identifies this processor; part of the result's name.

    Raises:
        BuildError: no compiler, or one that refuses the source (with its first error).
    """
    path, version = compiler()
    text = (_OPS / source).read_bytes() + (_OPS / "simd.h").read_bytes()
    identity = "\n".join((version, *_FLAGS, processor)).encode()
    digest = hashlib.blake2b(text + identity, digest_size=8).hexdigest()
    library = danlu_home() / "kernels" / f"{Path(source).stem}-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _compile(path, _OPS / source, library)
    return ctypes.CDLL(str(library))


def _compile(path: str, source: Path, library: Path) -> None:
    part = library.with_suffix(f".{os.getpid()}.part")
    command = [path, *_FLAGS, "-o", str(part), str(source), "-lm"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
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
