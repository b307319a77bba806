"""`report.html`: a run on one page, whole in one file, made from the run's files alone.

The page opens without a network, and cannot use one: its content security policy lets it load
nothing and run no script but its own, whatever a sample, a path or a config value contains.
Plotly's script is inside once, packed; the browser unpacks it.
"""

import base64
import functools
import gzip
import importlib.resources
import math
import re
import secrets
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from danlu.base.errors import UserError
from danlu.base.files import atomic_write
from danlu.base.units import format_bytes, format_count, format_duration
from danlu.monitor.charts import HOURS_FROM_SECONDS, chart_groups
from danlu.monitor.history import History, Sample, read_history
from danlu.monitor.summary import Predicted, RunSummary, summarise, summary_of
from danlu.monitor.words import (
    UNKNOWN,
    countdown,
    decimal,
    describe_event,
    shorten,
    signed,
    step_time,
    visible,
)

__all__ = ["RunSummary", "summarise", "write_report"]

_MOST_SAMPLE_STEPS, _MOST_SAMPLES_A_STEP, _MOST_SAMPLE_LETTERS = 24, 12, 4000
_MOST_EVENTS = 300
_MOST_CONFIG_LETTERS = 200_000


def write_report(run_folder: str | Path) -> Path:
    """Writes `report.html` into the run's folder, whole or not at all, and returns its path.

    Takes runs as they are: going on, interrupted, resumed, without evaluations, without a step.

    Raises:
        UserError: there is no run in `run_folder`, or the page cannot be written there.
    """
    history = read_history(run_folder)
    page = render(history, made_at=datetime.now(UTC).astimezone())
    path = history.folder / "report.html"
    try:
        with atomic_write(path) as file:
            file.write(page)
    except OSError as error:
        raise UserError(
            str(path),
            f"the report cannot be written ({error.strerror}).",
            "Make room or copy the run's folder, then: danlu report FOLDER",
        ) from error
    return path


def render(history: History, *, made_at: datetime) -> str:
    """The page's text.

    Args:
        history: the run.
        made_at: the moment that the page says it was made at.
    """
    summary = summary_of(history)
    groups = chart_groups(history)
    files = importlib.resources.files("danlu.monitor")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    template = environment.from_string((files / "report.html").read_text(encoding="utf-8"))
    page = template.render(
        style=Markup((files / "report.css").read_text(encoding="utf-8")),
        nonce=secrets.token_urlsafe(18),
        plotly=_packed_plotly() if groups else "",
        charts=[asdict(chart) for group in groups for chart in group.charts],
        groups=groups,
        time_unit="hours" if history.seconds > HOURS_FROM_SECONDS else "minutes",
        summary=summary,
        head=_head(history, summary, made_at),
        tiles=_tiles(history, summary),
        comparison=[_compared(row) for row in summary.comparison],
        parts=_parts(history),
        samples=_samples(history),
        decisions=_decisions(history),
        events=_events(history),
        config=_config(history),
    )
    return visible(page)


@functools.cache
def _packed_plotly() -> str:
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _head(history: History, summary: RunSummary, made_at: datetime) -> dict[str, str]:
    mood = {"done": "good", "running": "good", "waiting": "calm", "interrupted": "calm"}
    share = summary.step / summary.total_steps if summary.total_steps else 0.0
    return {
        "mood": mood.get(summary.status, "bad"),
        "started": _moment(history.started, made_at),
        "made": made_at.strftime("%Y-%m-%d %H:%M"),
        "progress": f"{min(share, 1.0) * 100:.1f}%",
    }


def _moment(when: float, like: datetime) -> str:
    """A Unix time in the time zone of `like`; nothing for one that no calendar knows."""
    try:
        return datetime.fromtimestamp(when, like.tzinfo).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return ""


@dataclass(frozen=True, slots=True)
class _Tile:
    label: str
    value: str
    unit: str
    note: str


def _tiles(history: History, summary: RunSummary) -> list[_Tile]:
    best = ""
    if summary.best_bits_per_byte < summary.bits_per_byte:
        best = f", best {decimal(summary.best_bits_per_byte)} at step {summary.best_step:,}"
    starts = sum(e.get("kind") == "resume" for e in history.events) + 1
    of = f" of {summary.total_steps:,}" if summary.total_steps else ""
    share = f"{summary.mfu * 100:.1f}" if math.isfinite(summary.mfu) else UNKNOWN
    tiles = [
        _Tile(
            "Validation", decimal(summary.bits_per_byte), "bits/byte",
            f"loss {decimal(summary.validation_loss)}{best}",
        ),
        _Tile(
            "Training loss", decimal(summary.loss), "",
            f"smoothed; {decimal(summary.first_loss)} at the start",
        ),
        _Tile(
            "Throughput", *_split_rate(summary.tokens_per_second),
            f"median; {step_time(summary.step_seconds)} a step",
        ),
        _Tile("MFU", share, "%", f"of {summary.peak_text}" if summary.peak_text else ""),
        _Tile("Peak memory", *_split_bytes(summary.memory_bytes), _memory_share(history, summary)),
        _Tile("Tokens seen", *_split(format_count(summary.tokens)), f"{summary.step:,}{of} steps"),
        _Tile(
            "Wall time", format_duration(summary.wall_seconds), "",
            f"in {starts} starts" if starts > 1 else "",
        ),
    ]  # fmt: skip
    return [tile for tile in tiles if tile.value != UNKNOWN]


