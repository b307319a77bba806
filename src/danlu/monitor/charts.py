"""The report's charts as data: traces for Plotly with the names of colours, not colours.

Colours (`--ember`, `--jade` …) are resolved by the page, which knows whether it is light or dark.
Curves are thinned here, so that a run of a million steps makes no larger page than one of a
thousand.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from danlu.base.units import format_count
from danlu.monitor.curves import Curve, thin, trend
from danlu.monitor.history import History

__all__ = ["HOURS_FROM_SECONDS", "Chart", "Group", "chart_groups"]

_POINTS = 1500  # of a curve on the page: about one for each pixel of a wide screen
_TREND_POINTS = 4000  # that a smooth curve is computed from
_MOST_EXTRAS = 12

HOURS_FROM_SECONDS = 10_800.0
"""Runs longer than this have their time in hours, others in minutes."""

RAW, SMOOTH, OTHER = "--ember-light", "--ember", "--jade"


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart.

    Attributes:
        name: unique on the page, for its element.
        note: a line below it, may be empty.
        legend: (label, colour name, form) of what is drawn; form is `line`, `dots` or `dashes`.
        traces: Plotly traces; `meta` holds other x values by name (`tokens`, `time`).
        y: Plotly's y-axis: title, range.
        tall: whether it takes the whole width.
    """

    name: str
    title: str
    note: str
    legend: list[tuple[str, str, str]]
    traces: list[dict[str, Any]]
    y: dict[str, Any]
    tall: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Charts that belong on one card."""

    title: str
    charts: list[Chart]


def chart_groups(history: History) -> list[Group]:
    """All charts that the run has numbers for."""
    if not len(history) and not history.evaluations:
        return []
    axes = _Axes(history)
    groups = [
        Group("Learning", [_loss(history, axes), *_bits_per_byte(history, axes)]),
        Group("Speed", [_throughput(history, axes), _step_time(history, axes)]),
        Group("Memory and updates", _updates(history, axes)),
        Group(
            "Further numbers", [_extra(history, axes, n) for n in history.extras()[:_MOST_EXTRAS]]
        ),
    ]
    filled = [Group(g.title, [c for c in g.charts if c.traces]) for g in groups]
    return [group for group in filled if group.charts]


class _Axes:
    """What can stand on the x axis: steps, tokens, training time."""

    def __init__(self, history: History) -> None:
        self.step = history.column("step")
        self._tokens = history.tokens_until()
        seconds = np.nan_to_num(history.column("seconds"))
        # Steps between two lines took as long as the later one.
        self._time = np.cumsum(np.diff(self.step, prepend=0) * seconds)
        self._unit = 3600.0 if history.seconds > HOURS_FROM_SECONDS else 60.0

    def others(self, step: Curve) -> dict[str, list[Any]]:
        """The same moments in tokens and in training time (minutes, of long runs hours)."""
        if not len(self.step):
            return {}
        return {
            "tokens": _plain(np.interp(step, self.step, self._tokens)),
            "time": _plain(np.interp(step, self.step, self._time / self._unit)),
        }


def _plain(values: Curve) -> list[Any]:
    """JSON-ready numbers of five digits; null for what is not finite."""
    return [
        None
        if not math.isfinite(v)
        else int(v)
        if v == int(v) and abs(v) < 1e15
        else float(f"{v:.5g}")
        for v in values.tolist()
    ]


def _line(name: str, x: Curve, y: Curve, color: str, **more: Any) -> dict[str, Any]:
    """A curve; one point alone is drawn as a dot, or it would not be seen."""
    shape = {"width": more.pop("width", 2), "color": color, "simplify": False}
    mode = "lines+markers" if np.isfinite(y).sum() == 1 else "lines"
    marker = {"size": 7, "color": color}
    trace = {"type": "scatter", "name": name, "x": _plain(x), "y": _plain(y), "mode": mode}
    return trace | {"line": shape, "marker": marker} | more


def _raw(name: str, x: Curve, y: Curve, **more: Any) -> dict[str, Any]:
    return _line(name, *thin(x, y, _POINTS), RAW, width=1, hoverinfo="skip", **more)


def _trend(x: Curve, y: Curve) -> tuple[Curve, Curve]:
    """The smooth curve: of a long run computed from means of equal stretches."""
    size = -(-len(x) // _TREND_POINTS)
    if size > 1:
        whole = len(x) // size * size
        stretches = np.where(np.isfinite(y[:whole]), y[:whole], np.nan).reshape(-1, size)
        counts = np.isfinite(stretches).sum(axis=1)
        sums = np.nansum(stretches, axis=1)
        y = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        x = x[size - 1 : whole : size]
    # A loss falls fast at first and then hides in noise: a narrow view there, a wide one later.
    narrow = trend(y, half_width=max(len(y) // 80, 2))
    wide = trend(y, half_width=max(len(y) // 15, 4))
    share = np.clip(np.arange(len(y)) / max(len(y) / 5, 1), 0, 1)
    return thin(x, (1 - share) * narrow + share * wide, _POINTS)


def _range(low: float, high: float) -> dict[str, Any]:
    """An axis range with a margin; none when there is nothing to show."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return {}
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return {"range": [float(f"{low - margin:.5g}"), float(f"{high + margin:.5g}")]}


