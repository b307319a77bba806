"""The parent's end of a runner: start it, ask for steps, never wait for ever, end it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import BUILD, ROOT, python_of
from benchmarks.peers.machine import cpu_seconds
from benchmarks.peers.registry import Entry
from benchmarks.peers.workload import Workload

STOP_SECONDS = 1
# Whatever the caller's shell sets for one of these tools, its launcher or its allocator would
# change what is measured. `LD_PRELOAD` is here because no peer's documentation asks for one.
FOREIGN_VARIABLES = ("LD_PRELOAD", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
FOREIGN_PREFIXES = ("ACCELERATE_", "DS_", "GOMP_", "KMP_", "MKL_", "OMP_", "TORCHINDUCTOR_")


class RunnerError(Exception):
    """A runner reported an error, died, or ran into a time limit; the message says which."""


@dataclass(frozen=True)
class Turn:
    """What a runner did on one command: one list element a step."""

    wall_seconds: list[float]
    cpu_seconds: list[float]
    losses: list[float]
    figures: dict[str, list[float]]
    peak_rss_mib: int
    idle_cpu_seconds: float


class RunnerProcess:
    """One entry's process, alive from ``start`` to ``stop``."""

    def __init__(self, entry: Entry, work: Workload) -> None:
        self.entry = entry
        self.work = work
        slug = entry.name.replace(":", "-")
        self.log = BUILD / "logs" / f"{slug}.log"
        self.cache = BUILD / "cache" / "inductor" / f"{slug}-{work.model}-{work.threads}"
        self._folder = BUILD / "cwd" / slug
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._cpu_after_turn: float | None = None

    def start(self, timeout_seconds: float) -> dict[str, Any]:
        """Start the process and wait for its ``ready`` line, which is returned.

        Raises:
            RunnerError: It failed, died or was not ready in time.
        """
        for folder in (self.log.parent, self.cache, self._folder):
            folder.mkdir(parents=True, exist_ok=True)
        command = [str(python_of(self.entry.peer.environment)), "-m", self.entry.module]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, self.entry.setting, self.work.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment(),
                cwd=self._folder,
                start_new_session=True,  # its own group: Ctrl-C reaches only us, and we end it
            )
        return self._reply("ready", timeout_seconds)

    def has_cache(self) -> bool:
        """Whether the entry's folder of compiled graphs holds anything."""
        return self.cache.exists() and any(self.cache.iterdir())

    def steps(self, count: int, timeout_seconds: float) -> Turn:
        """Have it train ``count`` steps.

        Raises:
            RunnerError: It failed, died or was not done in time.
        """
        process = self._alive()
        idle = 0.0
        if self._cpu_after_turn is not None:
            idle = cpu_seconds(process.pid) - self._cpu_after_turn
        assert process.stdin is not None
        try:
            process.stdin.write(f"steps {count}\n".encode())
            process.stdin.flush()
        except OSError:
            raise RunnerError(self._last_words()) from None
        reply = self._reply("steps", timeout_seconds)
        self._cpu_after_turn = cpu_seconds(process.pid)
        return Turn(
            reply["wall_seconds"],
            reply["cpu_seconds"],
            reply["losses"],
            reply["figures"],
            reply["peak_rss_mib"],
            idle,
        )

    def stop(self) -> None:
        """End the process and all it started. Safe at any time, also twice."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
            process.wait(STOP_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            # The whole group, which outlives its leader where a tool left compile workers.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in FOREIGN_VARIABLES and not name.startswith(FOREIGN_PREFIXES)
        }
        scripts = python_of(self.entry.peer.environment).parent
        return kept | {
            "PATH": f"{scripts}{os.pathsep}{kept.get('PATH', os.defpath)}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(self.work.threads),
            "MKL_NUM_THREADS": str(self.work.threads),
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache),
            "TORCH_EXTENSIONS_DIR": str(BUILD / "cache" / "extensions"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RunnerError("was not started")
        return self._process

    def _reply(self, event: str, timeout_seconds: float) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self._read_line(timeout_seconds))
        if reply["event"] == "failed":
            raise RunnerError(reply["error"])
        if reply["event"] != event:
            raise RunnerError(f"answered {reply['event']} instead of {event}")
        return reply

    def _read_line(self, timeout_seconds: float) -> bytes:
        process = self._alive()
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RunnerError(f"no answer within {timeout_seconds:.0f} seconds")
                # Short waits, since a dead runner's pipe may be held open by what it forked.
                if selector.select(min(left, 1.0)):
                    got = os.read(process.stdout.fileno(), 1 << 16)
                    if not got:
                        raise RunnerError(self._last_words())
                    self._unread += got
                elif process.poll() is not None:
                    raise RunnerError(self._last_words())
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """Why a runner is gone: its exit code and the last line of its log."""
        process = self._alive()
        try:
            code: object = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            code = "none yet"
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"exit code {code}: {lines[-1].strip()[:300] if lines else 'no output'}"


def clear_caches(folder: Path = BUILD / "cache" / "inductor") -> None:
    """Forget compiled graphs, so that first steps show what compilation costs."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale_locks() -> None:
    """Remove what a killed extension build left behind: later loads would wait on it for ever.

    Only called while this benchmark holds its own lock, so no build of ours is under way.
    """
    for lock in (BUILD / "cache" / "extensions").rglob("lock"):
        lock.unlink(missing_ok=True)
