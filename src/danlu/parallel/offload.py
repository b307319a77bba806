"""A share of the optimizer's state kept in a file (ZeRO-Infinity, arXiv 2104.07857, on a CPU).

The file is mapped into memory: the optimizer updates it like any tensor, the operating system
brings pages in and writes them back. Before an update the pages are asked for, so that reading
overlaps with the end of backward; after it they are let go, so that they do not count as the
process's memory.
"""

import mmap
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["Offload"]


class Offload:
    """The part of an AdamW optimizer's moments that lives in a file.

    Attributes:
        bytes: of the state that is in the file.
        total: of all of the state.

    Args:
        optimizer: new, without state; afterwards it has all of its state, zero.
        share: of the state's bytes that goes to the file, in whole tensors.
        path: the file; it has no name any more once it is open, so that nothing is left behind.
    """

    def __init__(self, optimizer: Optimizer, share: float, path: Path) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        sizes = {p: 2 * _local(p).nbytes for p in parameters}
        self.total = sum(sizes.values())
        chosen = _share_of(sizes, share * self.total)
        self.bytes = sum(sizes[p] for p in chosen)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w+b") as file:
            file.truncate(max(self.bytes, mmap.PAGESIZE))
            self._map = mmap.mmap(file.fileno(), 0)
        path.unlink()
        offset = 0
        for parameter in parameters:
            state = optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=_local(parameter).device)
            for name in ("exp_avg", "exp_avg_sq"):
                local = torch.zeros_like(_local(parameter))
                if parameter in chosen:
                    local = self._slice(local, offset)
                    offset += local.nbytes
                state[name] = _like(parameter, local)

    def _slice(self, like: Tensor, offset: int) -> Tensor:
        if not like.numel():
            return like
        flat = torch.frombuffer(self._map, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)

    def fetch(self) -> None:
        """Asks for the state's pages; returns at once."""
        self._map.madvise(mmap.MADV_WILLNEED)

    def release(self) -> None:
        """Lets the state's pages go; they are written to the file in the background."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _share_of(sizes: dict[Tensor, int], wanted: float) -> set[Tensor]:
    """Tensors, largest first, whose bytes come closest to `wanted` without a search."""
    chosen: set[Tensor] = set()
    left = wanted
    for tensor, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size <= 2 * left:  # adding it comes closer than leaving it
            chosen.add(tensor)
            left -= size
    return chosen


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
