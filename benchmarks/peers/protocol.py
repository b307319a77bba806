"""How the benchmark and a runner talk, and the few lines a runner needs to take part.

A runner is a process that builds its model, says so, and then trains **only when told**: the
parent writes ``steps N`` to its stdin, the runner does N whole training steps and answers with one
JSON line. Between two commands it sits in a blocking read and uses no CPU, so all runners can be
alive at once and take turns within the same minute. Closing stdin ends the runner.

A new runner is one file, ``runners/NAME_run.py``::

    PEER = Peer("danlu", None, "danlu", {"best": "bf16, compiled, own kernels"})

    def run(gate: Gate) -> None:
        import danlu                                   # heavy imports inside: the parent reads PEER
        from benchmarks.peers.runners.stream import batches, prepare

        prepare(gate.work)                             # threads and seed
        model, step = ...                              # build, outside the timing
        gate.ready(parameters=27_660_000)              # waits for the first command
        for tokens in batches(gate.work):              # (batch, sequence + 1) int64
            gate.tick(step(tokens))                    # ends one step; waits when its turn is over

    if __name__ == "__main__":
        serve(PEER, run)

A tool that owns its loop does the same from its hooks: ``gate.ready`` when it asks for its first
batch, ``gate.tick`` at the end of a step. A step is what lies between two ticks: batch, forward,
backward, clipping, optimizer. The working directory is a scratch folder of the runner's own.

``environment`` names the virtual environment (``requirements/NAME.txt``); ``None`` is the Python
that runs the benchmark itself. ``settings`` maps a setting's name (``default``, ``best``) to the
words the results table shows; a peer with one setting is used for both. ``gate.setting`` is the
one asked for.

On the wire, runner to parent: ``{"event": "ready", ...}`` once, ``{"event": "steps",
"wall_seconds": [...], "cpu_seconds": [...], "losses": [...], "figures": {...},
"peak_rss_mib": ...}`` per command, ``{"event": "failed", "error": ...}`` instead of either. CPU
seconds are the process's own, all threads.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks.peers.workload import Workload


@dataclass(frozen=True)
class Peer:
    """A tool that takes part, as its runner file declares it."""

    name: str
    environment: str | None
    package: str
    settings: Mapping[str, str]
    notes: str = ""


class Gate:
    """The runner's end: lets steps through when the parent asks, and times them."""

    def __init__(self, peer: Peer, setting: str, work: Workload, pipes: tuple[TextIO, TextIO]):
        self.peer = peer
        self.setting = setting
        self.work = work
        self._commands, self._replies = pipes
        self._born = time.perf_counter()
        self._is_ready = False
        self._left = 0
        self._walls: list[float] = []
        self._cpus: list[float] = []
        self._losses: list[float] = []
        self._figures: dict[str, list[float]] = {}
        self._wall = self._cpu = 0.0

    def ready(self, *, parameters: int | None = None) -> None:
        """Say that the model stands, wait for the first command, start the clock. Idempotent."""
        if self._is_ready:
            return
        self._is_ready = True
        self.send(
            "ready",
            parameters=parameters,
            versions=versions(self.peer.package),
            build_seconds=time.perf_counter() - self._born,
        )
        self._wait()

    def tick(self, loss: Any = None, **figures: float) -> None:
        """End a step: note its time and loss (number or 0-d tensor), wait if the turn is over."""
        if loss is not None:
            self._losses.append(float(loss))
        self._walls.append(time.perf_counter() - self._wall)
        self._cpus.append(time.process_time() - self._cpu)
        for name, value in figures.items():
            self._figures.setdefault(name, []).append(value)
        self._left -= 1
        if self._left <= 0:
            self._answer()
            self._wait()
        else:
            self._start_clock()

    def send(self, event: str, **fields: Any) -> None:
        """Write one message to the parent."""
        self._replies.write(json.dumps({"event": event, **fields}) + "\n")
        self._replies.flush()

    def _answer(self) -> None:
        self.send(
            "steps",
            wall_seconds=self._walls,
            cpu_seconds=self._cpus,
            losses=self._losses,
            figures=self._figures,
            peak_rss_mib=peak_rss_mib(),
        )
        self._walls, self._cpus, self._losses, self._figures = [], [], [], {}

    def _wait(self) -> None:
        words = self._commands.readline().split()
        if not words:
            # The parent closed the pipe. Tools that own their loop offer no clean way out of it,
            # and nothing of theirs is worth saving.
            os._exit(0)
        self._left = int(words[1])
        self._start_clock()

    def _start_clock(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()


def serve(peer: Peer, run: Callable[[Gate], None]) -> None:
    """Entry point of a runner process: ``NAME_run.py SETTING WORKLOAD_JSON``."""
    parser = argparse.ArgumentParser(description=peer.name)
    parser.add_argument("setting", choices=sorted(peer.settings))
    parser.add_argument("work", type=Workload.from_json)
    options = parser.parse_args()
    end_with_parent()
    gate = Gate(peer, options.setting, options.work, take_over_pipes())
    try:
        run(gate)
        raise RuntimeError("the runner's training loop ended by itself")
    except BaseException as error:
        traceback.print_exc()
        gate.send("failed", error=one_line(error))
        sys.stderr.flush()
        os._exit(1)


def take_over_pipes() -> tuple[TextIO, TextIO]:
    """Keep stdin and stdout for the protocol; whatever a library prints goes to the log."""
    commands = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, replies


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, even by SIGKILL."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def one_line(error: BaseException) -> str:
    """An exception as one short line: its type and the last line of its message that says much."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def peak_rss_mib() -> int:
    """Largest resident set so far. Not ``ru_maxrss``, which a child inherits from its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    return 0


def versions(package: str) -> dict[str, str]:
    """Installed versions of the peer's package and of torch."""
    found = {}
    for name in dict.fromkeys((package, "torch")):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
