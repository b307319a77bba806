"""Ranks on this machine, started by PyTorch's elastic launcher.

One process needs no launcher. Under `torchrun` (or anything that sets its variables) the ranks are
there already and the same command joins them. Restarts are not used: a rank that dies ends the run,
whose newest checkpoint goes on at the next start.
"""

import math
import os
import sys
import uuid
from pathlib import Path

from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from danlu.base.errors import MachineError, UserError
from danlu.config.run import RunConfig
from danlu.hardware.comm import launched_world
from danlu.hardware.device import device_count
from danlu.monitor.live import open_display
from danlu.train.folder import RunFolder
from danlu.train.run import decide, open_run

__all__ = ["train"]

_EXIT_USER = UserError.exit_code


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
    return _launch(decided.folder, ranks)


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


def _launch(folder: RunFolder, ranks: int) -> str:
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
    try:
        elastic_launch(launch, sys.executable)("-m", "danlu.train.worker", str(folder.path))
    except SignalException:
        return "interrupted"
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == _EXIT_USER:  # the rank has said it in one line
            folder.discard()
            raise SystemExit(_EXIT_USER) from None
        words = _last_words(folder.logs, rank)
        raise MachineError(
            f"rank {rank} of {ranks} ended with {_how(failure.exitcode)}{words}. The newest"
            f" checkpoint goes on at the next start; logs: {folder.logs}"
        ) from None
    return "done"


def _how(exitcode: int) -> str:
    return f"signal {-exitcode}" if exitcode < 0 else f"exit code {exitcode}"


def _last_words(logs: Path, rank: int) -> str:
    """The last line that the rank wrote to its error stream, where that went to a file."""
    found = sorted(logs.glob(f"*/attempt_0/{rank}/stderr.log"), key=lambda p: p.stat().st_mtime)
    lines = found[-1].read_text(errors="replace").strip().splitlines() if found else []
    return f": {lines[-1][:300]}" if lines else ""
