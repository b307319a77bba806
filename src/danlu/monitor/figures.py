"""The figures that tell how a run goes, from its step reports: what the displays show."""

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from danlu.base.facts import Evaluation, StepReport
from danlu.base.units import format_bytes, format_count, format_duration
from danlu.monitor.curves import RunningMean, Trail
from danlu.monitor.words import UNKNOWN, decimal, percent, signed, small

__all__ = ["Figures", "Reading", "cells"]

_RECENT = 50  # steps that "now" means: their median, which one slow step does not move
_HALF_LIFE = 15.0  # of the smoothed loss, in steps


@dataclass(frozen=True, slots=True)
class Reading:
    """How a run stands at one moment. What is not known yet is NaN or None.

    Attributes:
        loss: smoothed training loss, nats a token.
        diverged: whether the newest loss is not finite.
        bits_per_byte: of the newest evaluation; `change` is against the one before.
        step_seconds: median of the recent steps.
        eta_seconds: time that the remaining steps and their evaluations will take; NaN at the end.
        losses: the loss over the run, thinned.
    """

    step: int
    total_steps: int | None
    loss: float
    diverged: bool
    bits_per_byte: float
    change: float
    step_seconds: float
    tokens_per_second: float
    mfu: float
    memory_bytes: float
    learning_rate: float
    eta_seconds: float
    losses: tuple[float, ...]


class Figures:
    """Collects step reports and evaluations; `read` may be called from another thread.

    Args:
        total_steps: where the run ends; None when that is not known.
        start_step: the last step that was already done (a resumed run starts behind it).
    """

    def __init__(self, *, total_steps: int | None, start_step: int = 0) -> None:
        self._total, self._start = total_steps, start_step
        self._lock = threading.Lock()
        self._first: StepReport | None = None
        self._recent: deque[StepReport] = deque(maxlen=_RECENT)
        self._bits_per_byte, self._change = math.nan, math.nan
        self._evaluation_seconds = 0.0
        self._loss = RunningMean(_HALF_LIFE)
        self._trail = Trail()

    def step(self, report: StepReport) -> None:
        """Takes one step in; microseconds."""
        with self._lock:
            if self._first is None:
                self._first = report
            else:
                self._recent.append(report)
            self._loss.add(report.loss)
            self._trail.add(self._loss.value)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Takes one evaluation in."""
        with self._lock:
            self._change = evaluation.bits_per_byte - self._bits_per_byte
            self._bits_per_byte = evaluation.bits_per_byte
            self._evaluation_seconds += max(evaluation.seconds, 0.0)

    def read(self) -> Reading:
        """How the run stands now."""
        with self._lock:
            # The first step holds compilation: its speed counts only while there is no other.
            recent = list(self._recent) or ([self._first] if self._first else [])
            newest = recent[-1] if recent else None
            step = newest.step if newest else self._start
            seconds = _median(r.seconds for r in recent)
            return Reading(
                step=step,
                total_steps=self._total,
                loss=self._loss.value,
                diverged=newest is not None and not math.isfinite(newest.loss),
                bits_per_byte=self._bits_per_byte,
                change=self._change,
                step_seconds=seconds,
                tokens_per_second=_median(r.tokens_per_second for r in recent),
                mfu=_median(r.mfu for r in recent if r.mfu is not None),
                memory_bytes=newest.memory_bytes if newest else math.nan,
                learning_rate=newest.learning_rate if newest else math.nan,
                eta_seconds=self._eta(step, seconds),
                losses=tuple(self._trail.points()),
            )

    def _eta(self, step: int, step_seconds: float) -> float:
        if self._total is None or step >= self._total:
            return math.nan
        done = max(step - self._start, 1)
        return (self._total - step) * (step_seconds + self._evaluation_seconds / done)


def _median(values: Iterable[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return statistics.median(finite) if finite else math.nan


def cells(reading: Reading, elapsed_seconds: float) -> list[tuple[str, str]]:
    """The figures as (label, text) pairs, most wanted first; those not known yet show "–"."""
    validation = _known(reading.bits_per_byte, lambda v: f"{decimal(v)} bits/byte")
    if math.isfinite(reading.change):
        validation += f" {signed(reading.change)}"
    return [
        ("loss", "not finite" if reading.diverged else decimal(reading.loss)),
        ("validation", validation),
        ("tokens/s", _known(reading.tokens_per_second, format_count)),
        ("MFU", percent(reading.mfu)),
        ("memory", _known(reading.memory_bytes, format_bytes)),
        ("learning rate", _known(reading.learning_rate, small)),
        ("elapsed", format_duration(elapsed_seconds)),
    ]


def _known(value: float, text: Callable[[float], str]) -> str:
    return text(value) if math.isfinite(value) else UNKNOWN