def _from_zero(y: Curve) -> dict[str, Any]:
    """From zero to a bit above what is usual; a lone spike must not squash the curve."""
    finite = y[np.isfinite(y)]
    if not len(finite) or finite.min() < 0:
        return {}
    usual = float(np.quantile(finite, 0.99))
    return {"range": [0, float(f"{usual * 1.2 or 1.0:.5g}")]}


def _loss(history: History, axes: _Axes) -> Chart:
    step, loss = axes.step, history.column("loss")
    x, y = _trend(step, loss)
    raw = _raw("each step", step, loss)
    traces = [raw | {"meta": axes.others(np.array(raw["x"]))}] if len(step) else []
    traces += [_line("training", x, y, SMOOTH, meta=axes.others(x))] if len(x) else []
    legend = [("training", SMOOTH, "line"), ("each step", RAW, "line")] if len(x) else []
    if evaluated := _evaluation_trace(history, axes, "loss"):
        traces.append(evaluated)
        legend.append(("validation", OTHER, "dots"))
    lost = step[~np.isfinite(loss)]
    if len(lost):
        traces.append(_not_finite(axes, lost[:200], x, y))
        legend.append(("not finite", "--bad", "dots"))
    note = "Nats a token."
    if len(resumed := _resumes(history)):
        note += f" Resumed from step {', '.join(f'{s:,}' for s in resumed[-5:])}."
    return Chart("loss", "Loss", note, legend, traces, _settled(history, x, y), tall=True)


def _settled(history: History, x: Curve, y: Curve) -> dict[str, Any]:
    """The range in which the loss moves after its first fall, which would squash the rest."""
    late = history.column("step") > 0.02 * (x[-1] if len(x) else 0.0)
    loss = history.column("loss")[late]
    usual = loss[np.isfinite(loss)]
    noise = np.quantile(usual, (0.01, 0.99)) if len(usual) else np.empty(0)
    smooth = y[np.searchsorted(x, 0.02 * x[-1]) :] if len(x) else y
    evaluated = [e.loss for e in history.evaluations if math.isfinite(e.loss)]
    values = np.concatenate([smooth[np.isfinite(smooth)], noise, evaluated])
    return _range(values.min(), values.max()) if len(values) else {}


def _evaluation_trace(history: History, axes: _Axes, field: str) -> dict[str, Any] | None:
    done = [e for e in history.evaluations if math.isfinite(getattr(e, field))]
    if not done:
        return None
    x = np.array([float(e.step) for e in done])
    y = np.array([getattr(e, field) for e in done])
    x, y = thin(x, y, _POINTS)
    trace = _line("validation", x, y, OTHER, meta=axes.others(x))
    return trace | {"mode": "lines+markers", "marker": {"size": 6, "color": OTHER}}


def _not_finite(axes: _Axes, lost: Curve, x: Curve, y: Curve) -> dict[str, Any]:
    """Crosses where the loss was not a number, on the height that the curve last had."""
    known = np.isfinite(y)
    height = np.interp(lost, x[known], y[known]) if known.any() else np.zeros(len(lost))
    trace = _line("not finite", lost, height, "--bad", meta=axes.others(lost))
    marker = {"symbol": "x", "size": 8, "color": "--bad"}
    return trace | {"mode": "markers", "marker": marker, "hovertemplate": "not finite"}


def _resumes(history: History) -> list[int]:
    steps = [e.get("from", e.get("step")) for e in history.events if e.get("kind") == "resume"]
    return [s for s in steps if isinstance(s, int)]


