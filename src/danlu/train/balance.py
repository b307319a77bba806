"""Work given to ranks by how fast each of them computes: micro-batches to copies, layers to stages.

The global batch, and so the update, stays what it is; only who computes which part of it changes,
between steps. Where ranks are equally fast nothing happens.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from danlu.data.loader import Loader
from danlu.parallel.mesh import Ranks
from danlu.parallel.pipeline import Pipeline
from danlu.planner.layout import Layout
from danlu.planner.schedule import SCHEDULES
from danlu.planner.stages import cut_per_rank, rank_costs, stage_costs

__all__ = ["Balancer", "LayerSeconds", "StageBalancer", "better_cut", "deal", "dealable"]

_EVERY = 10
_LEAST_GAIN = 0.05
"""Steps between two looks, and the shortening of a step that is worth a new dealing."""
_TIMED = 4
_LEAST_GAIN_OF_CUT = 0.1
"""Steps before a look in which stages are timed, and the shortening that is worth building the
model anew; it must show in two looks running."""


class LayerSeconds(NamedTuple):
    """A micro-batch's seconds in the embedding, one block, and the head, on a typical rank."""

    first: float
    block: float
    last: float


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


class StageBalancer:
    """Watches how long the ranks of a pipeline compute, and finds the cut that fits their speeds.

    Args:
        ranks: the mesh; all ranks call `after_step` together.
        pipeline: this rank's part.
        layers: what each layer costs.
        count: of layers.
    """

    def __init__(self, ranks: Ranks, pipeline: Pipeline, layers: LayerSeconds, count: int) -> None:
        self._ranks, self._pipeline = ranks, pipeline
        self._layers, self._count = layers, count
        self._seconds: list[float] = []
        self._steps, self._drifted = 0, False

    def after_step(self) -> tuple[int, ...] | None:
        """Every ten steps: the layers of each stage, where another cut has been faster for long."""
        self._steps += 1
        place = self._steps % _EVERY
        seconds = self._pipeline.time(wanted=place >= _EVERY - _TIMED)
        if seconds:
            self._seconds.append(seconds)
        if place:
            return None
        world, comm = self._ranks.layout.ranks, self._ranks.comm
        own = torch.zeros(world, dtype=torch.float64)
        own[comm.rank] = statistics.median(self._seconds)
        self._seconds.clear()
        slowest = comm.sum(own).view(self._ranks.layout.pipeline, -1).amax(1)
        better = better_cut(self._ranks.layout, slowest.tolist(), self._layers, self._count)
        drifted, self._drifted = self._drifted, better is not None
        return better if drifted else None


def better_cut(
    layout: Layout, seconds: Sequence[float], layers: LayerSeconds, count: int
) -> tuple[int, ...] | None:
    """The cut for ranks that computed for `seconds` in a step; None where it gains too little."""
    owners = SCHEDULES[layout.schedule].owners(layout.pipeline, layout.chunks)
    costs, first, last = [layers.block] * count, layers.first, layers.last
    now = rank_costs(stage_costs(costs, layout.stages, first=first, last=last), owners)
    paces = [taken / cost for taken, cost in zip(seconds, now, strict=True)]
    sizes = cut_per_rank(costs, owners, first=first, last=last, paces=paces)
    then = rank_costs(stage_costs(costs, sizes, first=first, last=last), owners)
    after = max(cost * pace for cost, pace in zip(then, paces, strict=True))
    return sizes if after < (1 - _LEAST_GAIN_OF_CUT) * max(seconds) else None
