"""The records that parts exchange: plain frozen numbers, so that parts need not know one another.

Units: bytes, seconds, FLOP (one multiply-add is two), tokens. Shapes are single-model totals unless
a name says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Self

__all__ = [
    "LOSS_PIECE_BYTES",
    "LOSS_PIECE_ROWS",
    "OFFLOAD_PIECES",
    "OFFLOAD_PIECE_BYTES",
    "ClusterFacts",
    "DataFacts",
    "DeviceFacts",
    "Evaluation",
    "LayerCost",
    "ModelShape",
    "StepReport",
]

LOSS_PIECE_BYTES: Mapping[str, int] = MappingProxyType({"cpu": 2**25, "cuda": 2**29})
"""Logits that exist at once, by kind of device: what the loss computes and the planner counts."""
LOSS_PIECE_ROWS = 512
"""Fewest tokens of such a piece, whatever the vocabulary."""
OFFLOAD_PIECE_BYTES = 2**26
"""Of each of the two moments that a GPU fetches from CPU memory at once."""
OFFLOAD_PIECES = 3
"""Such pieces on the GPU: one coming, one in its update, one going."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer in numbers; every `auto` is gone.

    `vocab_size` is padded so that it splits evenly; the tokenizer may know fewer tokens.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    sequence_length: int
    tied_embeddings: bool
    rope_theta: float
    norm_epsilon: float

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block: attention, feed-forward, two norms."""
        attention = self.hidden_size * self.head_size * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding plus, when untied, those of the output head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden_size


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer costs, per token of a training sequence.

    Attributes:
        name: the module's path in the model, e.g. `layers.3`.
        parameters: number of weights.
        forward_flops: of matrix products with weights, per token; backward costs twice that.
        attention_flops: of attention's own products, forward, per token; backward twice that.
        saved_elements: activation elements kept for backward, per token (times the format's bytes).
        traffic_elements: elements read and written outside matrix products, forward and backward,
            per token.
        cheap_elements: of the saved ones, those that element-wise operations give again.
        split_saved, split_traffic, split_cheap: of these, what tensor-parallel ranks share.
        tied_parameters: of the embedding's weights, those that it uses too; where the embedding is
            on another rank they are held once more.
    """

    name: str
    parameters: int
    forward_flops: float
    attention_flops: float
    saved_elements: float
    traffic_elements: float
    split_saved: float = 0.0
    split_traffic: float = 0.0
    cheap_elements: float = 0.0
    split_cheap: float = 0.0
    tied_parameters: int = 0


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device: what it is and how fast.

    Attributes:
        kind: `cpu`, `cuda` (NVIDIA, and AMD through ROCm).
        name: the vendor's name.
        memory_bytes: memory that a run may use.
        peak_flops: matrix-product FLOP/s by format (`fp32`, `bf16`, `fp16`, `fp8`); a format that
            is absent is not supported.
        bandwidth: bytes/s, read plus written, of a large copy.
        host_bandwidth: bytes/s, one direction, between a GPU and its CPU's memory.
        threads: CPU threads (0 for other kinds).
        features: instruction sets or capabilities that choices depend on.
        source: where the figures come from: `measured`, or the published specification.
    """

    kind: str
    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    bandwidth: float
    threads: int = 0
    features: tuple[str, ...] = ()
    source: str = "measured"
    host_bandwidth: float = 32e9  # PCIe 4.0 x16

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-ready values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"peak_flops": dict(self.peak_flops)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        known = {f.name for f in fields(cls)}
        return cls(
            **{k: v for k, v in values.items() if k in known and k != "features"},
            features=tuple(values.get("features", ())),
        )


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Machines and what connects them (bandwidths in bytes/s, one direction, per device)."""

    nodes: int
    devices_per_node: int
    device: DeviceFacts
    node_bandwidth: float
    network_bandwidth: float

    @property
    def devices(self) -> int:
        """All devices of the cluster."""
        return self.nodes * self.devices_per_node

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-ready values."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {
            "device": self.device.to_dict()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return cls(**{**values, "device": DeviceFacts.from_dict(values["device"])})


@dataclass(frozen=True, slots=True)
class DataFacts:
    """A prepared corpus in numbers (tokens include one end-of-document token a document)."""

    train_tokens: int
    validation_tokens: int
    train_bytes: int
    validation_bytes: int
    documents: int
    vocab_size: int
    tokenizer: str


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step, over all ranks.

    Attributes:
        loss: mean over the step's tokens, in nats.
        gradient_norm: global L2 norm before clipping.
        seconds: wall time since the step before.
        memory_bytes: resident memory (CPU) or the peak of allocated memory (GPU), of the rank that
            has most.
    """

    step: int
    tokens: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int
    data_seconds: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-ready values; `extra` is merged in."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        return values | dict(self.extra)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A pass over held-out text.

    `loss` is in nats a token; `bits_per_byte` is comparable across tokenizers.
    """

    step: int
    loss: float
    bits_per_byte: float
    tokens: int
    seconds: float
