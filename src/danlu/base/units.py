"""Numbers with units, as people write them: "4GiB", "10min", "<0.05", "2M".

Every parser takes a plain number too (already in the base unit) and raises `ValueError` with a
sentence that says what would have been understood.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Bound",
    "format_bytes",
    "format_count",
    "format_duration",
    "format_rate",
    "parse_bound",
    "parse_bytes",
    "parse_count",
    "parse_duration",
]

_NUMBER = r"(?P<number>\d+(?:[_\d]*\d)?(?:\.\d+)?(?:[eE][+-]?\d+)?)"
_BYTES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
}  # fmt: skip
_SECONDS = {
    "": 1.0, "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3,
    "min": 60.0, "m": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def _amount(value: object, units: dict[str, int] | dict[str, float], example: str) -> float:
    """A number, or a number with one of `units` behind it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number of more than 308 digits
            return math.inf
    return _with_unit(value, units, example) if isinstance(value, str) else _refuse(value, example)


def _refuse(value: object, example: str) -> float:
    raise ValueError(f"{value!r} is not understood; write for example {example}")


def _with_unit(text: str, units: dict[str, int] | dict[str, float], example: str) -> float:
    match = re.fullmatch(_NUMBER + r"\s*(?P<unit>[A-Za-z]*)", text.strip())
    if not match or match["unit"].lower() not in units:
        return _refuse(text, example)
    return float(match["number"].replace("_", "")) * units[match["unit"].lower()]


def parse_bytes(value: int | float | str) -> int:
    """Bytes from "4GiB", "500MB" or a plain number of bytes."""
    amount = _amount(value, _BYTES, "4GiB")
    if not math.isfinite(amount) or amount < 0:
        raise ValueError(f"{value!r} is not a size; write for example 4GiB")
    return round(amount)


def parse_duration(value: int | float | str) -> float:
    """Seconds from "10min", "1h 30min", "90s" or a plain number of seconds."""
    if not isinstance(value, str):
        amount = _amount(value, _SECONDS, "10min")
    else:
        parts = re.findall(r"[\d._eE+-]+\s*[A-Za-z]*", value.strip()) or [value]
        if "".join(parts).replace(" ", "") != value.replace(" ", ""):
            _refuse(value, "10min")
        amount = sum(_with_unit(part, _SECONDS, "10min") for part in parts)
    if not math.isfinite(amount) or amount < 0:
        raise ValueError(f"{value!r} is not a duration; write for example 10min")
    return amount


def parse_count(value: int | float | str) -> int:
    """A whole number, 0 or more, from "2M", "300k", "1e6" or a plain number."""
    amount = _amount(value, _COUNTS, "1000 or 300k")
    if not math.isfinite(amount) or amount < 0 or amount != int(amount):
        raise ValueError(f"{value!r} is not a whole number of 0 or more")
    return int(amount)


@dataclass(frozen=True, slots=True)
class Bound:
    """A one-sided limit such as `<0.05`; `holds(x)` says whether x keeps it."""

    operator: Literal["<", "<=", ">", ">="]
    limit: float

    def holds(self, value: float) -> bool:
        """Whether `value` keeps the bound."""
        return {
            "<": value < self.limit,
            "<=": value <= self.limit,
            ">": value > self.limit,
            ">=": value >= self.limit,
        }[self.operator]

    def __str__(self) -> str:
        return f"{self.operator}{self.limit:g}"


def parse_bound(value: "str | Bound") -> Bound:
    """A `Bound` from "<0.05", ">= 1.8"."""
    if isinstance(value, Bound):
        return value
    match = re.fullmatch(r"\s*(<=|>=|<|>)\s*([-+]?[\d.]+(?:[eE][+-]?\d+)?)\s*", str(value))
    if not match:
        raise ValueError(f"{value!r} is not a bound; write for example <0.05")
    return Bound(match[1], float(match[2]))  # type: ignore[arg-type]


def format_bytes(amount: float) -> str:
    """Bytes as "4.2 GiB": binary units, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.3g} {unit}"


def format_count(amount: float) -> str:
    """A number as "10.6 M": three digits and a decimal prefix."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(amount) < 999.5 or unit == "T":
            break
        amount /= 1000
    return f"{amount:.3g} {unit}".strip()


def format_rate(flops_per_second: float) -> str:
    """A rate as "0.43 TFLOP/s": the unit that peak rates are quoted in."""
    if flops_per_second >= 1e12:
        return f"{flops_per_second / 1e12:.3g} TFLOP/s"
    return f"{flops_per_second / 1e9:.3g} GFLOP/s"


def format_duration(seconds: float) -> str:
    """A duration as "2h 05min", "3min 20s", "45s", "120ms"."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}min {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}min"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"
