"""Output head and cross-entropy as one operation, without all logits at once.

The logits of N tokens are N x V numbers: for a large vocabulary more than the rest of the model's
activations together. Here they exist for a few hundred tokens at a time, and become their own
gradient in place; both gradients of the head are ready when the loss is (as in Liger-Kernel and
cut-cross-entropy, arXiv 2411.09009). On a CPU, pieces of fewer than 512 tokens would cost more in
re-reading the head's gradient than they save, so that is the least.
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.base.facts import LOSS_PIECE_BYTES, LOSS_PIECE_ROWS
from danlu.kernels.op import Case, Function, Op, pointer

__all__ = ["CrossEntropy", "chunked_cross_entropy"]

RowLoss = Callable[[Tensor, Tensor, float, bool], Tensor]
"""(logits, targets, scale, gradient) -> losses [n]; `gradient` turns logits into their gradient."""


class CrossEntropy(Op):
    """`(hidden [N, d], weight [V, d], targets [N], scale) -> scale * sum of losses` (nats, fp32).

    `targets` are int64; a negative one is left out. `weight` is fp32 and used in `hidden`'s format.
    """

    source = "cross_entropy.cpp"

    def reference(self, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Tensor:
        """The operation in plain PyTorch, with all logits at once."""
        logits = F.linear(hidden, weight.to(hidden.dtype))
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        kept = targets.where(targets >= 0, -100)
        return F.cross_entropy(wide, kept, reduction="sum") * scale

    def native(self, library: ctypes.CDLL) -> Function:
        """The same in pieces, the rows in C++."""

        def rows(logits: Tensor, targets: Tensor, scale: float, gradient: bool) -> Tensor:  # noqa: FBT001
            losses = torch.empty(len(targets))
            library.cross_entropy(
                pointer(logits), pointer(targets), pointer(losses), ctypes.c_int64(len(targets)),
                logits.shape[1], ctypes.c_float(scale), int(gradient),
            )  # fmt: skip
            return losses

        return chunked_cross_entropy(rows)

    def cases(self) -> Iterable[Case]:
        """Vocabularies that fill vectors and one that does not; ignored targets; two pieces."""
        for n, d, v in [(6, 32, 64), (5, 16, 100), (520, 16, 33)]:
            yield Case(f"N{n} d{d} V{v}", _arguments(n, d, v))


def torch_rows(logits: Tensor, targets: Tensor, scale: float, gradient: bool) -> Tensor:  # noqa: FBT001
    """Losses of rows of logits in PyTorch, on any device and in any format."""
    kept = targets.clamp(min=0)
    log_probability = torch.log_softmax(logits.float(), dim=-1)
    losses = -log_probability.gather(1, kept[:, None])[:, 0].where(targets >= 0, 0.0)
    if gradient:
        slope = log_probability.exp_()
        slope.scatter_add_(1, kept[:, None], slope.new_full((len(kept), 1), -1.0))
        slope *= torch.where(targets >= 0, scale, 0.0)[:, None]
        logits.copy_(slope)
    return losses


def chunked_cross_entropy(rows: RowLoss) -> Function:
    """The operation over pieces of rows, each piece's losses computed by `rows`."""

    class CrossEntropyFunction(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float
        ) -> Tensor:
            head, targets = weight.to(hidden.dtype), targets.contiguous()
            wanted = any(ctx.needs_input_grad[:2])
            row_bytes = head.shape[0] * head.element_size()
            piece = max(LOSS_PIECE_ROWS, LOSS_PIECE_BYTES[hidden.device.type] // row_bytes)
            dhidden = torch.empty_like(hidden) if wanted else None
            dweight: Tensor | None = None
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            for first in range(0, len(hidden), piece):
                part = slice(first, first + piece)
                logits = hidden[part] @ head.t()
                total = total + rows(logits, targets[part], scale, wanted).sum()
                if dhidden is not None:
                    torch.mm(logits, head, out=dhidden[part])
                    own = logits.t() @ hidden[part]
                    dweight = own.float() if dweight is None else dweight.add_(own)
            ctx.save_for_backward(dhidden, dweight)
            return total * scale

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            dhidden, dweight = ctx.saved_tensors
            factor = gradients[0]
            if factor.device.type != "cpu" or factor.item() != 1.0:
                dhidden, dweight = dhidden * factor.to(dhidden.dtype), dweight * factor
            return dhidden, dweight, None, None

    return CrossEntropyFunction.apply


def _arguments(n: int, d: int, v: int) -> Any:
    def draw(generator: torch.Generator) -> tuple[Any, ...]:
        hidden = torch.randn(n, d, generator=generator).bfloat16().requires_grad_()
        weight = (0.5 * torch.randn(v, d, generator=generator)).bfloat16().float().requires_grad_()
        targets = torch.randint(0, v, (n,), generator=generator)
        targets[n // 2] = -1
        return hidden, weight, targets, 1.0 / n

    return draw
