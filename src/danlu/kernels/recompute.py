"""Selective recompute (arXiv 2205.05198): what is cheap to compute is not kept for backward.

Outputs of matrix products and of attention are kept. Outputs of norms and of SwiGLU, which the next
product would keep as its input, are computed again in backward from what is kept anyway: the
residual stream, and gate and up. The arithmetic is the same, bit for bit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from danlu.kernels.dispatch import Ops

__all__ = ["selective_ops"]


def selective_ops(ops: Ops, *, compiled: bool) -> Ops:
    """The same operations, of which those that are cheap run once more in backward.

    Args:
        ops: of one device.
        compiled: whether torch.compile sees them. Its partitioner then drops what a checkpoint
            marks, wherever it is used; it does not trace hooks on saved tensors.
    """
    if compiled:
        return replace(ops, add_norm=_marked(ops.add_norm), swiglu=_marked(ops.swiglu))
    return replace(ops, recomputed=_not_kept)


def _marked(operation: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        return checkpoint(operation, *arguments, use_reentrant=False, preserve_rng_state=False)

    return run


def _not_kept(value: Tensor, make: Callable[[], Tensor]) -> saved_tensors_hooks:
    """Inside, operations that save `value` (or a view of all of it) save `make` instead.

    `value` lives as long as the context does, so its address is its own.
    """
    place = (value.data_ptr(), value.shape, value.stride(), value.dtype)

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        same = (saved.data_ptr(), saved.shape, saved.stride(), saved.dtype) == place
        return make if same else saved

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return packed()

    return saved_tensors_hooks(pack, unpack)
