"""Ranks on this machine, started by PyTorch's elastic launcher.

One process needs no launcher. Under `torchrun` (or anything that sets its variables) the ranks are
there already and the same command joins them. Restarts are not used: a rank that dies ends the run,
whose newest checkpoint goes on at the next start.
"""

import logging
import math
import os
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from danlu.base.errors import MachineError, UserError
from danlu.base.units import format_duration
from danlu.config.run import RunConfig
from danlu.hardware.comm import launched_world
from danlu.hardware.device import device_count
from danlu.monitor.live import open_display
from danlu.train.folder import RunFolder
from danlu.train.run import decide, open_run
from danlu.train.worker import PEER_IS_GONE

__all__ = ["train"]

_EXIT_USER = UserError.exit_code
_SECONDS_TO_FOLLOW = 20.0
"""Ranks end together; this long after the first, the others are taken to hang."""


def train(config: RunConfig) -> str:
    """Trains `config` on as many ranks as it asks for; returns why the run ended.

    Raises:
        UserError: anything that the user can mend.
        MachineError: a rank died; its own last words are in the message.
    """
    ranks = 1 if launched_world() else _local_ranks(config)
    if ranks == 1:
        return open_run(config).train()
    with open_display(config.monitor.progress, Console(highlight=False)) as display:
        decided = decide(config, display, world=ranks)  # mistakes are told before ranks start
    decided.folder.release()
    return _launch(decided.folder, ranks, config.launch.timeout)


def _local_ranks(config: RunConfig) -> int:
    """Ranks to start on this machine: what the config fixes, or one a device."""
    fixed = (
        config.data_parallel.degree,
        config.tensor_parallel.degree,
        config.pipeline_parallel.stages,
    )
    product = math.prod(size for size in fixed if size != "auto")
    if config.data_parallel.degree != "auto" and "auto" not in fixed:
        return product
    devices = device_count(config.train.device)
    return max(product, devices // product * product)


def _launch(folder: RunFolder, ranks: int, timeout: float) -> str:
    """Starts the ranks and waits for them. Output of all but the first goes to `logs/`."""
    folder.logs.mkdir(parents=True, exist_ok=True)
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
        logs_specs=DefaultLogsSpecs(log_dir=str(folder.logs), redirects=quiet),
    )
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what it would say is said below
    killed: set[int] = set()
    threading.Thread(target=_end_stragglers, args=(ranks, killed), daemon=True).start()
    try:
        elastic_launch(launch, sys.executable)("-m", "danlu.train.worker", str(folder.path))
    except SignalException:
        return "interrupted"
    except ChildFailedError as error:
        culprits = {r: f for r, f in error.failures.items() if f.exitcode != PEER_IS_GONE}
        first = min((culprits or error.failures).items(), key=lambda item: item[1].timestamp)
        rank, failure = first
        if failure.exitcode == _EXIT_USER:  # the rank has said it in one line
            folder.discard()
            raise SystemExit(_EXIT_USER) from None
        if failure.exitcode == PEER_IS_GONE or failure.pid in killed:
            raise MachineError(
                f"a rank of {ranks} did not answer for {format_duration(timeout)}"
                f" (launch.timeout){f': rank {rank}' if failure.pid in killed else ''}. The newest"
                f" checkpoint goes on at the next start; logs: {folder.logs}"
            ) from None
        words = _last_words(folder.logs, rank) if failure.exitcode > 0 else ""
        raise MachineError(
            f"rank {rank} of {ranks} ended with {_how(failure.exitcode)}{words}. The newest"
            f" checkpoint goes on at the next start; logs: {folder.logs}"
        ) from None
    return "done"


def _end_stragglers(ranks: int, killed: set[int]) -> None:
    """Kills ranks that are still there long after another has ended, and notes their process ids.

    The launcher asks them to end and waits as long as a checkpoint may take to write, which is too
    long for a process that does not answer.
    """
    me, began, first_gone = psutil.Process(), False, None
    while True:
        time.sleep(0.5)
        alive = [p for p in me.children() if p.status() != psutil.STATUS_ZOMBIE]
        began = began or len(alive) == ranks
        if not began or len(alive) in (0, ranks):
            if began and not alive:
                return
            continue
        first_gone = first_gone or time.monotonic()
        if time.monotonic() - first_gone > _SECONDS_TO_FOLLOW:
            for process in alive:
                killed.add(process.pid)
                process.kill()
            return


def _how(exitcode: int) -> str:
    return f"signal {-exitcode}" if exitcode < 0 else f"exit code {exitcode}"


def _last_words(logs: Path, rank: int) -> str:
    """The last error, or line, that the rank wrote to its error stream, if that is a file."""
    found = sorted(logs.glob(f"*/attempt_0/{rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
    lines = found[-1].read_text(errors="replace").strip().splitlines() if found else []
    errors = [line for line in lines if "Error: " in line or line.startswith("error: ")] or lines
    return f": {errors[-1].removeprefix(f'[rank{rank}]: ')[:300]}" if errors else ""
