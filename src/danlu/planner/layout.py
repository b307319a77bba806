"""How a model lies over devices: the part of a Plan that `parallel` carries out."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """Tensor x pipeline x data parallel, ZeRO, and what goes with them.

    Ranks are numbered with tensor-parallel neighbours closest, then data-parallel copies, then
    pipeline ranks: rank = (pipeline * data + copy) * tensor + shard.

    Attributes:
        data: copies of the model.
        tensor: ranks that share a layer.
        pipeline: ranks that the layers are cut over.
        schedule: of the pipeline (`gpipe`, `1f1b`, `interleaved`, `zero_bubble`, `dualpipe_v`).
        stages: layers of each pipeline stage, in the model's order; a rank may hold several.
        split_layers: layers whose matrices are split over the tensor-parallel ranks.
        split_ends: whether embedding and head are split too (by vocabulary).
        sequence_parallel: whether tensor-parallel ranks share the rows between split layers.
        zero: 0; 1 shards the optimizer's state over the copies, 2 gradients too, 3 weights too.
        offload: share of the optimizer's state that lives off the device.
        recompute: what is computed again in backward: `none`; `selective`: norms and SwiGLU;
            `full`: layers, which keep their inputs only.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    stages: tuple[int, ...] = ()
    split_layers: tuple[int, ...] = ()
    split_ends: bool = False
    sequence_parallel: bool = False
    zero: int = 0
    offload: float = 0.0
    recompute: str = "none"

    @property
    def ranks(self) -> int:
        """Processes of a run."""
        return self.data * self.tensor * self.pipeline

    @property
    def chunks(self) -> int:
        """Pipeline stages that a rank holds."""
        return max(1, len(self.stages) // self.pipeline)

    @property
    def plain(self) -> bool:
        """Whether every rank holds the whole model, unsharded."""
        return self.tensor == 1 and self.pipeline == 1 and self.zero == 0

    @property
    def ends_apart(self) -> bool:
        """Whether the first and the last stage are on different ranks."""
        return max(len(self.stages), 1) - 1 not in self.stage_numbers(0)

    def stage_numbers(self, pipeline_rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank holds, in the model's order.

        V-shaped schedules turn round: the first rank also holds the last stage.
        """
        count = max(len(self.stages), 1)
        if self.schedule in ("zero_bubble", "dualpipe_v") and self.pipeline > 1:
            return (pipeline_rank, count - 1 - pipeline_rank)
        return tuple(range(pipeline_rank, count, self.pipeline))

    def layers_of(self, stage: int) -> range:
        """The layers of a stage."""
        first = sum(self.stages[:stage])
        return range(first, first + self.stages[stage])

    def text(self) -> str:
        """The layout in a few words, as logs and tables show it."""
        parts = [
            f"{name} {size}"
            for name, size in (("TP", self.tensor), ("PP", self.pipeline), ("DP", self.data))
            if size > 1
        ]
        if self.sequence_parallel:
            parts.insert(1, "rows shared")
        if self.pipeline > 1:
            parts.append(self.schedule)
        if self.zero:
            parts.append(f"ZeRO {self.zero}")
        if self.offload:
            parts.append(f"offload {self.offload:.0%}")
        if self.recompute != "none":
            parts.append(f"{self.recompute} recompute")
        return ", ".join(parts) or "one process"

    def to_dict(self) -> dict[str, Any]:
        """The layout as JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; unknown keys are passed over."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: _value(v) for k, v in values.items() if k in known})


def _value(value: object) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
