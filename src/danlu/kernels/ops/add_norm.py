"""Residual addition followed by RMSNorm (arXiv 1910.07467), as one operation."""

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from danlu.kernels.op import Case, Function, Op, pointer

__all__ = ["AddNorm"]


class AddNorm(Op):
    """`(x, branch, weight, epsilon) -> (sum, normed)`.

    `sum = x + branch` and `normed = sum / rms(sum) * weight`, over the last axis of [N, width]
    rows. `branch` may be None (the first norm of a model); `weight` is fp32.
    """

    source = "add_norm.cpp"

    def reference(
        self, x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """The operation in plain PyTorch; statistics in fp32 or wider."""
        total = x if branch is None else x + branch
        wide = total.double() if total.dtype == torch.float64 else total.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return total, (wide * inverse * weight).to(x.dtype)

    def native(self, library: ctypes.CDLL) -> Function:
        """The same on bf16 rows, one pass over memory each way."""

        class AddNormFunction(torch.autograd.Function):
            @staticmethod
            def forward(
                ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float
            ) -> tuple[Tensor, Tensor]:
                x = x.contiguous()
                branch = None if branch is None else branch.contiguous()
                rows, width = x.shape
                total = x if branch is None else torch.empty_like(x)
                normed, inverse = torch.empty_like(x), torch.empty(rows)
                library.add_norm_forward(
                    pointer(x), pointer(branch), pointer(weight), pointer(total), pointer(normed),
                    pointer(inverse), ctypes.c_int64(rows), width, ctypes.c_float(epsilon),
                )  # fmt: skip
                ctx.save_for_backward(total, weight, inverse)
                ctx.has_branch = branch is not None
                ctx.set_materialize_grads(False)
                # Without a branch the sum is x itself, which a Function must not return as it is.
                return (total if branch is not None else x.view_as(x)), normed

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
                grad_total, grad_normed = gradients
                total, weight, inverse = ctx.saved_tensors
                if grad_normed is None:
                    return grad_total, grad_total if ctx.has_branch else None, None, None
                grad_normed = grad_normed.contiguous()
                grad_total = None if grad_total is None else grad_total.contiguous()
                rows, width = total.shape
                dx = torch.empty_like(total)
                partial = torch.zeros(torch.get_num_threads(), width)
                library.add_norm_backward(
                    pointer(grad_normed), pointer(grad_total), pointer(total), pointer(weight),
                    pointer(inverse), pointer(dx), pointer(partial), ctypes.c_int64(rows), width,
                )  # fmt: skip
                return dx, dx if ctx.has_branch else None, partial.sum(0), None

        return AddNormFunction.apply

    def cases(self) -> Iterable[Case]:
        """Widths that fill vectors and ones that do not; with and without a branch."""
        for rows, width, branch in [(5, 64, True), (3, 16, False), (7, 40, True), (33, 512, True)]:
            yield Case(f"[{rows}, {width}] branch={branch}", _arguments(rows, width, branch=branch))


def _arguments(rows: int, width: int, *, branch: bool) -> Any:
    def draw(generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(rows, width, generator=generator).bfloat16()
        y = torch.randn(rows, width, generator=generator).bfloat16() if branch else None
        weight = 1 + 0.1 * torch.randn(width, generator=generator)
        for tensor in (x, y, weight):
            if tensor is not None:
                tensor.requires_grad_()
        return x, y, weight, 1e-5

    return draw
