"""What a learning-rate schedule promises."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from danlu.base.registry import Registry

__all__ = ["SCHEDULES", "Schedule"]


@dataclass(frozen=True)
class Schedule(ABC):
    """The learning rate as a factor of its peak: a pure function of the step.

    Warm-up is common to all: a linear rise over the first `warmup_steps`, whose first step already
    moves. After it, `after_warmup` gives the shape.

    Attributes:
        steps: of the run.
        warmup_steps: of the linear rise.
        decay_fraction: last share of the run that schedules with a decay phase spend on it.
        final_factor: factor at the last step of a decaying schedule.
    """

    steps: int
    warmup_steps: int
    decay_fraction: float
    final_factor: float

    def factor(self, step: int) -> float:
        """The factor in step 0, 1, … ; beyond the last step, that of the last."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        length = max(1, self.steps - 1 - self.warmup_steps)
        return self.after_warmup(min(1.0, (step - self.warmup_steps) / length))

    @abstractmethod
    def after_warmup(self, progress: float) -> float:
        """The factor at `progress` in [0, 1] of what follows the warm-up."""

    @property
    @abstractmethod
    def last(self) -> float:
        """The factor that the last step is declared to have."""


SCHEDULES: Registry[Schedule] = Registry("danlu.optim.schedules", Schedule, "schedule.type")
