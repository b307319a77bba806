"""Ranks on this machine, started by PyTorch's elastic launcher.

One process needs no launcher. Under `torchrun` (or anything that sets its variables) the ranks are
there already and the same command joins them. Restarts are not used: a rank that dies ends the run,
whose newest checkpoint goes on at the next start.
"""

import json
import math

from rich.console import Console
from torch.distributed.elastic.multiprocessing.api import SignalException

from danlu.base.errors import MachineError, UserError
from danlu.config.run import RunConfig
from danlu.hardware.comm import launched_world
from danlu.hardware.device import device_count
from danlu.monitor.live import open_display
from danlu.train.folder import RunFolder
from danlu.train.ranks import NOT_FINITE, RankEndedError, start_ranks
from danlu.train.run import decide, open_run

__all__ = ["train"]


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
    return _launch(config, decided.folder, ranks)


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


def _launch(config: RunConfig, folder: RunFolder, ranks: int) -> str:
    # Ranks are told the config: the folder is free until they take it, and may be another run's.
    argument = json.dumps(config.to_dict() | {"folder": str(folder.path)})
    timeout = config.launch.timeout
    try:
        start_ranks("danlu.train.worker", argument, ranks, folder.logs, timeout=timeout)
    except SignalException:
        folder.discard()
        return "interrupted"
    except RankEndedError as ended:
        if ended.code == NOT_FINITE:
            return "nan"
        folder.discard()
        raise SystemExit(UserError.exit_code) from None
    except MachineError as error:
        raise MachineError(
            f"{error} The newest checkpoint goes on at the next start; logs: {folder.logs}"
        ) from None
    return "done"
