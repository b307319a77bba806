"""The ranks of a run and what they say to one another.

`Comm` is handed to whoever needs it; nobody asks torch.distributed for "the" group. A run of one
process has a `Comm` too, whose collectives return what they are given. Calls and bytes are counted.
"""

import os
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from danlu.base.errors import ConfigError, MachineError

__all__ = ["Comm", "first_rank", "join_ranks", "launched_nodes", "launched_world"]


def launched_world() -> int | None:
    """Ranks that a launcher (torchrun, Slurm with torchrun, Kubernetes) has started, or None."""
    world = os.environ.get("WORLD_SIZE")
    return int(world) if world and "RANK" in os.environ and "MASTER_ADDR" in os.environ else None


def launched_nodes() -> int:
    """Machines over which a launcher has spread its ranks; 1 where there is no launcher."""
    return (launched_world() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) or 1


class Comm:
    """The group of all ranks.

    Attributes:
        rank, world: this process's number and how many there are.
        local_rank: its number on this machine.
        device: where the group's tensors must be (Gloo: the CPU, NCCL: this rank's GPU).
        calls, bytes: collectives so far, by name.
    """

    def __init__(
        self, rank: int = 0, world: int = 1, local_rank: int = 0, device: str = "cpu"
    ) -> None:
        self.rank, self.world, self.local_rank = rank, world, local_rank
        self.device = torch.device(device)
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and talks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum over ranks, in place; the same bits on every rank."""
        if self.world > 1:
            self._count("sum", values.nbytes)
            moved = values.to(self.device)
            dist.all_reduce(moved)
            values.copy_(moved)
        return values

    def largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        if self.world == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64, device=self.device)
        self._count("largest", box.nbytes)
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return float(box)

    def share(self, value: Any) -> Any:
        """The first rank's `value` (any picklable object), on every rank."""
        if self.world == 1:
            return value
        self._count("share", 0)
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        """Returns when every rank has come here."""
        if self.world > 1:
            self._count("wait", 0)
            dist.barrier()

    def close(self) -> None:
        """Leaves the group."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _count(self, name: str, size: int) -> None:
        self.calls[name] += 1
        self.bytes[name] += size


def join_ranks(device: str, *, timeout_seconds: float) -> Comm:
    """Joins the ranks that a launcher started; alone where none did.

    Args:
        device: `cpu` (Gloo) or `cuda` (NCCL, RCCL).
        timeout_seconds: how long a collective waits for the others before it raises.

    Raises:
        ConfigError: more ranks on this machine than it has GPUs.
        MachineError: the other ranks do not answer.
    """
    world = launched_world()
    if world is None or world == 1:
        return Comm()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", 0))
    here = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if device == "cuda" and here > torch.cuda.device_count():  # told by all ranks of the machine
        raise ConfigError(
            "data_parallel.degree",
            f"{here} ranks on a machine with {torch.cuda.device_count()} GPUs.",
            "Start one rank a GPU.",
        )
    backend, place = "gloo", "cpu"
    if device == "cuda":
        backend, place = "nccl", f"cuda:{local_rank}"
        torch.cuda.set_device(local_rank)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    except (dist.DistError, RuntimeError) as error:
        reason = str(error).split("\n", 1)[0]
        raise MachineError(f"rank {rank} of {world} cannot reach the others: {reason}") from error
    return Comm(rank, world, local_rank, place)


def first_rank() -> bool:
    """Whether this process is the one that talks: the first rank, or the only process."""
    return int(os.environ.get("RANK", 0)) == 0
