"""Bytes a rank needs, by what they are for."""

from collections.abc import Sequence

from danlu.base.facts import LOSS_PIECE_BYTES, LOSS_PIECE_ROWS, LayerCost, ModelShape
from danlu.planner.cost import FORMAT_BYTES

__all__ = ["memory_bytes"]

_PROCESS_BYTES = {"cpu": 420 * 2**20, "cuda": 700 * 2**20}
"""Python with PyTorch and its libraries (CPU: resident; GPU: context and libraries on the
device)."""


def memory_bytes(
    layers: Sequence[LayerCost],
    shape: ModelShape,
    *,
    kind: str,
    number_format: str,
    micro_tokens: int,
    backend: str,
) -> dict[str, int]:
    """Predicted peak bytes of a rank by part; their sum is the peak.

    Args:
        layers: costs per token, in order.
        shape: the model.
        kind: of device, `cpu` or `cuda`.
        number_format: of products and activations.
        micro_tokens: tokens a rank computes at once.
        backend: PyTorch's operations keep more for backward than the native ones.
    """
    width = FORMAT_BYTES[number_format]
    parameters = sum(layer.parameters for layer in layers)
    kept = 1.0 if backend == "native" else 1.9
    activations = micro_tokens * sum(c.saved_elements for c in layers) * width * kept
    piece = max(LOSS_PIECE_ROWS, LOSS_PIECE_BYTES[kind] // (shape.vocab_size * width))
    rows = min(micro_tokens, piece)
    head = rows * shape.vocab_size * width * 2 + 6 * shape.vocab_size * shape.hidden_size
    return {
        "weights (fp32)": 4 * parameters,
        "gradients (fp32)": 4 * parameters,
        "optimizer (two fp32 moments)": 8 * parameters,
        "weights in the computing format": 0 if width == 4 else width * parameters,
        "activations": int(activations),
        "logits and the head's gradient": head,
        "process": _PROCESS_BYTES[kind],
    }
