"""Warm-up, stable, decay (arXiv 2404.06395): a long plateau, then a short linear decay.

A run can be prolonged from the plateau without having decayed too early.
"""

from danlu.optim.schedules._base import Schedule

__all__ = ["WarmupStableDecay"]


class WarmupStableDecay(Schedule):
    """Linear decay over the last `decay_fraction` of the steps."""

    def after_warmup(self, progress: float) -> float:
        """1, then down to `final_factor`."""
        after = max(1, self.steps - 1 - self.warmup_steps)
        decay = min(1.0, self.decay_fraction * self.steps / after)
        share = max(0.0, (progress - (1 - decay)) / decay)
        return 1 - (1 - self.final_factor) * share

    @property
    def last(self) -> float:
        """`final_factor`."""
        return self.final_factor
