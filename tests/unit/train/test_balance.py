import itertools

import pytest

from danlu.planner.layout import Layout
from danlu.train.balance import LayerSeconds, better_cut, deal, dealable


def test_equal_copies_get_equal_shares():
    assert deal([1.0, 1.0, 1.0, 1.0], 16) == (4, 4, 4, 4)


def test_a_slow_copy_gets_less_and_every_copy_gets_something():
    assert deal([1.0, 3.0], 8) == (6, 2)
    assert deal([1.0, 1000.0], 8) == (6, 2)


@pytest.mark.parametrize("seconds", [(1, 2, 5), (3, 1, 1), (1.1, 1.0, 0.9)])
def test_no_other_dealing_is_done_earlier(seconds):
    total = 9
    last = max(k * s for k, s in zip(deal(seconds, total), seconds, strict=True))
    for shares in itertools.product(range(2, total), repeat=3):
        if sum(shares) == total:
            slowest = max(k * s for k, s in zip(shares, seconds, strict=True))
            assert last <= slowest + 1e-12


def test_what_exchanges_within_a_micro_batch_cannot_be_dealt():
    assert dealable(Layout(data=2), 2)
    assert not dealable(Layout(data=2, zero=1), 4)
    assert not dealable(Layout(data=2, pipeline=2, stages=(1, 1)), 4)
    assert not dealable(Layout(data=2), 1)


LAYERS = LayerSeconds(0.0, 1.0, 2.0)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_a_pipeline_whose_ranks_are_equally_fast_stays_as_it_is(schedule):
    stages = {"1f1b": (5, 3), "interleaved": (3, 2, 2, 1), "zero_bubble": (2, 3, 2, 1)}
    layout = Layout(pipeline=2, schedule=schedule, stages=stages[schedule])
    assert better_cut(layout, (1.0, 1.02), LAYERS, 8) is None


def test_a_slow_rank_of_a_pipeline_gets_fewer_layers():
    layout = Layout(pipeline=2, schedule="1f1b", stages=(5, 3))
    assert better_cut(layout, (5.0, 10.0), LAYERS, 8) == (7, 1)  # 7 x 1 and (1 + 2) x 2
    assert better_cut(layout, (15.0, 5.0), LAYERS, 8) == (2, 6)  # 2 x 3 and (6 + 2) x 1


def test_a_slow_rank_that_holds_both_ends_gets_fewer_layers():
    layout = Layout(pipeline=2, schedule="zero_bubble", stages=(2, 3, 2, 1))
    sizes = better_cut(layout, (15.0, 5.0), LAYERS, 8)
    assert sizes is not None
    assert sum(sizes) == 8
    assert sizes[0] + sizes[3] < 3 < sizes[1] + sizes[2]
