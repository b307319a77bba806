"""Seconds of a training step, from FLOP, bytes, and what the implementation reaches of the peaks.

A step is matrix products with weights, attention's own products, everything that is bound by memory
traffic (element-wise work, the optimizer), communication, and, in a pipeline, waiting. Each is an
amount over a rate; the rates are the device's measured peaks times an efficiency. The efficiencies
below are calibrated, not derived; `docs/results/plan.md` compares predictions with measurements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from danlu.base.facts import ClusterFacts, DeviceFacts, LayerCost
from danlu.planner.layout import Layout
from danlu.planner.schedule import (
    SCHEDULES,
    StageCost,
    Timeline,
    order,
    problem,
    share_cores,
    simulate,
)

__all__ = [
    "FORMAT_BYTES",
    "Efficiency",
    "Setting",
    "StepCost",
    "cheap_elements",
    "efficiency",
    "layer_seconds",
    "overlapped",
    "rank_parameters",
    "setting_of",
    "stage_cost",
    "stage_layers",
    "step_cost",
]

FORMAT_BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1})


@dataclass(frozen=True)
class Efficiency:
    """What an implementation reaches.

    Attributes:
        products: share of the matrix peak in products with wide weights.
        half_width: width at which that share is half (short sums do not fill the pipelines).
        attention: share of the matrix peak in attention.
        traffic: factor on the element-wise traffic (1: every operation fused as the native ones).
        overhead_seconds: of Python and dispatch, a layer and micro-batch. A GPU computes meanwhile.
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
        ("cuda", "torch", False): Efficiency(0.65, 256, 0.40, 3.5, 1.5e-3),
        ("cuda", "torch", True): Efficiency(0.70, 256, 0.45, 1.5, 150e-6),
    }
)
"""By device kind, backend, and whether torch.compile is used. CPUs: AVX512-BF16 measured on AMD
Zen 4 (docs/results/plan.md); with AMX products are so fast that feeding them counts (from rates of
single products and attention on an Emerald Rapids, not of whole steps). The GPU rows are taken from
published utilisations (torchtitan: 33-39 % of the H100's peak end to end), not measured by us; the
dispatch of a layer that is not compiled is its 140 kernels in bf16 (counted), about 10 us each."""

_OPTIMIZER_BYTES = 4 * (4 + 3)  # read weight, gradient, two moments; write weight and moments
_GRADIENT_PASSES_BYTES = 4 * 3  # set to zero, norm, clip
_CHEAP_TRAFFIC = 3  # elements read and written for one of SwiGLU; a norm's takes two


def efficiency(device: DeviceFacts, backend: str, *, compiled: bool) -> Efficiency:
    """The calibrated efficiencies of an implementation on a kind of device."""
    kind = "cpu-amx" if "amx_bf16" in device.features else device.kind
    return _EFFICIENCY[kind, backend, compiled]


@dataclass(frozen=True)
class Links:
    """What collectives reach of a link, as bytes a rank sends and receives over seconds.

    Attributes:
        reduce: share of the link in all-reduce.
        scatter: in reduce-scatter.
        gather: in all-gather and between neighbours of a pipeline.
        latency: seconds of one message however small.
        call: seconds that a collective of a split or sharded layer costs besides: the work around
            it in PyTorch, and waiting for the rank that comes last.
        overlap: share of the gradients' travel between plain copies that hides behind backward.
        sharded_overlap: the same between sharded copies.
    """

    reduce: float
    scatter: float
    gather: float
    latency: float
    call: float
    overlap: float
    sharded_overlap: float


_LINKS: Mapping[str, Links] = MappingProxyType(
    {
        "cpu": Links(0.11, 0.1, 0.11, 4e-4, 3e-3, 0.7, 0.0),
        "cuda": Links(0.8, 0.8, 0.8, 15e-6, 0.0, 0.7, 0.7),
    }
)
"""CPU: Gloo over one machine's memory, whose ranks' cores also move the bytes
(docs/results/layouts.md). GPU: NCCL's usual utilisation, not measured by us."""


