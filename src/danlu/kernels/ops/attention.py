"""Causal grouped-query attention with rotary positions (arXiv 2104.09864, 2305.13245)."""

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.kernels.op import Case, Function, Op, pointer

__all__ = ["Attention", "rotary_tables", "rotate"]

# Letters of shapes: B batch, T positions, H query heads, K key/value heads, D head size.


def rotary_tables(
    length: int, head_size: int, theta: float, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, D / 2] (fp32) of positions `first` and up.

    Frequencies are computed in fp64: at long positions fp32 angles would be off in the third digit.
    """
    powers = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angles = torch.outer(torch.arange(first, first + length, dtype=torch.float64), theta**-powers)
    return angles.cos().float(), angles.sin().float()


def rotate(x_bthd: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates each head by its positions' angles, pairing x[i] with x[i + D/2] as Llama does."""
    x1, x2 = x_bthd.chunk(2, dim=-1)
    c, s = cosine[None, :, None], sine[None, :, None]
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1).to(x_bthd.dtype)


class Attention(Op):
    """`(qkv [B, T, H + 2 K, D], cosine, sine, starts, heads, kv_heads) -> [B, T, H, D]`.

    Queries, keys and values lie side by side in one tensor; queries and keys are rotated inside.
    `starts` [B, T] (int32, non-decreasing along T) is the position at which each token's document
    begins: a token sees only its own document up to itself; None lets it see the whole window.
    """

    source = "attention.cpp"

    def reference(
        self,
        qkv: Tensor,
        cosine: Tensor,
        sine: Tensor,
        starts: Tensor | None,
        heads: int,
        kv_heads: int,
    ) -> Tensor:
        """The operation in plain PyTorch, on its fused attention."""
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=2)
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        mask = None if starts is None else _document_mask(starts)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=heads != kv_heads,
        )
        return out.transpose(1, 2)

    def native(self, library: ctypes.CDLL) -> Function:
        """The same in bf16, in blocks, without anything of size T x T."""
        reference = self.reference

        class AttentionFunction(torch.autograd.Function):
            @staticmethod
            def forward(
                ctx: Any,
                qkv: Tensor,
                cosine: Tensor,
                sine: Tensor,
                starts: Tensor | None,
                heads: int,
                kv_heads: int,
            ) -> Tensor:
                qkv = qkv.contiguous()
                batch, length, _, size = qkv.shape
                out = qkv.new_empty(batch, length, heads, size)
                lse = torch.empty(batch, heads, length)
                library.attention_forward(
                    pointer(qkv), pointer(cosine), pointer(sine), pointer(starts),
                    pointer(out), pointer(lse), batch, length, heads, kv_heads, size,
                )  # fmt: skip
                ctx.save_for_backward(qkv, out, lse, cosine, sine, starts)
                ctx.heads, ctx.kv_heads = heads, kv_heads
                return out

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
                qkv, out, lse, cosine, sine, starts = ctx.saved_tensors
                grad = gradients[0].contiguous()
                batch, length, _, size = qkv.shape
                dqkv = torch.empty_like(qkv)
                library.attention_backward(
                    pointer(grad), pointer(qkv), pointer(out), pointer(lse), pointer(cosine),
                    pointer(sine), pointer(starts), pointer(dqkv),
                    batch, length, ctx.heads, ctx.kv_heads, size,
                )  # fmt: skip
                return dqkv, None, None, None, None, None

        apply: Function = AttentionFunction.apply

        def attention(qkv: Tensor, *others: Any) -> Tensor:
            if qkv.shape[-1] % 16:  # a head that does not fill vectors: rare, left to PyTorch
                return reference(qkv, *others)
            out: Tensor = apply(qkv, *others)
            return out

        return attention

    def cases(self) -> Iterable[Case]:
        """Lengths around the block of 64, head sizes, grouped heads, documents."""
        shapes = [
            (2, 1, 2, 1, 64, False), (1, 64, 2, 2, 32, False), (2, 65, 4, 2, 64, True),
            (1, 130, 2, 2, 48, True), (1, 200, 4, 1, 16, True), (1, 193, 2, 2, 128, False),
        ]  # fmt: skip
        for b, t, h, k, d, documents in shapes:
            name = f"B{b} T{t} H{h} K{k} D{d} documents={documents}"
            yield Case(name, _arguments(b, t, h, k, d, documents=documents))


def _document_mask(starts: Tensor) -> Tensor:
    """[B, 1, T, T] booleans: query q sees key k where starts[q] <= k <= q."""
    position = torch.arange(starts.shape[1], device=starts.device)
    causal = position[None, :] <= position[:, None]
    return (causal & (position[None, None, :] >= starts[:, :, None]))[:, None]


def _arguments(b: int, t: int, h: int, k: int, d: int, *, documents: bool) -> Any:
    def draw(generator: torch.Generator) -> tuple[Any, ...]:
        qkv = torch.randn(b, t, h + 2 * k, d, generator=generator).bfloat16().requires_grad_()
        cosine, sine = rotary_tables(t, d, 10000.0)
        starts = None
        if documents:
            first = torch.rand(b, t, generator=generator) < 4 / t
            position = torch.arange(t, dtype=torch.int32).expand(b, t)
            starts = torch.where(first, position, 0).cummax(1).values.to(torch.int32)
        return qkv, cosine, sine, starts, h, k

    return draw
