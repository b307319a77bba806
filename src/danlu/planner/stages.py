"""Cutting the layers of a model into pipeline stages.

A pipeline goes at the pace of its slowest rank, and with an embedding in the first stage and the
head and loss in the last one, equally many layers are not equally much work. A cut is written as
the number of consecutive layers of each stage, at least one each.

Costs are numbers of one unit, whichever (seconds of a forward and backward pass, or FLOP).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise, product

__all__ = ["cut", "cut_per_rank", "equal", "rank_costs", "stage_costs"]

_MOST_MOVED = 128
"""Stages between which layers are moved; for more, a search over layouts would take minutes."""
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
    the one with more layers in earlier stages. Exact: bisection for the cost of the most expensive
    stage, then dynamic programming over (stage, layer) where that leaves a choice.

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
    from a stage of a rank with the largest cost to another, shifting what lies between, while that
    helps. With one stage a rank, or very many stages, it is `cut`; with layers of equal cost it
    finds the least largest rank, otherwise one that no such move improves. Few micro-batches never
    fill the pipeline: there `cut` may be the faster one, which a simulation tells.

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
    if len(set(owners)) == len(owners) or len(owners) > _MOST_MOVED:
        return sizes

    cost = _Costs(costs, first, last, by_stage or [1.0] * len(owners))
    stages = cost.of(sizes)
    best = _burden(stages, owners)
    while True:
        ranks = rank_costs(stages, owners)
        heavy = [s for s, owner in enumerate(owners) if ranks[owner] >= best[0] * (1 - _TOLERANCE)]
        moved = [(_burden(cost.of(other), owners), other) for other in _moves(sizes, heavy)]
        burden, candidate = min(moved, default=(best, sizes))
        if not _less(burden, best):
            return sizes
        best, sizes, stages = burden, candidate, cost.of(candidate)


def stage_costs(
    costs: Sequence[float],
    sizes: Sequence[int],
    *,
    first: float = 0.0,
    last: float = 0.0,
    paces: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """The cost of each stage of a cut, times its pace."""
    return _Costs(costs, first, last, paces or [1.0] * len(sizes)).of(sizes)


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

    def of(self, sizes: Sequence[int]) -> tuple[float, ...]:
        """The cost of each stage of a cut."""
        ends = pairwise(accumulate(sizes, initial=0))
        return tuple(self(stage, start, end) for stage, (start, end) in enumerate(ends))

    def furthest(self, largest: float) -> list[int] | None:
        """Where each stage ends if all take as many layers as cost no more than `largest`.

        None where that is not enough for all layers, or a stage has none.
        """
        ends, start = [], 0
        for stage in range(self.stages):
            end, most = start, self.layers - self.stages + stage + 1  # leaves one for every other
            while end < most and self(stage, start, end + 1) <= largest:
                end += 1
            if end == start:
                return None
            ends.append(end)
            start = end
        return ends if start == self.layers else None

    def nearest(self, largest: float) -> list[int]:
        """Where each stage starts if all, from the last one on, take as many as `furthest`."""
        starts, end = [0] * self.stages, self.layers
        for stage in reversed(range(self.stages)):
            start = end
            while start > stage and self(stage, start - 1, end) <= largest:
                start -= 1
            starts[stage] = end = start
        return starts


def _least_largest(cost: _Costs) -> float:
    """The least possible cost of the most expensive stage, to twelve digits."""
    low, high = 0.0, max(cost(stage, 0, cost.layers) for stage in range(cost.stages))
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if cost.furthest(middle) is None:
            low = middle
        else:
            high = middle
    return high


def _most_even(cost: _Costs, largest: float) -> tuple[int, ...]:
    """The cut with the least sum of squares among those without a stage above `largest`."""
    furthest = cost.furthest(largest)
    assert furthest is not None, "no cut is that cheap"
    # A stage can start no later than where the one before ends at most, and no earlier than what
    # the others behind it can take.
    earliest, latest = cost.nearest(largest), [0, *furthest[:-1]]
    starts = [range(a, b + 1) for a, b in zip(earliest, latest, strict=True)]
    starts[0] = range(1)
    ends = [*starts[1:], range(cost.layers, cost.layers + 1)]

    def square(stage: int, start: int, end: int) -> float:
        here = cost(stage, start, end) if end > start else float("inf")
        return here * here if here <= largest else float("inf")

    after = {cost.layers: 0.0}
    tables = [after]  # of a stage: start -> least sum of squares from there on
    for stage in reversed(range(cost.stages)):
        after = {
            start: min(square(stage, start, end) + after[end] for end in ends[stage])
            for start in starts[stage]
        }
        tables.insert(0, after)
    sizes, start = [], 0
    for stage in range(cost.stages):
        least = tables[stage][start] * (1 + _TOLERANCE)
        end = max(
            end
            for end in ends[stage]
            if square(stage, start, end) + tables[stage + 1][end] <= least
        )
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


def _moves(sizes: tuple[int, ...], heavy: Sequence[int]) -> list[tuple[int, ...]]:
    """All cuts in which one of some stages has a layer less and another stage one more."""
    moved = []
    for less, more in product(heavy, range(len(sizes))):
        if sizes[less] > 1 and less != more:
            change = [(n == more) - (n == less) for n in range(len(sizes))]
            moved.append(tuple(s + c for s, c in zip(sizes, change, strict=True)))
    return moved