@dataclass(frozen=True)
class Setting:
    """What a step's cost depends on besides layers and layout.

    Attributes:
        cluster: the machines.
        width: of the residual stream.
        number_format: of products and activations.
        reached: what the implementation reaches.
        device_share: share of a device that a rank has (CPU ranks of one machine share it).
    """

    cluster: ClusterFacts
    width: int
    number_format: str
    reached: Efficiency
    device_share: float

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth of a rank, bytes/s."""
        return self.cluster.device.bandwidth * self.device_share

    @property
    def links(self) -> Links:
        """Of the device's kind."""
        return _LINKS[self.cluster.device.kind]

    @property
    def crowd(self) -> float:
        """Ranks that share a CPU core, at least 1."""
        return max(1.0, 1 / (max(1, self.cluster.device.threads) * self.device_share))

    @property
    def call(self) -> float:
        """Seconds of one collective besides its bytes; crowded ranks also wait for their turn."""
        return self.links.latency + self.links.call * (1 + self.crowd) / 2

    def link(self, ranks: int, neighbours: int) -> float:
        """Bytes/s between `ranks` ranks of which `neighbours` numbers lie between two."""
        if self.cluster.device.kind == "cpu":
            return self.cluster.node_bandwidth / self.crowd
        inside = ranks * neighbours <= self.cluster.devices_per_node
        return self.cluster.node_bandwidth if inside else self.cluster.network_bandwidth


def setting_of(
    cluster: ClusterFacts,
    layout: Layout,
    *,
    width: int,
    number_format: str,
    backend: str,
    compiled: bool,
) -> Setting:
    """The setting of a layout on a cluster; CPU ranks of one machine share it evenly.

    Args:
        cluster: the machines.
        layout: the ranks on them.
        width: of the residual stream.
        number_format: of products and activations.
        backend: `native` or `torch` operations.
        compiled: whether torch.compile is used.
    """
    per_node = -(-layout.ranks // cluster.nodes)
    return Setting(
        cluster=cluster,
        width=width,
        number_format=number_format,
        reached=efficiency(cluster.device, backend, compiled=compiled),
        device_share=1 / per_node if cluster.device.kind == "cpu" else 1.0,
    )


@dataclass(frozen=True)
class StepCost:
    """A predicted step.

    Attributes:
        seconds: by part; their sum is the step. `bubble` is a pipeline's idle time.
        timeline: the simulated pipeline, or None without one. Of a long step it is the first part.
    """

    seconds: Mapping[str, float]
    timeline: Timeline | None = None

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())


def step_cost(
    layers: Sequence[LayerCost],
    layout: Layout,
    setting: Setting,
    *,
    micro_tokens: float,
    micro_batches: int,
) -> StepCost:
    """Predicted seconds of one optimizer step of the busiest rank, by part.

    Args:
        layers: costs per token: embedding, blocks, head.
        layout: over ranks.
        setting: everything else.
        micro_tokens: tokens a copy of the model computes at once.
        micro_batches: such pieces in a step.
    """
    pieces = [stage_layers(layers, layout, stage) for stage in range(max(1, len(layout.stages)))]
    stages = [_micro_batch(piece, layout, setting, micro_tokens) for piece in pieces]
    timeline, rank, idle, pace = None, 0, 0.0, 1.0
    mine: Sequence[int] = (0,)
    if layout.pipeline > 1:
        timeline, seconds, busy = _pipeline(stages, layout, setting, micro_tokens, micro_batches)
        loads = [
            sum(sum(stages[s].values()) for s in layout.stage_numbers(r))
            for r in range(layout.pipeline)
        ]
        rank = max(range(layout.pipeline), key=loads.__getitem__)
        mine = layout.stage_numbers(rank)
        idle, pace = max(0.0, seconds - busy[rank]), busy[rank] / (micro_batches * loads[rank])
    parts = {
        name: pace * micro_batches * sum(stages[s][name] for s in mine) for name in stages[mine[0]]
    }
    weights = rank_parameters([layer for s in mine for layer in pieces[s]], layout)
    kept = weights / (layout.data if layout.zero else 1)
    groups = sum(len(pieces[s]) for s in mine)
    sending = _copies_seconds(weights, groups, layout, setting, micro_batches)
    parts["communication"] += sending + _tied_seconds(layers[-1], layout, setting)
    parts["optimizer"] = kept * (_OPTIMIZER_BYTES + _GRADIENT_PASSES_BYTES) / setting.bandwidth
    if layout.offload:
        parts["offload"] = _offload_seconds(kept, parts["optimizer"], layout, setting)
    if layout.pipeline > 1:
        parts["bubble"] = idle
    return StepCost(parts, timeline)


def _offload_seconds(kept: float, update: float, layout: Layout, setting: Setting) -> float:
    """Seconds that an update of `kept` weights waits for moments that are elsewhere."""
    moved = 8 * layout.offload * kept
    if setting.cluster.device.kind == "cpu":  # a file's pages, in and out
        return 2 * moved / (setting.bandwidth / 8)
    # In and out at once, while neighbours are updated.
    travel = moved / (setting.cluster.device.host_bandwidth * setting.links.gather)
    return max(0.0, travel - update)


