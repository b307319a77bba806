"""`monitor`: what is shown, written down and watched."""

from pydantic import Field, field_validator

from danlu.config._block import Auto, Block, Count, Positive, Seconds, planned

__all__ = ["IndicatorConfig", "MonitorConfig"]


class IndicatorConfig(Block):
    """Targets; a breach is an event."""

    throughput: float | None = planned(None)
    """Wanted tokens per second."""
    memory: float | None = planned(None)
    """Largest wanted share of memory."""
    communication: float | None = planned(None)
    """Largest wanted share of a step spent in communication."""


class MonitorConfig(Block):
    """Progress, metrics and the report."""

    log_every: Positive | Auto = "auto"
    """Steps between two lines of metrics.jsonl."""
    progress: bool | Auto = "auto"
    """A live progress display; `auto` when a person is watching (a terminal), plain lines
    otherwise."""
    sinks: tuple[str, ...] = ("jsonl",)
    """Where metrics go: files of `danlu/monitor/sinks`, e.g. `["jsonl", "tensorboard"]`. `jsonl` is
    always among them: the report and `danlu watch` read it."""
    sample_prompts: tuple[str, ...] = ("def ", "import ", "class ")
    """Prompts continued after each evaluation and shown in the report."""
    sample_tokens: Count = Field(96, ge=0, le=4096)
    """Length of those continuations; 0 turns them off."""
    report_every: Seconds | None = planned(None)
    """Time between two data-quality reports."""
    indicators: IndicatorConfig = IndicatorConfig()
    """Targets; a breach is an event."""

    @field_validator("sinks")
    @classmethod
    def _with_jsonl(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        """Each sink once, and the one that danlu itself reads in any case."""
        return tuple(dict.fromkeys(sinks if "jsonl" in sinks else ("jsonl", *sinks)))
