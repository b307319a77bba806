"""Curves made fit to look at: smoothed, thinned, or drawn with characters."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Curve", "RunningMean", "Trail", "line_chart", "sparkline", "thin", "trend"]

Curve = npt.NDArray[np.float64]

_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille: 4 rows, 2 columns


class RunningMean:
    """An exponential running mean without the usual pull towards its start (as Adam corrects it).

    Args:
        half_life: values after which one's weight has halved. It is shorter at the start (a tenth
            of the values there are): there a loss falls fast, and a slow mean would lag far behind.
    """

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._mean, self._weight, self._count = 0.0, 0.0, 0

    def add(self, value: float) -> None:
        """Takes a value in; one that is not finite does not count."""
        if math.isfinite(value):
            self._count += 1
            keep = 0.5 ** (1 / min(max(self._count / 10, 1.0), max(self._half_life, 1.0)))
            self._mean = keep * self._mean + (1 - keep) * value
            self._weight = keep * self._weight + (1 - keep)

    @property
    def value(self) -> float:
        """The mean; NaN before the first value."""
        return self._mean / self._weight if self._weight else math.nan


def trend(values: Curve, half_width: int) -> Curve:
    """The smooth curve through all values: at each point a line fitted to its surroundings.

    Unlike a running mean it neither lags behind nor bends away at the ends. NaN does not count.

    Args:
        values: evenly spaced.
        half_width: values on each side that a point's line is fitted to, the near ones most.
    """
    if not len(values):
        return values
    offset = np.arange(-half_width, half_width + 1)
    weight = (1 - np.abs(offset / (half_width + 1)) ** 3) ** 3
    known = np.isfinite(values)
    there, filled = known.astype(float), np.where(known, values, 0.0)

    def around(signal: Curve, power: int) -> Curve:
        kernel = weight * offset**power
        return np.convolve(signal, kernel[::-1], mode="full")[half_width : half_width + len(signal)]

    with np.errstate(over="ignore", invalid="ignore"):  # losses near the end of what floats hold
        s0, s1, s2 = (around(there, power) for power in range(3))
        t0, t1 = (around(filled, power) for power in range(2))
        spread, none = s0 * s2 - s1**2, np.full_like(t0, np.nan)
        fitted = np.divide(s2 * t0 - s1 * t1, spread, out=none.copy(), where=spread > 1e-9)
        level = np.divide(t0, s0, out=none, where=s0 > 0)
    return np.where(np.isfinite(fitted), fitted, level)


def thin(x: Curve, y: Curve, limit: int) -> tuple[Curve, Curve]:
    """At most `limit` points that look the same: the lowest and the highest of each bucket.

    Spikes stay visible, which evenly picked points would lose. Gaps (NaN) stay where a whole bucket
    is one.
    """
    if len(x) <= limit:
        return x, y
    size = -(-len(x) // (limit // 2 - 1))
    whole = len(x) // size * size
    buckets = y[:whole].reshape(-1, size)
    start = np.arange(0, whole, size)
    low = start + np.where(np.isnan(buckets), np.inf, buckets).argmin(axis=1)
    high = start + np.where(np.isnan(buckets), -np.inf, buckets).argmax(axis=1)
    keep = np.unique(np.concatenate([[0], low, high, [len(x) - 1]]))
    return x[keep], y[keep]


class Trail:
    """A curve of any length in bounded memory: when full, neighbours are averaged in pairs.

    Args:
        limit: points kept at most (an even number).
    """

    def __init__(self, limit: int = 512) -> None:
        self._limit, self._stride = limit, 1
        self._points: list[float] = []
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        """Appends a value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._sum += value
        self._count += 1
        if self._count < self._stride:
            return
        self._points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._points) >= self._limit:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(a + b) / 2 for a, b in pairs]
            self._stride *= 2

    def points(self) -> list[float]:
        """The curve so far, oldest first."""
        return list(self._points)


def _resample(values: Sequence[float] | Curve, count: int) -> list[float]:
    """`count` means of equal stretches; fewer values than that are returned as they are."""
    points = np.asarray(values, dtype=np.float64)
    points = points[np.isfinite(points)]
    if len(points) > count > 0:
        edges = np.linspace(0, len(points), count + 1).round().astype(np.intp)
        points = np.add.reduceat(points, edges[:-1]) / np.diff(edges)
    return points.tolist()  # type: ignore[no-any-return]


def sparkline(values: Sequence[float] | Curve, width: int, *, ascii_only: bool = False) -> str:
    """A curve one line high and at most `width` characters wide."""
    points = _resample(values, width)
    if not points or width < 1:
        return ""
    signs = _ASCII_BLOCKS if ascii_only else _BLOCKS
    low, span = min(points), max(points) - min(points)
    steps = [(p - low) / span if span else 0.5 for p in points]
    return "".join(signs[min(int(s * len(signs)), len(signs) - 1)] for s in steps)


def line_chart(
    values: Sequence[float] | Curve, width: int, height: int, *, from_zero: bool = False
) -> list[str]:
    """A curve drawn in braille dots (2 × 4 a character): `height` lines, `width` characters."""
    points = _resample(values, width * 2)
    if not points:
        return [" " * width] * height
    if len(points) < width * 2:
        where = np.linspace(0, len(points) - 1, width * 2)
        points = list(np.interp(where, np.arange(len(points)), points))
    low = min(0.0, *points) if from_zero else min(points)
    span, rows = max(points) - low, height * 4
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, point in enumerate(points):
        level = round((point - low) / span * (rows - 1)) if span else rows // 2
        # A steep piece is drawn as a vertical stroke, so that the line never breaks.
        first, last = sorted((level, level if before is None else before))
        for dot in range(first, last + 1) if last - first > 1 else (level,):
            row = rows - 1 - dot
            cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        before = level
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]
