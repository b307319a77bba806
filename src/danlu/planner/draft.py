"""A plan in the making, which the planner's steps fill."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from danlu.base.facts import ClusterFacts, LayerCost, ModelShape
from danlu.config.run import RunConfig
from danlu.planner.cost import Setting, StepCost, setting_of, step_cost
from danlu.planner.layout import Layout
from danlu.planner.memory import memory_bytes
from danlu.planner.plan import Alternative, Decision
from danlu.planner.schedule import SCHEDULES

__all__ = ["Draft", "least_micro_batches"]

_MEMORY_SHARE = 0.9


@dataclass
class Draft:
    """The inputs, and the numbers decided so far; each `decide` keeps its reason."""

    config: RunConfig
    shape: ModelShape
    layers: Sequence[LayerCost]
    cluster: ClusterFacts
    layout: Layout = field(default_factory=Layout)
    threads: int = 1
    format: str = "fp32"
    backend: str = "torch"
    compiled: bool = False
    batch_sequences: int = 1
    steps: int = 1
    micro_batch: int = 1
    warmup_steps: int = 0
    learning_rate: float = 0.0
    evaluate_every: int = 1
    evaluate_tokens: int = 1
    checkpoint_every: int = 1
    alternatives: tuple[Alternative, ...] = ()
    rejected: tuple[Decision, ...] = ()
    decisions: dict[str, Decision] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Of device: `cpu` or `cuda`."""
        return self.cluster.device.kind

    @property
    def flops_per_token(self) -> float:
        """Of training."""
        return 3.0 * sum(c.forward_flops + c.attention_flops for c in self.layers)

    @property
    def parameters(self) -> int:
        """Weights of the model."""
        return sum(layer.parameters for layer in self.layers)

    def decide(self, key: str, value: object, reason: str) -> None:
        """Keeps a number with its reason; a later one for the same key replaces it."""
        self.decisions[key] = Decision(key, str(value), reason)

    def take(self, layout: Layout) -> None:
        """Goes on with this layout; the CPU threads of a rank follow."""
        self.layout = layout
        cores, here = self.cluster.device.threads or 8, -(-layout.ranks // self.cluster.nodes)
        threads = self.config.launch.threads
        self.threads = max(1, cores // here) if threads == "auto" else threads
        why = f"{cores} CPUs among {here} ranks a machine" if threads == "auto" else "configured"
        self.decide("launch.threads", self.threads, why)

    def setting(self, layout: Layout) -> Setting:
        """What the cost model needs besides layers and layout."""
        return setting_of(
            self.cluster,
            layout,
            width=self.shape.hidden_size,
            number_format=self.format,
            backend=self.backend,
            compiled=self.compiled,
        )

    def cost(self, layout: Layout, micro_batch: float, micro_batches: int) -> StepCost:
        """Predicted step of `micro_batches` pieces of `micro_batch` sequences a copy."""
        return step_cost(
            self.layers,
            layout,
            self.setting(layout),
            micro_tokens=micro_batch * self.shape.sequence_length,
            micro_batches=micro_batches,
        )

    def memory(
        self, layout: Layout, micro_batch: int, micro_batches: int
    ) -> tuple[dict[str, int], ...]:
        """Predicted bytes by part, for each pipeline rank."""
        rounds = 10**9 if layout.schedule == "gpipe" else 4 * layout.pipeline
        return memory_bytes(
            self.layers,
            self.shape,
            layout,
            kind=self.kind,
            number_format=self.format,
            micro_tokens=micro_batch * self.shape.sequence_length,
            micro_batches=min(micro_batches, rounds),  # after which no more are held at once
            backend=self.backend,
        )

    def memory_limit(self, layout: Layout) -> int:
        """Bytes that a rank may use."""
        limit = self.config.memory.limit
        if limit != "auto":
            return limit
        sharing = -(-layout.ranks // self.cluster.nodes) if self.kind == "cpu" else 1
        return int(_MEMORY_SHARE * self.cluster.device.memory_bytes / sharing)


def least_micro_batches(config: RunConfig, layout: Layout) -> int:
    """Fewest micro-batches that a layout's schedule runs with."""
    wanted = config.pipeline_parallel.micro_batches
    if layout.pipeline == 1:
        return 1
    if wanted != "auto":
        return wanted
    return max(1, SCHEDULES[layout.schedule].fewest_per_rank) * layout.pipeline
