"""The peak learning rate from the end of the warm-up on."""

from danlu.optim.schedules._base import Schedule

__all__ = ["Constant"]


class Constant(Schedule):
    """No decay: for runs without a fixed end."""

    def after_warmup(self, progress: float) -> float:
        """1."""
        return 1.0

    @property
    def last(self) -> float:
        """1."""
        return 1.0
