"""Half a cosine from the peak to the final factor (arXiv 1608.03983, without restarts)."""

import math

from danlu.optim.schedules._base import Schedule

__all__ = ["Cosine"]


class Cosine(Schedule):
    """Slow at first, steepest in the middle, slow at the end."""

    def after_warmup(self, progress: float) -> float:
        """From 1 to `final_factor`."""
        share = 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_factor + (1 - self.final_factor) * share

    @property
    def last(self) -> float:
        """`final_factor`."""
        return self.final_factor
