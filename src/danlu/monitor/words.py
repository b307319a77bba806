"""Numbers, events and model output as people read them."""

import math
import re
from collections.abc import Mapping
from typing import Any

from danlu.base.units import format_count, format_duration

__all__ = [
    "UNKNOWN",
    "ascii_text",
    "countdown",
    "decimal",
    "describe_event",
    "percent",
    "rate",
    "shorten",
    "signed",
    "small",
    "step_time",
    "visible",
]

UNKNOWN = "\N{EN DASH}"
"""Shown for a figure that there is not."""

_MINUS = "\N{MINUS SIGN}"

_PLAIN = str.maketrans(
    {UNKNOWN: "-", _MINUS: "-", "…": ".", "│": "|", "→": ">", "·": "-", "×": "x"}  # noqa: RUF001
)

# C0 (but tab and newline), DEL, C1, marks that reorder text, and halves of a pair of code units.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Text that cannot act: control characters become signs (ESC is ␛), tab and newline stay.

    A model may write anything, escape sequences of the terminal among it.
    """
    return _HIDDEN.sub(_sign, text)


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"


def ascii_text(text: str) -> str:
    """`text` letter by letter in ASCII, for terminals that know no more."""
    return text.translate(_PLAIN).encode("ascii", "replace").decode()


def shorten(text: str, limit: int) -> str:
    """`text` on one line, cut to `limit` characters."""
    line = " ".join(visible(text).split())
    return line if len(line) <= limit else line[: max(limit - 1, 0)] + "…"


def percent(share: float | None, digits: int = 1) -> str:
    """A share (0.412) as "41.2%"; a dash when it is not known."""
    return UNKNOWN if share is None or not math.isfinite(share) else f"{share * 100:.{digits}f}%"


def signed(value: float, digits: int = 3) -> str:
    """A change as "+0.031" or "−0.031" (with a real minus sign)."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", _MINUS)


def decimal(value: float) -> str:
    """A loss or bits a byte as "2.547"; a dash when it is not known."""
    if not math.isfinite(value):
        return UNKNOWN
    return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"


def small(value: float) -> str:
    """A learning rate or a norm as "8.3e-4" or "0.42": three digits, short exponent."""
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-2 <= abs(value) < 1e4:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.3g}"


def countdown(seconds: float) -> str:
    """Time that is left, as "45s" or "1h 20min": whole seconds, so that it does not flicker."""
    return f"{math.ceil(seconds)}s" if 0 <= seconds < 59 else format_duration(seconds)


def step_time(seconds: float) -> str:
    """A step's time as "1.31 s" or "131 ms": three digits, since these are compared."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else format_duration(seconds)


def rate(tokens_per_second: float) -> str:
    """A throughput as "12.4 k tokens/s"; a dash when it is not known."""
    if not math.isfinite(tokens_per_second):
        return UNKNOWN
    return f"{format_count(tokens_per_second)} tokens/s"


def describe_event(event: Mapping[str, Any]) -> str:
    """What happened, in one line; a kind that is not known here is told by its fields."""
    rest = {k: v for k, v in event.items() if k not in ("kind", "time", "step", "rank")}
    kind = event.get("kind")
    words: list[str] = []
    if kind == "resume" and "from" in rest:
        words.append(f"goes on from step {rest.pop('from')}")
    elif kind == "resume" and "step" in event:
        words.append(f"goes on from step {event['step']}")
    elif kind in ("note", "warning") and "text" in rest:
        words.append(str(rest.pop("text")))
    elif kind == "checkpoint":
        words += [str(rest.pop("path"))] if "path" in rest else []
    elif kind == "sample":
        words.append(f"{rest.pop('prompt', '')}{rest.pop('text', '')}")
    elif kind in ("stop", "nan", "sink_failed"):
        words += [str(rest.pop(k)) for k in ("sink", "reason", "message") if rest.get(k)]
    if isinstance(seconds := rest.get("seconds"), int | float) and 0 <= seconds < 1e9:
        rest["seconds"] = format_duration(seconds)
        rest = {("in" if k == "seconds" else k): v for k, v in rest.items()}
    words += [f"{key} {value}" for key, value in rest.items() if value not in (None, "")]
    return shorten(", ".join(words), 400)
