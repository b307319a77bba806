"""SwiGLU (arXiv 2002.05202): the gated activation of the feed-forward layer."""

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.kernels.op import Case, Function, Op, pointer

__all__ = ["SwiGLU"]


class SwiGLU(Op):
    """`gate_up [N, 2 * width] -> silu(gate) * up [N, width]`, gate and up side by side."""

    source = "swiglu.cpp"

    def reference(self, gate_up: Tensor) -> Tensor:
        """The operation in plain PyTorch."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def native(self, library: ctypes.CDLL) -> Function:
        """The same on bf16 rows, one pass over memory each way."""

        class SwiGLUFunction(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, gate_up: Tensor) -> Tensor:
                gate_up = gate_up.contiguous()
                rows, width = gate_up.shape[0], gate_up.shape[1] // 2
                out = gate_up.new_empty(rows, width)
                library.swiglu_forward(pointer(gate_up), pointer(out), ctypes.c_int64(rows), width)
                ctx.save_for_backward(gate_up)
                return out

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                (gate_up,) = ctx.saved_tensors
                grad = gradients[0].contiguous()
                out = torch.empty_like(gate_up)
                library.swiglu_backward(
                    pointer(grad), pointer(gate_up), pointer(out),
                    ctypes.c_int64(grad.shape[0]), grad.shape[1],
                )  # fmt: skip
                return out

        return SwiGLUFunction.apply

    def cases(self) -> Iterable[Case]:
        """Widths that fill vectors and ones that do not."""
        for rows, width in [(4, 64), (3, 24), (9, 704)]:
            yield Case(f"[{rows}, 2 x {width}]", _arguments(rows, width))


def _arguments(rows: int, width: int) -> Any:
    def draw(generator: torch.Generator) -> tuple[Any, ...]:
        x = 3 * torch.randn(rows, 2 * width, generator=generator)
        return (x.bfloat16().requires_grad_(),)

    return draw
