"""A run in a dozen figures: for the end of `danlu train`, for the report's head, for scripts."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from danlu.base.units import format_bytes, format_count, format_duration, format_rate
from danlu.monitor.curves import Curve, RunningMean
from danlu.monitor.history import History, Sample, read_history
from danlu.monitor.words import UNKNOWN, decimal, percent, rate, shorten, step_time

__all__ = [
    "Predicted",
    "RunSummary",
    "device_text",
    "model_text",
    "summarise",
    "summary_of",
]


_STATUS_WORDS = {
    "waiting": "no step yet",
    "nan": "stopped, the loss is not finite",
    "error": "stopped by an error",
}


@dataclass(frozen=True, slots=True)
class Predicted:
    """One figure as the plan saw it coming and as it was; NaN where it is not known.

    Attributes:
        unit: `seconds`, `tokens/s`, `share` or `bytes`.
    """

    label: str
    unit: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted; NaN without either."""
        return self.measured / self.predicted if self.predicted else math.nan

    def text(self, value: float) -> str:
        """`value` with its unit."""
        if not math.isfinite(value):
            return UNKNOWN
        formats = {"seconds": step_time, "tokens/s": rate, "share": percent}
        return formats.get(self.unit, format_bytes)(value)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What came out of a run. Losses are nats a token; what is not known is NaN, None or "".

    Attributes:
        status: `done`, `interrupted`, `nan`, `error`, `running`, `silent` or `waiting`.
        step: the last step that counts (what a killed process did beyond its checkpoint does not).
        tokens: seen up to that step.
        wall_seconds: time in which a process of the run was alive.
        loss: training loss, smoothed over the last steps; `first_loss` is the first step's.
        best_step: the evaluation with the fewest bits a byte.
        step_seconds, tokens_per_second, mfu: medians over the steps but the first of each start.
        peak_flops: what `mfu` is a share of, in FLOP/s; `peak_source` says whether it was measured.
        memory_bytes: the highest reported.
        comparison: what the plan predicted against what was measured.
    """

    name: str
    folder: str
    status: str
    message: str
    model: str
    device: str
    plan: str
    parameters: int | None
    step: int
    total_steps: int | None
    tokens: int
    wall_seconds: float
    loss: float
    first_loss: float
    validation_loss: float
    bits_per_byte: float
    best_bits_per_byte: float
    best_step: int | None
    step_seconds: float
    tokens_per_second: float
    mfu: float
    peak_flops: float
    peak_format: str
    peak_source: str
    memory_bytes: float
    comparison: tuple[Predicted, ...]
    sample: Sample | None

    def to_dict(self) -> dict[str, Any]:
        """The summary as values that are valid JSON: what is not finite is None."""
        return _json_ready(dataclasses.asdict(self))  # type: ignore[no-any-return]

    def summary(self) -> str:
        """The run in about ten aligned lines."""
        sample = f"{self.sample.prompt}{self.sample.text}" if self.sample else ""
        rows = {
            "run": f"{self.name}: {self.status_text}",
            "because": self.message,
            "model": self.model,
            "device": self.device,
            "training": self._training(),
            "loss": self._loss(),
            "validation": self._validation(),
            "speed": self._speed(),
            "MFU": self.mfu_text,
            "memory": self._memory(),
            "sample": shorten(sample, 72),
        }
        lines = [f"  {label:<10}  {shorten(text, 200)}" for label, text in rows.items() if text]
        return "\n".join(lines)

    @property
    def status_text(self) -> str:
        """The status in words."""
        return _STATUS_WORDS.get(self.status, self.status)

    @property
    def mfu_text(self) -> str:
        """Model FLOP/s utilisation with its denominator."""
        if not math.isfinite(self.mfu):
            return ""
        text = f"{percent(self.mfu)} of {self.peak_text}" if self.peak_text else percent(self.mfu)
        return text if self.mfu <= 1 else f"{text}, a peak that was measured too low"

    @property
    def peak_text(self) -> str:
        """The denominator of MFU: "0.43 TFLOP/s (bf16, measured)"."""
        if not math.isfinite(self.peak_flops):
            return ""
        words = ", ".join(w for w in (self.peak_format, self.peak_source) if w)
        return f"{format_rate(self.peak_flops)} ({words})"

    def _training(self) -> str:
        of = f" of {self.total_steps:,}" if self.total_steps else ""
        words = [f"{self.step:,}{of} steps", f"{format_count(self.tokens)} tokens"]
        return ", ".join([*words, format_duration(self.wall_seconds)])

    def _loss(self) -> str:
        if not math.isfinite(self.loss):
            return ""
        first = f"{decimal(self.first_loss)} -> " if math.isfinite(self.first_loss) else ""
        return f"{first}{decimal(self.loss)} nats a token"

    def _validation(self) -> str:
        if not math.isfinite(self.bits_per_byte):
            return ""
        text = f"{decimal(self.bits_per_byte)} bits a byte, loss {decimal(self.validation_loss)}"
        if self.best_bits_per_byte < self.bits_per_byte:
            text += f" (best {decimal(self.best_bits_per_byte)} at step {self.best_step:,})"
        return text

    def _speed(self) -> str:
        if not math.isfinite(self.tokens_per_second):
            return ""
        text = f"{rate(self.tokens_per_second)}, {step_time(self.step_seconds)} a step"
        return text + self._against("step time")

    def _memory(self) -> str:
        if not math.isfinite(self.memory_bytes):
            return ""
        return f"{format_bytes(self.memory_bytes)} at the peak" + self._against("memory")

    def _against(self, label: str) -> str:
        for row in self.comparison:
            if row.label == label and math.isfinite(row.ratio):
                return f", {row.ratio:.2f}x the plan's {row.text(row.predicted)}"
        return ""


def summarise(run_folder: str | Path) -> RunSummary:
    """Sums a run up from its files alone.

    Raises:
        UserError: there is no run in `run_folder`.
    """
    return summary_of(read_history(run_folder))


def summary_of(history: History) -> RunSummary:
    """Sums up what has been read of a run."""
    status = history.status()
    speed = _Speed.of(history)
    return RunSummary(
        name=history.name,
        folder=str(history.folder),
        status=status.word,
        message=status.message,
        model=model_text(history),
        device=device_text(history),
        plan=str(history.planned("hash") or ""),
        parameters=_whole(history.planned_number("parameters")),
        total_steps=history.total_steps,
        wall_seconds=history.seconds,
        step_seconds=speed.step_seconds,
        tokens_per_second=speed.tokens_per_second,
        mfu=speed.mfu,
        memory_bytes=speed.memory_bytes,
        comparison=_comparison(history, speed),
        sample=history.samples[-1] if history.samples else None,
        **_learning(history),
        **_peak(history),
    )


@dataclass(frozen=True, slots=True)
class _Speed:
    step_seconds: float
    tokens_per_second: float
    mfu: float
    memory_bytes: float

    @classmethod
    def of(cls, history: History) -> "_Speed":
        """Medians without the first step of each start, unless there is no other."""
        later = ~history.first_of_life
        if not later.any():
            later = ~later
        memory = history.column("memory_bytes")
        throughput = _median(history.column("tokens_per_second")[later])
        # The peak may have been found to be higher after some of the steps were reported.
        flops, peak = history.planned_number("flops_per_token"), _peak(history)["peak_flops"]
        share = throughput * flops / peak
        return cls(
            step_seconds=_median(history.column("seconds")[later]),
            tokens_per_second=throughput,
            mfu=share if math.isfinite(share) else _median(history.column("mfu")[later]),
            memory_bytes=float(np.nanmax(memory)) if np.isfinite(memory).any() else math.nan,
        )


def _median(values: Curve) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def _learning(history: History) -> dict[str, Any]:
    """Where the run stands: step, tokens, losses."""
    steps, losses, tokens = history.column("step"), history.column("loss"), history.tokens_until()
    last = history.evaluations[-1] if history.evaluations else None
    known = [e for e in history.evaluations if math.isfinite(e.bits_per_byte)]
    best = min(known, key=lambda e: e.bits_per_byte, default=None)
    smoothed = RunningMean(half_life=min(len(losses) / 40, 15.0))
    for loss in losses[-500:]:
        smoothed.add(loss)
    return {
        "step": int(steps[-1]) if len(steps) else 0,
        "tokens": int(tokens[-1]) if len(tokens) else 0,
        "loss": smoothed.value,
        "first_loss": float(losses[0]) if len(losses) else math.nan,
        "validation_loss": last.loss if last else math.nan,
        "bits_per_byte": last.bits_per_byte if last else math.nan,
        "best_bits_per_byte": best.bits_per_byte if best else math.nan,
        "best_step": best.step if best else None,
    }


def _comparison(history: History, speed: _Speed) -> tuple[Predicted, ...]:
    memory = history.planned_parts("predicted", "memory").values()
    step = history.planned_number("predicted", "step_seconds")
    throughput = history.planned_number("predicted", "tokens_per_second")
    rows = (
        Predicted("step time", "seconds", step, speed.step_seconds),
        Predicted("throughput", "tokens/s", throughput, speed.tokens_per_second),
        Predicted("MFU", "share", history.planned_number("predicted", "mfu"), speed.mfu),
        Predicted("memory", "bytes", sum(memory) if memory else math.nan, speed.memory_bytes),
    )
    return tuple(r for r in rows if math.isfinite(r.predicted) or math.isfinite(r.measured))


def _peak(history: History) -> dict[str, Any]:
    wanted = str(history.planned("format"))
    peak = history.planned_parts("cluster", "device", "peak_flops").get(wanted)
    if peak is None:
        return {"peak_flops": math.nan, "peak_format": "", "peak_source": ""}
    return {
        "peak_flops": peak * _peak_devices(history),
        "peak_format": wanted,
        "peak_source": str(history.planned("cluster", "device", "source") or ""),
    }


def _peak_devices(history: History) -> int:
    """Devices that share the work: one a rank; ranks of one CPU share that."""
    if history.planned("cluster", "device", "kind") == "cpu":
        return _whole(history.planned_number("cluster", "nodes")) or 1
    return _ranks(history)


def _ranks(history: History) -> int:
    """Processes of the run, from its planned layout."""
    axes = ("data", "tensor", "pipeline")
    return math.prod(_whole(history.planned_number("layout", axis)) or 1 for axis in axes)


def model_text(history: History) -> str:
    """The model in one line: preset, parameters, shape."""
    parameters = history.planned_number("parameters")
    words = [
        str(history.config("model.preset") or ""),
        f"{format_count(parameters)} parameters" if math.isfinite(parameters) else "",
        _shape(history, "layers", "{:,} layers") + _shape(history, "hidden_size", " of {:,}"),
        _shape(history, "sequence_length", "sequences of {:,}"),
        _shape(history, "vocab_size", "vocabulary {:,}"),
    ]
    return ", ".join(word for word in words if word)


def _shape(history: History, key: str, words: str) -> str:
    value = _whole(history.planned_number("model", key))
    return words.format(value) if value else ""


def device_text(history: History) -> str:
    """The device in one line: name, threads or ranks, number format, kernels."""
    kind = history.planned("cluster", "device", "kind")
    named = [e.get("device") for e in history.events if e.get("kind") == "start"]
    name = history.planned("cluster", "device", "name") or (named[-1] if named else None) or ""
    ranks = _ranks(history)
    words = [f"{ranks} x {name}" if ranks > 1 and kind == "cuda" else str(name)]
    if kind == "cpu" and (threads := _whole(history.planned_number("threads"))):
        words.append(f"{threads} threads")
    if kind == "cpu" and ranks > 1:
        words.append(f"{ranks} processes")
    words += [str(history.planned(key) or "") for key in ("format", "backend")]
    return ", ".join(word for word in words if word)


def _whole(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None


def _json_ready(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _json_ready(inner) for key, inner in value.items()}
    return [_json_ready(inner) for inner in value] if isinstance(value, list | tuple) else value