def stage_layers(
    layers: Sequence[LayerCost], layout: Layout, stage: int
) -> tuple[tuple[LayerCost, bool], ...]:
    """The layers of a stage, each with whether it is split; embedding and head at the ends."""
    last = len(layers) - 2
    blocks = layout.layers_of(stage) if layout.stages else range(last)
    found = [(layers[1 + i], i in set(layout.split_layers)) for i in blocks]
    if blocks.start == 0:
        found.insert(0, (layers[0], layout.split_ends))
    if blocks.stop == last:
        found.append((layers[-1], layout.split_ends))
    return tuple(found)


def rank_parameters(piece: Sequence[tuple[LayerCost, bool]], layout: Layout) -> float:
    """Weights that a rank holds of its layers, before ZeRO; one matrix at both ends counts once."""
    alone = "embed_tokens" not in {cost.name for cost, _ in piece}
    return sum(
        (cost.parameters + alone * cost.tied_parameters) / (layout.tensor if split else 1)
        for cost, split in piece
    )


def overlapped(dispatch: float, work: float) -> float:
    """Seconds of a GPU layer whose kernels the host dispatches ahead of the GPU's work.

    The longer of the two, and more where they are about equally long (by 26 % at most), as kernels
    differ: the GPU waits for the host in short ones and the host's lead is used up. The power of 3
    has the least error in step time on vTrain's 1,440 runs (`docs/log.md`).

    Args:
        dispatch: seconds of Python and dispatch.
        work: seconds of the kernels, collectives among them.
    """
    return float((dispatch**3 + work**3) ** (1 / 3))


def layer_seconds(
    cost: LayerCost, layout: Layout, setting: Setting, micro_tokens: float, *, split: bool
) -> dict[str, float]:
    """Forward and backward of one layer for one micro-batch, on one rank, by part.

    Their sum is the layer's time; of a GPU, `overhead` is what its work does not hide of dispatch.
    """
    device, reached = setting.cluster.device, setting.reached
    peak = device.peak_flops[setting.number_format] * setting.device_share
    size = FORMAT_BYTES[setting.number_format]
    share = 1 / layout.tensor if split else 1.0
    narrow = setting.width * share
    filled = reached.products * narrow / (narrow + reached.half_width)
    rows = 1 / layout.tensor if layout.sequence_parallel else 1.0
    elements = cost.split_traffic * share + (cost.traffic_elements - cost.split_traffic) * rows
    if layout.recompute == "selective":
        elements += _CHEAP_TRAFFIC * cheap_elements(cost, layout, split=split)
    traffic = micro_tokens * elements * size * reached.traffic
    casts = cost.parameters * share * 16 if size < 4 else 0.0
    again = layout.recompute == "full" and cost.attention_flops > 0
    passes = 4 if again else 3  # one forward pass more, of blocks
    sending = _tensor_seconds(cost, layout, setting, micro_tokens) if split else 0.0
    parts = {
        "matrix products": passes * micro_tokens * cost.forward_flops * share / (peak * filled),
        "attention": passes
        * micro_tokens
        * cost.attention_flops
        * share
        / (peak * reached.attention),
        "element-wise": (traffic + casts) / setting.bandwidth * passes / 3,
        "communication": sending * (1.5 if again else 1.0),
    }
    dispatch, work = reached.overhead_seconds * passes / 3, sum(parts.values())
    waits = device.kind == "cpu"  # a CPU computes nothing while Python runs
    parts["overhead"] = dispatch if waits else max(0.0, overlapped(dispatch, work) - work)
    return parts


def cheap_elements(cost: LayerCost, layout: Layout, *, split: bool) -> float:
    """Saved elements of a layer, a token, that selective recompute does not keep on a rank.

    Where ranks share the rows, the next product saves a norm's output as it was gathered.
    """
    gathered = split and layout.sequence_parallel
    norms = 0.0 if gathered else cost.cheap_elements - cost.split_cheap
    return norms + cost.split_cheap / (layout.tensor if split else 1)


def _micro_batch(
    piece: Sequence[tuple[LayerCost, bool]], layout: Layout, setting: Setting, tokens: float
) -> dict[str, float]:
    total = dict.fromkeys(
        ("matrix products", "attention", "element-wise", "communication", "overhead"), 0.0
    )
    for cost, split in piece:
        for name, seconds in layer_seconds(cost, layout, setting, tokens, split=split).items():
            total[name] += seconds
    return total


