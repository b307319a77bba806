"""Cutting the layers of a model into pipeline stages.

A pipeline goes at the pace of its slowest rank, and with an embedding in the first stage and the
head and loss in the last one, equally many layers are not equally much work. A cut is written as
the number of consecutive layers of each stage, at least one each.

Costs are numbers of one unit, whichever (seconds of a forward and backward pass, or FLOP).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, permutations
from math import inf

__all__ = ["cut", "cut_per_rank", "equal", "rank_costs", "stage_costs"]

_TOLERANCE = 1e-9  # relative: sums of the same numbers in another order count as equal


def equal(layers: int, stages: int) -> tuple[int, ...]:
    """The same number of layers everywhere; earlier stages take what is left over."""
    _check(layers, stages)
    each, more = divmod(layers, stages)
    return (each + 1,) * more + (each,) * (stages - more)


def cut(
    costs: Sequence[float],
    stages: int,
    *,
    first: float = 0.0,
    last: float = 0.0,
    paces: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """The cut whose most expensive stage is cheapest.

    Of several such cuts the most even one (least sum of the stages' squared costs), and of those
    the one with more layers in earlier stages. Exact: dynamic programming over (stage, layer), with
    only stages that are no dearer than the dearest of an equal cut.

    Args:
        costs: of each layer, 0 or more.
        stages: number of stages.
        first: further cost of the first stage (embedding).
        last: further cost of the last stage (head and loss).
        paces: what a unit of cost takes in each stage, where ranks are not equally fast.

    Raises:
        ValueError: fewer layers than stages, or no stages.
    """
    _check(len(costs), stages)
    table = _Costs(costs, first, last, paces or [1.0] * stages)
    largest = _least_largest(table) * (1 + _TOLERANCE)
    return _most_even(table, largest)


def cut_per_rank(
    costs: Sequence[float],
    owners: Sequence[int],
    *,
    first: float = 0.0,
    last: float = 0.0,
    paces: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """The cut whose most expensive *rank* is cheapest, where ranks hold several stages.

    Minimises, in this order: the largest cost of a rank (the pace once the pipeline is full), the
    unevenness of ranks, the largest cost of a stage (the wait while it fills and drains), the
    unevenness of stages (both: sum of squares). Starts from `cut` and moves one layer's worth
    between two stages, shifting what lies between, while that helps. With one stage a rank it is
    `cut`; with layers of equal cost it finds the least largest rank, otherwise one that no such
    move improves. Few micro-batches never fill the pipeline: there `cut` may be the faster one,
    which a simulation tells.

    Args:
        costs: of each layer, 0 or more.
        owners: the rank of each stage (`Schedule.owners`).
        first: further cost of the first stage.
        last: further cost of the last stage.
        paces: what a unit of cost takes each rank, where they are not equally fast.

    Raises:
        ValueError: fewer layers than stages, or no stages.
    """
    by_stage = None if paces is None else [paces[owner] for owner in owners]
    sizes = cut(costs, len(owners), first=first, last=last, paces=by_stage)
    if len(set(owners)) == len(owners):
        return sizes

    def burden_of(sizes: tuple[int, ...]) -> _Burden:
        return _burden(stage_costs(costs, sizes, first=first, last=last, paces=by_stage), owners)

    best = burden_of(sizes)
    while True:
        moved = [(burden_of(candidate), candidate) for candidate in _moves(sizes)]
        burden, candidate = min(moved, default=(best, sizes))
        if not _less(burden, best):
            return sizes
        best, sizes = burden, candidate


def stage_costs(
    costs: Sequence[float],
    sizes: Sequence[int],
    *,
    first: float = 0.0,
    last: float = 0.0,
    paces: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """The cost of each stage of a cut, times its pace."""
    ends = accumulate(sizes, initial=0)
    sums = [sum(costs[start:end]) for start, end in pairwise(ends)]
    sums[0] += first
    sums[-1] += last
    return tuple(c * p for c, p in zip(sums, paces or [1.0] * len(sums), strict=True))


def rank_costs(stages: Sequence[float], owners: Sequence[int]) -> tuple[float, ...]:
    """The cost of each rank, from those of the stages."""
    ranks = [0.0] * (max(owners) + 1)
    for owner, cost in zip(owners, stages, strict=True):
        ranks[owner] += cost
    return tuple(ranks)


def _check(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers do not make {stages} stages of one layer or more")


class _Costs:
    """The cost of any run of layers as any stage, in constant time."""

    def __init__(
        self, costs: Sequence[float], first: float, last: float, paces: Sequence[float]
    ) -> None:
        self.layers, self.stages = len(costs), len(paces)
        self._before, self._paces = list(accumulate(costs, initial=0.0)), paces
        self._extra = [0.0] * len(paces)
        self._extra[0] += first
        self._extra[-1] += last

    def __call__(self, stage: int, start: int, end: int) -> float:
        cost = self._before[end] - self._before[start] + self._extra[stage]
        return cost * self._paces[stage]

    def starts(self, stage: int) -> range:
        """Where a stage can begin, leaving one layer for every other."""
        if stage == 0:
            return range(1)
        return range(stage, self.layers - self.stages + stage + 1)

    def ends(self, stage: int, start: int, most: float) -> Iterator[tuple[int, float]]:
        """Where a stage that begins at `start` can end, with its cost, up to a cost of `most`."""
        last = self.layers - self.stages + stage + 1
        for end in range(last if stage == self.stages - 1 else start + 1, last + 1):
            cost = self(stage, start, end)
            if cost > most:
                return
            yield end, cost


def _least_largest(cost: _Costs) -> float:
    """The least possible cost of the most expensive stage."""
    ends = list(accumulate(equal(cost.layers, cost.stages), initial=0))
    most = max(cost(stage, *ends[stage : stage + 2]) for stage in range(cost.stages))
    after = {cost.layers: 0.0}
    for stage in reversed(range(cost.stages)):
        after = {
            start: min(
                (max(here, after[end]) for end, here in cost.ends(stage, start, most)),
                default=inf,
            )
            for start in cost.starts(stage)
        }
    return after[0]


def _most_even(cost: _Costs, largest: float) -> tuple[int, ...]:
    """The cut with the least sum of squares among those without a stage above `largest`."""
    tables = [{cost.layers: 0.0}]  # of a stage: start -> least sum of squares from there on

    def sums(stage: int, start: int, after: Mapping[int, float]) -> Iterator[tuple[int, float]]:
        for end, here in cost.ends(stage, start, largest):
            yield end, here * here + after[end]

    for stage in reversed(range(cost.stages)):
        after = tables[0]
        tables.insert(
            0,
            {
                start: min((total for _, total in sums(stage, start, after)), default=inf)
                for start in cost.starts(stage)
            },
        )
    sizes, start = [], 0
    for stage in range(cost.stages):
        least = tables[stage][start] * (1 + _TOLERANCE)
        end = max(end for end, total in sums(stage, start, tables[stage + 1]) if total <= least)
        sizes.append(end - start)
        start = end
    return tuple(sizes)


_Burden = tuple[float, float, float, float]


def _burden(stages: Sequence[float], owners: Sequence[int]) -> _Burden:
    """What `cut_per_rank` minimises, the most important first."""
    ranks = rank_costs(stages, owners)
    return max(ranks), sum(c * c for c in ranks), max(stages), sum(c * c for c in stages)


def _less(one: _Burden, other: _Burden) -> bool:
    """Whether a burden is smaller in its first part that differs by more than rounding."""
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > _TOLERANCE * max(abs(a), abs(b)):
            return a < b
    return False


def _moves(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All cuts in which one stage has a layer less and another one more."""
    moved = []
    for less, more in permutations(range(len(sizes)), 2):
        if sizes[less] > 1:
            change = [(n == more) - (n == less) for n in range(len(sizes))]
            moved.append(tuple(s + c for s, c in zip(sizes, change, strict=True)))
    return moved