def _memory_share(history: History, summary: RunSummary) -> str:
    there = history.planned_number("cluster", "device", "memory_bytes")
    if not (there > 0 and math.isfinite(summary.memory_bytes)):
        return ""
    return f"{summary.memory_bytes / there:.0%} of {format_bytes(there)}"


def _split(text: str) -> tuple[str, str]:
    value, _, unit = text.partition(" ")
    return value, unit


def _split_rate(value: float) -> tuple[str, str]:
    if not math.isfinite(value):
        return UNKNOWN, ""
    number, prefix = _split(format_count(value))
    return number, f"{prefix} tokens/s".strip()


def _split_bytes(value: float) -> tuple[str, str]:
    return _split(format_bytes(value)) if math.isfinite(value) else (UNKNOWN, "")


def _compared(row: Predicted) -> dict[str, str]:
    """A line of the table; `mood` is good within 10 %, or better than predicted."""
    gain = row.ratio if row.unit in ("tokens/s", "share") else 1 / row.ratio if row.ratio else 0.0
    known = math.isfinite(row.ratio)
    return {
        "label": row.label,
        "predicted": row.text(row.predicted),
        "measured": row.text(row.measured),
        "ratio": f"{row.ratio:.2f}" if known else UNKNOWN,
        "change": f"{signed((row.ratio - 1) * 100, 0)} %" if known else "",
        "mood": "" if not known else "good" if gain >= 0.9 else "bad",
    }


def _parts(history: History) -> list[dict[str, Any]]:
    """Where the plan sees time and memory go, as bars."""
    tables = []
    for key, title, text in (
        ("seconds", "Where a step's time goes, predicted", step_time),
        ("memory", "Where memory goes, predicted", format_bytes),
    ):
        known = history.planned_parts("predicted", key)
        total, most = sum(known.values()), max(known.values(), default=1.0)
        rows = [
            {"name": n, "text": text(v), "share": f"{v / total:.0%}", "width": f"{v / most:.2%}"}
            for n, v in sorted(known.items(), key=lambda item: -item[1])
        ]
        tables += [{"title": title, "rows": rows, "total": text(total)}] if rows else []
    return tables


def _samples(history: History) -> dict[str, Any]:
    """Samples by step, newest first; of many steps the first, the last and some between."""
    steps: dict[int, list[Sample]] = {}
    for sample in history.samples:
        steps.setdefault(sample.step, []).append(sample)
    chosen = _spread(sorted(steps), _MOST_SAMPLE_STEPS)
    quality = {e.step: e.bits_per_byte for e in history.evaluations}
    blocks = [
        {
            "step": step,
            "quality": decimal(quality.get(step, math.nan)),
            "samples": [_cut(sample) for sample in steps[step][:_MOST_SAMPLES_A_STEP]],
            "glance": shorten(steps[step][0].prompt + steps[step][0].text, 90),
        }
        for step in reversed(chosen)
    ]
    return {"blocks": blocks, "left_out": len(steps) - len(blocks)}


def _cut(sample: Sample) -> Sample:
    most = _MOST_SAMPLE_LETTERS
    text = sample.text if len(sample.text) <= most else sample.text[:most] + " …"
    return Sample(sample.step, sample.prompt[:most], text)


def _spread(values: list[int], most: int) -> list[int]:
    """At most `most` of the values: the first, the last and an even choice between them."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _decisions(history: History) -> list[dict[str, str]]:
    decisions = history.planned("decisions")
    return [
        {key: shorten(str(d.get(key, "")), 400) for key in ("key", "value", "reason")}
        for d in (decisions if isinstance(decisions, list) else [])
        if isinstance(d, dict)
    ]


def _events(history: History) -> dict[str, Any]:
    """What happened, oldest first; of very many events the first few and the newest."""
    events = history.events
    left_out = max(len(events) - _MOST_EVENTS, 0)
    shown = events if not left_out else events[:50] + events[-(_MOST_EVENTS - 50) :]
    rows = [
        {
            "when": _since(history.seconds_until(event)),
            "kind": shorten(str(event.get("kind") or "?"), 24),
            "step": f"{step:,}" if isinstance(step := event.get("step"), int) else "",
            "text": describe_event(event),
            "mood": _EVENT_MOODS.get(str(event.get("kind")), ""),
        }
        for event in shown
    ]
    return {"rows": rows, "left_out": left_out}


_EVENT_MOODS = {"warning": "bad", "nan": "bad", "sink_failed": "bad", "stop": "calm"}


def _since(seconds: float) -> str:
    return f"+{countdown(max(seconds, 0.0))}" if math.isfinite(seconds) else ""


def _config(history: History) -> Markup:
    """`config.yaml` with its keys set off."""
    text = visible(history.config_text[:_MOST_CONFIG_LETTERS])
    return Markup("\n").join(_config_line(line) for line in text.splitlines())


_KEY = re.compile(r"([\s-]*)([\w.]+)(:(?:\s.*)?)$")


def _config_line(line: str) -> Markup:
    match = _KEY.match(line)
    if match is None:
        return Markup("{}").format(line)
    return Markup("{}<b>{}</b>{}").format(*match.groups())
