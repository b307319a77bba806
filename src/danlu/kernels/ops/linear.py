"""Products with weights: several projections of the same input as one."""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.base.facts import DeviceFacts
from danlu.kernels.op import Case, Function, Op, pointer

__all__ = ["Linear", "WeightGradient", "direct", "transposed_first"]

WeightGradient = Callable[[Tensor, Tensor], Tensor]
"""(gradient [N, m], input [N, k]) -> gradient of the weight [m, k]."""


class Linear(Op):
    """`(x [N, k], weights [m_i, k]) -> [N, sum of m_i]`.

    The fp32 weights are brought into x's format and laid side by side, so that projections that
    read the same input are one product; their gradients come back in fp32.

    The native variant is for processors with AMX: there, the gradient of a weight (both operands
    transposed in memory) runs at half the speed of the other products, and turning one operand
    over first costs less than that. Elsewhere PyTorch's product is as fast as the peak already.
    """

    source = "linear.cpp"

    def wanted(self, device: DeviceFacts) -> bool:
        """Where matrix products are so fast that their layout counts."""
        return "amx_bf16" in device.features

    def reference(self, x: Tensor, *weights: Tensor) -> Tensor:
        """The operation in plain PyTorch."""
        return F.linear(x, side_by_side(x.dtype, weights))

    def native(self, library: ctypes.CDLL) -> Function:
        """The same with its weight gradient from a transposed copy."""
        weight_gradient = transposed_first(library)

        class LinearFunction(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
                weight = side_by_side(x.dtype, weights)
                ctx.save_for_backward(x, weight)
                ctx.rows = [len(w) for w in weights]
                return x @ weight.t()

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
                x, weight = ctx.saved_tensors
                grad = gradients[0].contiguous()
                own = weight_gradient(grad, x).float()
                return grad @ weight, *torch.split(own, ctx.rows)

        return LinearFunction.apply

    def cases(self) -> Iterable[Case]:
        """One weight and several; sizes that fill vectors and ones that do not."""
        for n, k, rows in [(64, 32, (48,)), (33, 20, (8, 5)), (70, 64, (32, 16, 16))]:
            yield Case(f"N{n} k{k} rows {rows}", _arguments(n, k, rows))


def side_by_side(dtype: torch.dtype, weights: Iterable[Tensor]) -> Tensor:
    """Weights [m_i, k] as one [sum of m_i, k] in `dtype`."""
    parts = [w.to(dtype) for w in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def direct(grad: Tensor, x: Tensor) -> Tensor:
    """The weight's gradient as one product, on any device."""
    return grad.t() @ x


def transposed_first(library: ctypes.CDLL) -> WeightGradient:
    """The weight's gradient in bf16 with the gradient turned over first."""

    def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
        rows, columns = grad.shape
        turned = grad.new_empty(columns, rows)
        library.transpose_bf16(
            pointer(grad), pointer(turned), ctypes.c_int64(rows), ctypes.c_int64(columns)
        )
        return turned @ x

    return weight_gradient


def _arguments(n: int, k: int, rows: tuple[int, ...]) -> Any:
    def draw(generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(n, k, generator=generator).bfloat16().requires_grad_()
        weights = [torch.randn(m, k, generator=generator).requires_grad_() for m in rows]
        return x, *weights

    return draw