def _bits_per_byte(history: History, axes: _Axes) -> list[Chart]:
    trace = _evaluation_trace(history, axes, "bits_per_byte")
    if trace is None:
        return []
    known = np.array([v for v in trace["y"] if v is not None])
    return [
        Chart(
            name="bits-per-byte",
            title="Validation, bits a byte",
            note="Comparable across tokenizers; lower is better." + _uneven(history),
            legend=[("validation", OTHER, "dots")],
            traces=[trace],
            y=_range(float(known.min()), float(known.max())),
            tall=True,
        )
    ]


def _uneven(history: History) -> str:
    """A warning where the last evaluation read more text, and other text, than those before."""
    counts = [e.tokens for e in history.evaluations]
    if len(counts) < 2 or counts[-1] == counts[-2]:
        return ""
    last, before = format_count(counts[-1]), format_count(counts[-2])
    return f" The last point is over {last} tokens, the one before over {before}."


def _steady(history: History, name: str) -> tuple[Curve, str]:
    """A column without slow first steps (warm-up), and a sentence about what is left out."""
    values, seconds = history.column(name), history.column("seconds")
    first = history.first_of_life
    later = seconds[~first & np.isfinite(seconds)]
    if not len(later):
        return values, ""
    slow = first & (seconds > 2 * np.median(later))
    values[slow] = np.nan
    words = [f"{s:.3g} s" for s in seconds[slow]]
    if not words:
        return values, ""
    some = ", ".join(words[:3]) + (" …" if len(words) > 3 else "")
    return values, f"The first step of each start is left out ({some}): it holds warm-up."


def _throughput(history: History, axes: _Axes) -> Chart:
    values, note = _steady(history, "tokens_per_second")
    return _pair("throughput", "Tokens a second", axes.step, values, note)


def _step_time(history: History, axes: _Axes) -> Chart:
    values, _ = _steady(history, "seconds")
    chart = _pair("step-time", "Seconds a step", axes.step, values, "")
    waiting = history.column("data_seconds")
    if np.nansum(waiting) <= 0:
        return chart
    chart.traces.append(_line("data wait", *_trend(axes.step, waiting), OTHER))
    chart.legend.append(("data wait", OTHER, "line"))
    return chart


def _pair(name: str, title: str, step: Curve, values: Curve, note: str) -> Chart:
    """A curve as it was and smoothed, from zero."""
    if not np.isfinite(values).any():
        return Chart(name, title, note, [], [], {})
    smoothed = _line("smoothed", *_trend(step, values), SMOOTH)
    legend = [("smoothed", SMOOTH, "line"), ("each step", RAW, "line")]
    traces = [_raw("each step", step, values), smoothed]
    return Chart(name, title, note, legend, traces, _from_zero(values))


def _updates(history: History, axes: _Axes) -> list[Chart]:
    step = axes.step
    rate, norm = history.column("learning_rate"), history.column("gradient_norm")
    charts = [_memory(history, axes)]
    if np.isfinite(rate).any():
        trace = _line("learning rate", *thin(step, rate, _POINTS), SMOOTH)
        y = _from_zero(rate) | {"exponentformat": "e"}
        charts.append(Chart("learning-rate", "Learning rate", "", [], [trace], y))
    note = "Global L2 norm before clipping."
    charts.append(_pair("gradient-norm", "Gradient norm", step, norm, note))
    return charts


def _memory(history: History, axes: _Axes) -> Chart:
    memory = history.column("memory_bytes") / 2**30
    if not np.isfinite(memory).any():
        return Chart("memory", "Memory", "", [], [], {})
    x, y = thin(axes.step, memory, _POINTS)
    traces, legend = [_line("measured", x, y, SMOOTH)], [("measured", SMOOTH, "line")]
    total = sum(history.planned_parts("predicted", "memory").values()) / 2**30
    if total > 0:
        ends = np.array([axes.step[0], axes.step[-1]])
        dashed = _line("predicted", ends, np.array([total, total]), OTHER)
        traces.append(dashed | {"line": {"color": OTHER, "width": 1.5, "dash": "dash"}})
        legend.append(("predicted", OTHER, "dashes"))
    highest = np.append(memory, total if total > 0 else np.nan)
    return Chart("memory", "Memory, GiB", "", legend, traces, _from_zero(highest))


def _extra(history: History, axes: _Axes, name: str) -> Chart:
    values = history.column(name)
    if not np.isfinite(values).any():
        return Chart(f"extra-{name}", name, "", [], [], {})
    traces = [_raw("each step", axes.step, values)]
    traces.append(_line("smoothed", *_trend(axes.step, values), SMOOTH))
    return Chart(f"extra-{name}", name, "", [], traces, {})
