"""What every learning-rate schedule promises."""

import math

import pytest

from danlu.optim.schedules._base import SCHEDULES

SHAPES = [(1, 0), (2, 1), (10, 0), (100, 10), (1000, 999), (37, 36)]


@pytest.mark.parametrize("name", SCHEDULES.names())
@pytest.mark.parametrize(("steps", "warmup"), SHAPES)
class TestSchedule:
    def make(self, name, steps, warmup):
        kind = SCHEDULES.find(name)
        return kind(steps=steps, warmup_steps=warmup, decay_fraction=0.2, final_factor=0.1)

    def test_factors_are_finite_and_between_zero_and_one(self, name, steps, warmup):
        schedule = self.make(name, steps, warmup)
        factors = [schedule.factor(step) for step in range(steps + 5)]
        assert all(math.isfinite(f) and 0 < f <= 1 for f in factors)

    def test_it_rises_linearly_and_ends_as_declared(self, name, steps, warmup):
        schedule = self.make(name, steps, warmup)
        rise = [schedule.factor(step) for step in range(warmup)]
        assert rise == pytest.approx([(i + 1) / (warmup + 1) for i in range(warmup)])
        if steps - warmup > 2:
            assert schedule.factor(steps - 1) == pytest.approx(schedule.last)
            assert schedule.factor(steps + 100) == pytest.approx(schedule.last)

    def test_a_resumed_schedule_is_equal(self, name, steps, warmup):
        first, second = self.make(name, steps, warmup), self.make(name, steps, warmup)
        assert [first.factor(s) for s in range(steps)] == [second.factor(s) for s in range(steps)]

    def test_it_never_rises_after_the_warmup(self, name, steps, warmup):
        schedule = self.make(name, steps, warmup)
        after = [schedule.factor(step) for step in range(warmup, steps)]
        assert after == sorted(after, reverse=True)
