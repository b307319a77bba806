"""Micro-batches dealt to the copies of a model by how fast each copy computes.

The global batch, and so the update, stays what it is; only who computes which part of it changes,
between steps. Where ranks are equally fast nothing happens.
"""

import statistics
from collections.abc import Callable, Sequence

import torch

from danlu.data.loader import Loader
from danlu.parallel.mesh import Ranks
from danlu.planner.layout import Layout

__all__ = ["Balancer", "deal", "dealable"]

_EVERY = 10
_LEAST_GAIN = 0.05
"""Steps between two looks, and the shortening of a step that is worth a new dealing."""


def dealable(layout: Layout, micro_batches: int) -> bool:
    """Whether copies may differ in micro-batches: no exchange happens within one of them."""
    return layout.data > 1 and layout.pipeline == 1 and layout.zero == 0 and micro_batches > 1


def deal(seconds: Sequence[float], total: int) -> tuple[int, ...]:
    """Micro-batches of each copy, so that the last copy is done as early as can be.

    Each has two or more: only in those before its last one does a copy wait for no other.

    Args:
        seconds: that a micro-batch takes each copy.
        total: of a step, over all copies; two a copy or more.
    """
    shares = [2] * len(seconds)
    for _ in range(total - sum(shares)):
        best = min(range(len(seconds)), key=lambda copy: (shares[copy] + 1) * seconds[copy])
        shares[best] += 1
    return tuple(shares)


class Balancer:
    """Watches how long micro-batches take and deals them anew when that pays.

    Args:
        ranks: the mesh; all ranks call `after_step` together.
        loader: of this copy.
        tell: told, in a sentence, about each new dealing.
    """

    def __init__(self, ranks: Ranks, loader: Loader, tell: Callable[[str], None]) -> None:
        self._ranks, self._loader, self._tell = ranks, loader, tell
        self._seconds: list[float] = []
        self._steps = 0

    def add(self, seconds: float) -> None:
        """One micro-batch's time in which this rank waited for no other copy."""
        self._seconds.append(seconds)

    def after_step(self) -> None:
        """Every ten steps: compares the copies, and deals anew where a step gets shorter."""
        self._steps += 1
        if self._steps % _EVERY:
            return
        layout, shares = self._ranks.layout, self._loader.shares
        own = torch.zeros(layout.data, dtype=torch.float64)
        own[self._ranks.copy] = statistics.median(self._seconds)
        seconds = (self._ranks.comm.sum(own) / layout.tensor).tolist()
        self._seconds.clear()
        better = deal(seconds, sum(shares))
        before = max(k * s for k, s in zip(shares, seconds, strict=True))
        after = max(k * s for k, s in zip(better, seconds, strict=True))
        if after < before * (1 - _LEAST_GAIN):
            self._loader.deal(better)
            dealt = " + ".join(str(k) for k in better)
            self._tell(
                f"Micro-batches are dealt {dealt} to the copies by their speed; a step should take"
                f" {after / before:.0%} of the time."
            )
