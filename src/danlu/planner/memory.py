"""Bytes a rank needs, by what they are for."""

from collections.abc import Sequence
from dataclasses import replace

from danlu.base.facts import (
    LOSS_PIECE_BYTES,
    LOSS_PIECE_ROWS,
    OFFLOAD_PIECE_BYTES,
    OFFLOAD_PIECES,
    LayerCost,
    ModelShape,
)
from danlu.planner.cost import FORMAT_BYTES, cheap_elements, rank_parameters, stage_layers
from danlu.planner.layout import Layout
from danlu.planner.schedule import order, peak_activations

__all__ = ["memory_bytes"]

_PROCESS_BYTES = {"cpu": 400 * 2**20, "cuda": 700 * 2**20}
"""Python with PyTorch and its libraries (CPU: resident; GPU: context and libraries on the
device)."""


def memory_bytes(
    layers: Sequence[LayerCost],
    shape: ModelShape,
    layout: Layout,
    *,
    kind: str,
    number_format: str,
    micro_tokens: float,
    micro_batches: int,
    backend: str,
) -> tuple[dict[str, int], ...]:
    """Predicted peak bytes by part, for each pipeline rank; the sum of one is its peak.

    Args:
        layers: costs per token: embedding, blocks, head.
        shape: the model.
        layout: over ranks.
        kind: of device, `cpu` or `cuda`.
        number_format: of products and activations.
        micro_tokens: tokens a copy of the model computes at once.
        micro_batches: such pieces in a step.
        backend: PyTorch's operations keep more for backward than the native ones.
    """
    width = FORMAT_BYTES[number_format]
    pieces = [stage_layers(layers, layout, stage) for stage in range(max(1, len(layout.stages)))]
    kept = micro_tokens * width * (1.0 if backend == "native" else 1.9)
    saved = [kept * sum(_saved(cost, layout, split=s) for cost, s in piece) for piece in pieces]
    if layout.recompute == "selective":
        for stage, piece in enumerate(pieces):
            cheap = sum(cheap_elements(cost, layout, split=s) for cost, s in piece)
            saved[stage] -= micro_tokens * width * cheap
    if layout.recompute == "full":  # one layer at a time has all of them
        whole = replace(layout, recompute="none")
        most = kept * max(_saved(cost, whole, split=s) for piece in pieces for cost, s in piece)
    else:
        most = 0.0
    held: Sequence[float] = saved
    if layout.pipeline > 1:
        sizes = [own + width * micro_tokens * shape.hidden_size for own in saved]
        held = peak_activations(
            order(layout.schedule, layout.pipeline, micro_batches, layout.chunks), sizes
        )
    piece_rows = max(LOSS_PIECE_ROWS, LOSS_PIECE_BYTES[kind] // (shape.vocab_size * width))
    rows = min(micro_tokens, piece_rows)
    vocabulary = shape.vocab_size / (layout.tensor if layout.split_ends else 1)
    # A loss over a split vocabulary keeps its logits in fp32, once more for the exponents.
    logits = rows * vocabulary * (2 * width + (8 if layout.split_ends else 0))
    head = logits + 6 * vocabulary * shape.hidden_size
    table = []
    for rank in range(layout.pipeline):
        mine = layout.stage_numbers(rank) if layout.pipeline > 1 else (0,)
        weights = rank_parameters([layer for s in mine for layer in pieces[s]], layout)
        used = sum(rank_parameters(pieces[s], layout) for s in mine)
        largest = max(rank_parameters([layer], layout) for s in mine for layer in pieces[s])
        last = max(mine) == len(pieces) - 1
        table.append(
            _state_bytes(weights, used, largest, layout, width, kind)
            | {
                "activations": int(held[rank] + most),
                "logits and the head's gradient": int(head) if last else 0,
                "process": _PROCESS_BYTES[kind],
            }
        )
    return tuple(table)


def _saved(cost: LayerCost, layout: Layout, *, split: bool) -> float:
    rows = 1 / layout.tensor if layout.sequence_parallel else 1.0
    share = 1 / layout.tensor if split else 1.0
    whole = cost.saved_elements - cost.split_saved
    if layout.recompute == "full" and cost.attention_flops:  # residual stream and last branch
        return whole / 2 * rows
    # Half of it are the inputs of split products, which are kept as they were gathered.
    gathered = 0.5 if split and cost.attention_flops else 0.0
    return cost.split_saved * share + whole * (gathered + (1 - gathered) * rows)


def _state_bytes(
    weights: float, used: float, largest: float, layout: Layout, width: int, kind: str
) -> dict[str, int]:
    """Weights, gradients and optimizer state of a rank (ZeRO: arXiv 1910.02054, section 5).

    `used` counts what is gathered: in each stage its own, so a matrix of both ends twice.
    """
    copies = layout.data if layout.zero else 1
    working = 0.0 if width == 4 else width * weights
    gradients = 4 * (used if layout.zero else weights)
    if layout.zero in (1, 2):  # shards in fp32, and all of the weights gathered from them
        working = width * used
    if layout.zero == 3 and layout.pipeline > 1:  # gathered while micro-batches are on their way
        working = width * used
    elif layout.zero == 3:  # a layer and the one that is fetched ahead
        working = width * min(2 * largest, weights)
    if layout.zero >= 2 and layout.pipeline == 1:
        gradients = 4 * (weights / copies + min(largest, weights))
    moments = 8 * weights / copies
    away = layout.offload * moments
    passing = 2 * OFFLOAD_PIECES * OFFLOAD_PIECE_BYTES if kind == "cuda" else 0
    return {
        "weights (fp32)": int(4 * weights / copies),
        "gradients (fp32)": int(gradients),
        "optimizer (two fp32 moments)": int(moments - away + min(passing, away)),
        "weights in the computing format": int(working),
    }
