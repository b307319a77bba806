"""`checkpoint` and `resilience`: what survives, and how a run goes on."""

from danlu.config._block import Auto, Block, Count, Positive, Seconds, Text, planned

__all__ = ["CheckpointConfig", "ResilienceConfig"]


class CheckpointConfig(Block):
    """Snapshots on disk. One is always written at the end and on Ctrl-C."""

    every: Positive | Auto = "auto"
    """Steps between two checkpoints; `auto` is about one in ten minutes."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    start_from: Text | None = None
    """Run folder or checkpoint of the same model whose weights a new run starts with."""


class ResilienceConfig(Block):
    """Faults and what is done about them."""

    memory_snapshots: bool = planned(False)
    """Frequent snapshots in memory, so that a lost rank costs seconds."""
    max_restarts: Count = planned(0)
    """Restarts of a run whose rank died."""
    heartbeat: Seconds | None = planned(None)
    """Longest silence of a rank before it counts as hung."""
