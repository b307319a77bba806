import random
from itertools import combinations, pairwise

import pytest

from danlu.planner.schedule import SCHEDULES, StageCost, order, simulate
from danlu.planner.stages import cut, cut_per_rank, equal, stage_costs


def all_cuts(layers, stages):
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *inner, layers)))


def rank_load(costs, sizes, owners, last):
    loads = dict.fromkeys(owners, 0.0)
    for owner, cost in zip(owners, stage_costs(costs, sizes, last=last), strict=True):
        loads[owner] += cost
    return max(loads.values())


def test_an_equal_cut_gives_earlier_stages_what_is_left_over():
    assert equal(32, 4) == (8, 8, 8, 8)
    assert equal(32, 5) == (7, 7, 6, 6, 6)


@pytest.mark.parametrize(("stages", "sizes"), [(4, (9, 9, 8, 6)), (8, (5, 5, 4, 4, 4, 4, 4, 2))])
def test_a_heavy_head_leaves_the_last_stage_fewer_layers(stages, sizes):
    assert cut([1.0] * 32, stages, last=2.41) == sizes


def test_a_cut_is_as_good_as_the_best_of_all_cuts():
    dice = random.Random(0)

    def rate(sizes):
        stages = stage_costs(costs, sizes, first=first, last=last)
        even = sum(c * c for c in stages)
        return round(max(stages), 9), round(even, 7), [-size for size in sizes]

    for _ in range(200):
        layers = dice.randint(1, 9)
        stages = dice.randint(1, layers)
        costs = [dice.choice([1.0, 1.1, 2.0, 3.0]) for _ in range(layers)]
        first, last = dice.uniform(0, 1), dice.uniform(0, 4)
        assert cut(costs, stages, first=first, last=last) == min(all_cuts(layers, stages), key=rate)


def test_a_free_model_is_cut_too():
    assert sum(cut([0.0] * 5, 3)) == 5


@pytest.mark.parametrize("name", ["interleaved", "zero_bubble"])
def test_with_equal_layers_no_cut_has_a_cheaper_rank(name):
    dice = random.Random(1)
    for _ in range(40):
        owners = SCHEDULES[name].owners(dice.randint(1, 3))
        layers, last = dice.randint(len(owners), 11), dice.uniform(0, 4)
        costs = [1.0] * layers
        found = rank_load(costs, cut_per_rank(costs, owners, last=last), owners, last)
        best = min(rank_load(costs, c, owners, last) for c in all_cuts(layers, len(owners)))
        assert found == pytest.approx(best)


def test_with_unequal_layers_it_is_no_worse_than_the_cut_by_stages():
    dice = random.Random(2)
    for _ in range(40):
        owners = SCHEDULES["zero_bubble"].owners(dice.randint(1, 4))
        costs = [dice.uniform(0.5, 3) for _ in range(dice.randint(len(owners), 24))]
        by_rank = cut_per_rank(costs, owners, last=2.0)
        assert sum(by_rank) == len(costs)
        assert min(by_rank) >= 1
        by_stage = cut(costs, len(owners), last=2.0)
        assert rank_load(costs, by_rank, owners, 2.0) <= 1e-9 + rank_load(
            costs, by_stage, owners, 2.0
        )


def test_with_one_stage_a_rank_both_cuts_are_the_same():
    assert cut_per_rank([1.0] * 32, (0, 1, 2, 3), last=2.41) == (9, 9, 8, 6)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble", "dualpipe_v"])
def test_a_pipeline_is_faster_with_a_cut_by_cost_than_with_an_equal_one(name):
    owners = SCHEDULES[name].owners(4)

    def seconds(sizes):
        costs = [StageCost(c, c, c) for c in stage_costs([1.0] * 32, sizes, last=2.41)]
        made = simulate(order(name, 4, 32), costs, pairs=SCHEDULES[name].pairs)
        return made.seconds

    by_cost = seconds(cut_per_rank([1.0] * 32, owners, last=2.41))
    assert by_cost < 0.92 * seconds(equal(32, len(owners)))
    assert by_cost <= seconds(cut([1.0] * 32, len(owners), last=2.41))


@pytest.mark.parametrize("stages", [0, 4])
def test_every_stage_needs_a_layer(stages):
    with pytest.raises(ValueError, match=f"3 layers do not make {stages} stages"):
        cut([1.0] * 3, stages)
    with pytest.raises(ValueError, match="3 layers"):
        equal(3, stages)
