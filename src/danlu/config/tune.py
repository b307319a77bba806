"""`tune` and `simulate`: searching configs and ageing plans."""

from danlu.config._block import Block, Count, planned

__all__ = ["SimulateConfig", "TuneConfig"]


class TuneConfig(Block):
    """A search over config keys."""

    space: dict[str, object] | None = planned(None)
    """Keys to vary and their ranges."""
    trials: Count = planned(0)
    """Number of trials."""


class SimulateConfig(Block):
    """A cluster that is only calculated."""

    scenario: str | None = planned(None)
    """Faults and their rates."""
