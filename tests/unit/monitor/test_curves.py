import math

import numpy as np
import pytest

from danlu.monitor.curves import RunningMean, Trail, line_chart, sparkline, thin, trend


def test_a_running_mean_follows_a_constant_exactly_and_skips_nan() -> None:
    mean = RunningMean(half_life=10)
    assert math.isnan(mean.value)
    for value in [3.0, math.nan, 3.0, math.inf, 3.0]:
        mean.add(value)
    assert mean.value == pytest.approx(3.0)


def test_a_running_mean_forgets_half_within_its_half_life() -> None:
    mean = RunningMean(half_life=10)
    for value in [0.0] * 300 + [1.0] * 10:
        mean.add(value)
    assert mean.value == pytest.approx(0.5, abs=1e-6)


def test_a_trend_neither_lags_nor_bends_at_the_ends() -> None:
    line = np.linspace(10, 2, 101)
    np.testing.assert_allclose(trend(line, half_width=9), line, rtol=1e-9)


def test_a_trend_bridges_gaps_and_takes_noise_away() -> None:
    noise = np.random.default_rng(0).normal(size=500)
    noise[100:103] = np.nan
    smooth = trend(noise, half_width=20)
    assert np.isfinite(smooth).all()
    assert np.std(smooth[30:-30]) < 0.3


@pytest.mark.parametrize("values", [[], [4.0], [4.0, math.nan], [math.nan] * 3])
def test_a_trend_of_next_to_nothing_is_that(values: list[float]) -> None:
    result = trend(np.array(values, dtype=float), half_width=3)
    assert len(result) == len(values)
    assert all(math.isnan(v) or v == pytest.approx(4.0) for v in result)


def test_thinning_keeps_spikes_ends_and_the_limit() -> None:
    y = np.sin(np.arange(100_000) / 1e4)
    y[54_321], y[77_777] = 9.0, -9.0
    x, thinned = thin(np.arange(100_000.0), y, 1000)
    assert len(x) <= 1000
    assert (x[0], x[-1]) == (0, 99_999)
    assert thinned.max() == 9.0
    assert thinned.min() == -9.0


def test_thinning_keeps_gaps() -> None:
    y = np.ones(10_000)
    y[3000:6000] = np.nan
    _, thinned = thin(np.arange(10_000.0), y, 200)
    assert np.isnan(thinned).any()


def test_thinning_leaves_short_curves_alone() -> None:
    x = np.arange(5.0)
    assert thin(x, x, 10)[1] is x


def test_a_trail_has_bounded_memory_and_keeps_the_whole_course() -> None:
    trail = Trail(limit=64)
    for step in range(100_000):
        trail.add(float(step))
    points = trail.points()
    assert 32 <= len(points) <= 64
    assert points[0] < 5_000
    assert points[-1] > 90_000
    assert points == sorted(points)


def test_a_sparkline_shows_the_course_in_its_width() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(1000)), 20)) == 20
    assert sparkline([], 20) == ""
    assert sparkline([math.nan, math.nan], 20) == ""
    assert len(set(sparkline([2.0, 2.0, 2.0], 3))) == 1
    assert sparkline([0.0, 1.0, 2.0], 3, ascii_only=True).isascii()


def test_a_line_chart_has_its_size_and_no_hole() -> None:
    lines = line_chart([math.exp(-i / 30) for i in range(200)], 40, 5)
    assert [len(line) for line in lines] == [40] * 5
    blank = chr(0x2800)
    assert all(any(line[i] != blank for line in lines) for i in range(40))
    assert lines[0][0] != blank  # high at the start
    assert lines[-1][-1] != blank  # low at the end


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 1.0], [math.nan]])
def test_a_line_chart_of_next_to_nothing_keeps_its_size(values: list[float]) -> None:
    assert [len(line) for line in line_chart(values, 10, 3)] == [10] * 3
