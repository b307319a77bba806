"""Processes on this machine, one a rank, started by PyTorch's elastic launcher.

Restarts are not used. A rank that dies ends the others at once; one that hangs is given the ranks'
own time limit, and is killed `_SECONDS_TO_FOLLOW` after the first of the others has ended.
"""

import contextlib
import logging
import os
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from danlu.base.errors import MachineError, UserError
from danlu.base.units import format_duration

__all__ = ["NOT_FINITE", "PEER_IS_GONE", "RankEndedError", "lost_a_peer", "start_ranks"]

PEER_IS_GONE = 75
"""Exit code of a rank that is well but has lost another (EX_TEMPFAIL of sysexits.h)."""
_LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting",
)  # fmt: skip
"""What Gloo says in a rank whose peer has died or hangs."""
_SECONDS_TO_FOLLOW = 20.0
"""Ranks end together; this long after the first, the others are taken to hang."""


NOT_FINITE = 3
"""Exit code of a rank whose loss is not a finite number."""


class RankEndedError(Exception):
    """The ranks ended before the run's end, and have said why.

    `code` is that of a user's mistake, or `NOT_FINITE`.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def lost_a_peer(error: RuntimeError) -> bool:
    """Whether an error of a collective means that another rank is gone."""
    return any(words in str(error) for words in _LOST)


def start_ranks(module: str, argument: str, ranks: int, logs: Path, *, timeout: float) -> None:
    """Runs `module.main(argument)` on `ranks` ranks and waits for them.

    Args:
        module: its `main` joins the ranks by itself and returns the exit code.
        argument: its only one.
        ranks: processes.
        logs: folder for the output of all but the first.
        timeout: seconds that ranks wait for one another, for the message.

    Raises:
        RankEndedError: ranks ended and have said why.
        MachineError: a rank died or hung; its own last words are in the message.
        SignalException: Ctrl-C or SIGTERM, passed on to the ranks.
    """
    logs.mkdir(parents=True, exist_ok=True)
    quiet = dict.fromkeys(range(1, ranks), Std.ALL)
    # Ranks start with what their backend needs; the plan sets the number of threads afterwards.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=300,  # long enough to write a checkpoint after Ctrl-C
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=quiet),
    )
    elastic = "torch.distributed.elastic"
    for name in (elastic, f"{elastic}.agent.server.api", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what it would say is said below
    killed: set[int] = set()
    over = threading.Event()
    arguments = (module, ranks, over, killed)
    threading.Thread(target=_end_stragglers, args=arguments, daemon=True).start()
    try:
        elastic_launch(launch, sys.executable)("-m", "danlu.train.rank", module, argument)
    except ChildFailedError as error:
        culprits = {r: f for r, f in error.failures.items() if f.exitcode != PEER_IS_GONE}
        first = min((culprits or error.failures).items(), key=lambda item: item[1].timestamp)
        rank, failure = first
        if failure.exitcode in (UserError.exit_code, NOT_FINITE):
            raise RankEndedError(failure.exitcode) from None
        if failure.exitcode == PEER_IS_GONE or failure.pid in killed:
            raise MachineError(
                f"a rank of {ranks} did not answer for {format_duration(timeout)}"
                f" (launch.timeout){f': rank {rank}' if failure.pid in killed else ''}."
            ) from None
        words = _last_words(logs, rank) if failure.exitcode > 0 else ""
        raise MachineError(
            f"rank {rank} of {ranks} ended with {_how(failure.exitcode)}{words}."
        ) from None
    finally:
        over.set()


def _end_stragglers(module: str, ranks: int, over: threading.Event, killed: set[int]) -> None:
    """Kills ranks that are still there long after another has ended, and notes their process ids.

    The launcher asks them to end and waits as long as a checkpoint may take to write, which is too
    long for a process that does not answer.
    """
    began, first_gone = False, None
    while not over.wait(0.5):
        alive = [p for p in psutil.Process().children() if _runs(p, module)]
        began = began or len(alive) == ranks
        if not began or len(alive) in (0, ranks):
            continue
        first_gone = first_gone or time.monotonic()
        if time.monotonic() - first_gone > _SECONDS_TO_FOLLOW:
            for process in alive:
                killed.add(process.pid)
                process.kill()


def _runs(process: psutil.Process, module: str) -> bool:
    """Whether a child process is a rank that has not ended."""
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE and module in process.cmdline()
    return False


def _how(exitcode: int) -> str:
    return f"signal {-exitcode}" if exitcode < 0 else f"exit code {exitcode}"


def _last_words(logs: Path, rank: int) -> str:
    """The last error, or line, that the rank wrote to its error stream, if that is a file."""
    found = sorted(logs.glob(f"*/attempt_0/{rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
    lines = found[-1].read_text(errors="replace").strip().splitlines() if found else []
    errors = [line for line in lines if "Error: " in line or line.startswith("error: ")] or lines
    return f": {errors[-1].removeprefix(f'[rank{rank}]: ')[:300]}" if errors else ""
