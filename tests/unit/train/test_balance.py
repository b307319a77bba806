import itertools

import pytest

from danlu.planner.layout import Layout
from danlu.train.balance import deal, dealable


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
