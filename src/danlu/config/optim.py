"""`optimizer` and `schedule`: how gradients become updates."""

from typing import Literal

from pydantic import Field

from danlu.config._block import Auto, Block, Count, PositiveNumber, planned

__all__ = ["OptimizerConfig", "ScheduleConfig"]


class OptimizerConfig(Block):
    """The update rule."""

    type: Literal["adamw"] = "adamw"
    """AdamW, fused."""
    learning_rate: PositiveNumber | Auto = "auto"
    """Peak learning rate; `auto` follows the Step law (arXiv 2503.04715) from model size and
    tokens."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of matrices (not of norms)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the gradient's running mean."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the squared gradient's running mean."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    gradient_clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm; null turns clipping off."""


class ScheduleConfig(Block):
    """The learning rate over the run, as a factor of its peak."""

    type: str = "cosine"
    """A file of `danlu/optim/schedules`: `constant`, `cosine`, `wsd` (warm-up, stable, decay)."""
    warmup_steps: Count | Auto = "auto"
    """Steps of linear rise; `auto` is 100, or 20 % of a short run, or 2 % of a long one, at most
    2,000."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Last share of the run in which `wsd` decays."""
    final_factor: float = Field(0.1, ge=0, le=1)
    """Factor at the end."""
    reactive: bool = planned(False)
    """Whether the loss trend moves the learning rate within bounds."""
