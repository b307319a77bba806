"""Seconds of a training step, from FLOP, bytes, and what the implementation reaches of the peaks.

A step is matrix products with weights, attention's own products, everything that is bound by memory
traffic (element-wise work, the optimizer), and communication. Each is an amount over a rate; the
rates are the device's measured peaks times an efficiency. The efficiencies below are calibrated,
not derived; `docs/results/plan.md` compares predictions with measurements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from danlu.base.facts import ClusterFacts, DeviceFacts, LayerCost

__all__ = ["FORMAT_BYTES", "Efficiency", "efficiency", "step_seconds"]

FORMAT_BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1})


@dataclass(frozen=True)
class Efficiency:
    """What an implementation reaches.

    Attributes:
        products: share of the matrix peak in products with wide weights.
        half_width: width at which that share is half (short sums do not fill the pipelines).
        attention: share of the matrix peak in attention.
        traffic: factor on the element-wise traffic (1: every operation fused as the native ones).
        overhead_seconds: of Python and dispatch, a layer and micro-batch.
    """

    products: float
    half_width: float
    attention: float
    traffic: float
    overhead_seconds: float


_EFFICIENCY: Mapping[tuple[str, str, bool], Efficiency] = MappingProxyType(
    {
        ("cpu", "native", False): Efficiency(0.96, 24, 0.50, 1.0, 400e-6),
        ("cpu-amx", "native", False): Efficiency(0.60, 24, 0.17, 1.0, 400e-6),
        ("cpu-amx", "torch", False): Efficiency(0.55, 24, 0.08, 3.5, 900e-6),
        ("cpu-amx", "torch", True): Efficiency(0.60, 24, 0.08, 1.8, 300e-6),
        ("cpu", "torch", False): Efficiency(0.94, 24, 0.14, 3.5, 900e-6),
        ("cpu", "torch", True): Efficiency(0.94, 24, 0.14, 1.8, 300e-6),
        ("cuda", "torch", False): Efficiency(0.65, 256, 0.40, 3.5, 600e-6),
        ("cuda", "torch", True): Efficiency(0.70, 256, 0.45, 1.5, 150e-6),
    }
)
"""By device kind, backend, and whether torch.compile is used. CPUs: AVX512-BF16 measured on AMD
Zen 4 (docs/results/plan.md); with AMX products are so fast that feeding them counts (from rates of
single products and attention on an Emerald Rapids, not of whole steps). The GPU rows are taken from
published utilisations (torchtitan: 33-39 % of the H100's peak end to end), not measured by us."""

_OPTIMIZER_BYTES = 4 * (4 + 3)  # read weight, gradient, two moments; write weight and moments
_GRADIENT_PASSES_BYTES = 4 * 3  # set to zero, norm, clip


def efficiency(device: DeviceFacts, backend: str, *, compiled: bool) -> Efficiency:
    """The calibrated efficiencies of an implementation on a kind of device."""
    kind = "cpu-amx" if "amx_bf16" in device.features else device.kind
    return _EFFICIENCY[kind, backend, compiled]


def step_seconds(
    layers: Sequence[LayerCost],
    cluster: ClusterFacts,
    *,
    width: int,
    number_format: str,
    reached: Efficiency,
    tokens_per_rank: int,
    micro_batches: int,
    ranks: int,
    device_share: float,
) -> dict[str, float]:
    """Predicted seconds of one optimizer step by part; their sum is the step.

    Args:
        layers: costs per token, in order.
        cluster: the machines.
        width: of the residual stream.
        number_format: of products and activations.
        reached: what the implementation reaches.
        tokens_per_rank: tokens a rank computes in a step.
        micro_batches: pieces they are computed in.
        ranks: data-parallel copies.
        device_share: share of a device that a rank has (CPU ranks of one machine share it).
    """
    device = cluster.device
    peak = device.peak_flops[number_format] * device_share
    bandwidth = device.bandwidth * device_share
    parameters = sum(layer.parameters for layer in layers)
    products = 3 * tokens_per_rank * sum(c.forward_flops for c in layers)
    attention = 3 * tokens_per_rank * sum(c.attention_flops for c in layers)
    elements = tokens_per_rank * sum(c.traffic_elements for c in layers)
    traffic = elements * FORMAT_BYTES[number_format] * reached.traffic
    filled = reached.products * width / (width + reached.half_width)
    casts = micro_batches * parameters * (4 + 2 + 2 + 8) if number_format != "fp32" else 0
    return {
        "matrix products": products / (peak * filled),
        "attention": attention / (peak * reached.attention),
        "element-wise": (traffic + casts) / bandwidth,
        "optimizer": parameters * (_OPTIMIZER_BYTES + _GRADIENT_PASSES_BYTES) / bandwidth,
        "communication": _all_reduce_seconds(4 * parameters, ranks, cluster),
        "overhead": micro_batches * len(layers) * reached.overhead_seconds,
    }


def _all_reduce_seconds(size: float, ranks: int, cluster: ClusterFacts) -> float:
    """A ring all-reduce, over the slowest link it crosses; half of it hides behind backward."""
    if ranks == 1:
        return 0.0
    inside = ranks <= cluster.devices_per_node or cluster.device.kind == "cpu"
    link = cluster.node_bandwidth if inside else cluster.network_bandwidth
    return 0.5 * 2 * (ranks - 1) / ranks * size / link
