"""One virtual environment a family of peers, under ``build/peers/envs``.

``python -m benchmarks.peers.environments [FAMILY ...]`` makes the missing ones; a run of the
benchmark does so by itself. Each is made from ``requirements/FAMILY.txt``, a complete list of
pinned versions, with torch first: installed on its own, pip takes the build its index offers for
this machine, and no later package can replace it. A marker with the list's checksum is written
last, so an interrupted install goes on where it stopped, and a changed list installs again.

pip's own configuration decides where packages come from. On Linux the public index serves torch
with CUDA; point pip at a CPU index if you want the smaller build.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "peers"
REQUIREMENTS = Path(__file__).parent / "requirements"
INSTALL_TIMEOUT_SECONDS = 3600


class InstallError(Exception):
    """An environment could not be made; the message is pip's last error line."""


def families() -> list[str]:
    """Names of all environments."""
    return sorted(file.stem for file in REQUIREMENTS.glob("*.txt"))


def python_of(family: str | None) -> Path:
    """The interpreter of an environment; without a name, the one running now."""
    if family is None:
        return Path(sys.executable)
    return BUILD / "envs" / family / "bin" / "python"


def is_ready(family: str | None) -> bool:
    """Whether an environment was installed completely from its present list."""
    if family is None:
        return True
    marker = _marker(family)
    return marker.exists() and marker.read_text() == _checksum(family)


def install(family: str) -> None:
    """Make an environment, or finish one that was interrupted.

    Raises:
        InstallError: venv or pip failed, or ran into its time limit.
    """
    if is_ready(family):
        return
    python = python_of(family)
    requirements = REQUIREMENTS / f"{family}.txt"
    torch = next(
        line for line in requirements.read_text().splitlines() if line.startswith("torch==")
    )
    log = BUILD / "logs" / f"install-{family}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    if not _works(python):
        shutil.rmtree(python.parents[1], ignore_errors=True)
        _call([_python_311(), "-m", "venv", str(python.parents[1])], log)
    pip = [str(python), "-m", "pip", "install", "--progress-bar", "off"]
    _call([*pip, torch], log)
    _call([*pip, "-r", str(requirements)], log)
    _marker(family).write_text(_checksum(family))


def _marker(family: str) -> Path:
    return BUILD / "envs" / family / "installed"


def _checksum(family: str) -> str:
    return hashlib.sha256((REQUIREMENTS / f"{family}.txt").read_bytes()).hexdigest()


def _python_311() -> str:
    """A Python 3.11, which the pinned versions are for."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == "3.11":
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        raise InstallError("the peers need python3.11 on PATH: their versions are pinned for it")
    return found


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    check = [str(python), "-m", "pip", "--version"]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


def _call(command: list[str], log: Path) -> None:
    with log.open("a") as output:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=INSTALL_TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise InstallError(f"no end after {INSTALL_TIMEOUT_SECONDS} seconds") from None
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise InstallError(f"{errors[-1][:300]} (log: {log.relative_to(ROOT)})")


def main() -> int:
    failed = 0
    for family in sys.argv[1:] or families():
        if family not in families():
            print(f"{family}: no such environment. Use {', '.join(families())}.")
            return 2
        if is_ready(family):
            print(f"{family}: ready")
            continue
        print(f"{family}: installing", flush=True)
        try:
            install(family)
        except InstallError as error:
            failed += 1
            print(f"{family}: failed: {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