def stage_cost(parts: Mapping[str, float], *, recompute: bool = False) -> StageCost:
    """A stage's passes from its parts: backward is twice forward, half of it for the weights.

    With `recompute` of whole layers, backward for the inputs begins with a forward pass.
    """
    products, sending = parts["matrix products"], parts["communication"]
    rest = sum(parts.values()) - products - sending
    once, sent = (1 / 4, 1 / 3) if recompute else (1 / 3, 1 / 2)
    return StageCost(
        forward=products * once + rest * once + sending * sent,
        backward_input=products * (1 - 2 * once) + rest * (1 - once) + sending * (1 - sent),
        backward_weight=products * once,
    )


def _pipeline(
    stages: Sequence[Mapping[str, float]],
    layout: Layout,
    setting: Setting,
    micro_tokens: float,
    micro_batches: int,
) -> tuple[Timeline, float, tuple[float, ...]]:
    """The simulated step, its seconds, and those in which each rank computes.

    A long step's middle repeats, and is counted, not run.
    """
    costs = [stage_cost(parts, recompute=layout.recompute == "full") for parts in stages]
    size = micro_tokens * setting.width * FORMAT_BYTES[setting.number_format]
    if layout.sequence_parallel:
        size /= layout.tensor
    neighbours = layout.data * layout.tensor
    speed = setting.link(2, neighbours) * setting.links.gather
    send = size / speed + setting.links.latency
    pairs, ranks = SCHEDULES[layout.schedule].pairs, layout.pipeline

    def run(rounds: int) -> Timeline:
        sequence = order(layout.schedule, ranks, rounds, layout.chunks)
        made = simulate(sequence, costs, send_seconds=send, pairs=pairs)
        return share_cores(made, setting.crowd) if setting.crowd > 1 else made

    short = micro_batches - (micro_batches // ranks - 6) * ranks  # 6 or 7 rounds
    fits = problem(layout.schedule, ranks, short, layout.chunks) is None
    if micro_batches <= 7 * ranks or not fits:
        timeline = run(micro_batches)
        return timeline, timeline.seconds, timeline.busy
    timeline, less = run(short), run(short - ranks)
    more = (micro_batches - short) / ranks
    seconds = timeline.seconds + more * (timeline.seconds - less.seconds)
    busy = (b + more * (b - few) for b, few in zip(timeline.busy, less.busy, strict=True))
    return timeline, seconds, tuple(busy)


def _tensor_seconds(
    cost: LayerCost, layout: Layout, setting: Setting, micro_tokens: float
) -> float:
    """Before and after attention and feed-forward, forward and backward, all rows travel."""
    links, link = setting.links, setting.link(layout.tensor, 1)
    size = micro_tokens * setting.width * FORMAT_BYTES[setting.number_format]
    moved = size * (layout.tensor - 1) / layout.tensor
    ends = 4 if cost.attention_flops else 1  # of a block; embedding and head have one
    if layout.sequence_parallel:
        return ends * (moved / (link * links.gather) + moved / (link * links.scatter)
                       + 2 * setting.call)  # fmt: skip
    return ends * (2 * moved / (link * links.reduce) + setting.call)


def _copies_seconds(
    weights: float, groups: int, layout: Layout, setting: Setting, micro_batches: int
) -> float:
    """Gradients averaged, or reduced to shards and weights gathered layer by layer (`groups`)."""
    if layout.data == 1:
        return 0.0
    links = setting.links
    link = setting.link(layout.data, layout.tensor)
    moved = (layout.data - 1) / layout.data * weights
    width = FORMAT_BYTES[setting.number_format]
    overlap = links.sharded_overlap if layout.zero else links.overlap
    hidden = overlap if layout.pipeline == 1 else 0.0
    if layout.zero == 0:
        return (1 - hidden) * 2 * 4 * moved / (link * links.reduce)
    scatters = micro_batches if layout.zero >= 2 and layout.pipeline == 1 else 1
    gathers = 2 * micro_batches if layout.zero == 3 else 1
    travel = scatters * 4 * moved / (link * links.scatter)
    travel += gathers * width * moved / (link * links.gather)
    return (1 - hidden) * (travel + (scatters + gathers) * groups * setting.call)


def _tied_seconds(head: LayerCost, layout: Layout, setting: Setting) -> float:
    """The first and the last rank exchange the gradient of a matrix that both hold."""
    if not (head.tied_parameters and layout.ends_apart):
        return 0.0
    shards = (layout.tensor if layout.split_ends else 1) * (layout.data if layout.zero else 1)
    between = (layout.pipeline - 1) * layout.data * layout.tensor
    speed = setting.link(2, between) * setting.links.gather
    return 4 * head.tied_parameters / shards / speed + setting.links.latency
