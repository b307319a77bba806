"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Single-device code. How its weights split over devices is data, `PLACEMENTS`, that `parallel` reads.
Parameter names are Hugging Face's Llama names without their leading `model.`.

Rows are flat, [N, width] with N = batch x positions: only attention looks at positions. A block
hands on the residual stream and its last branch unadded, because the addition belongs to the next
norm (one pass over memory instead of two).
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from danlu.base.facts import ModelShape
from danlu.kernels.dispatch import Ops
from danlu.kernels.ops.attention import rotary_tables

__all__ = ["DIVIDED", "PLACEMENTS", "AttentionCache", "Positions", "Segment", "Transformer"]

PLACEMENTS: Mapping[str, str] = MappingProxyType(
    {
        "embed_tokens": "vocabulary",
        "self_attn.q_proj": "column",
        "self_attn.k_proj": "column",
        "self_attn.v_proj": "column",
        "self_attn.o_proj": "row",
        "mlp.gate_proj": "column",
        "mlp.up_proj": "column",
        "mlp.down_proj": "row",
        "lm_head": "vocabulary",
    }
)
"""How a weight splits over tensor-parallel ranks: by its output rows, its input columns, or the
vocabulary. What is not named (norms) is whole everywhere."""
DIVIDED: Mapping[str, tuple[str, ...]] = MappingProxyType({"self_attn": ("heads", "kv_heads")})
"""Numbers of a module of which each rank has its share, where the module's weights are split."""


class Positions(NamedTuple):
    """Where the rows of a batch stand.

    Attributes:
        batch: sequences in the batch.
        cosine, sine: rotary tables [T, D / 2] of the batch's positions.
        starts: [B, T] int32, where each token's document begins; None: one document.
    """

    batch: int
    cosine: Tensor
    sine: Tensor
    starts: Tensor | None = None


class AttentionCache(Protocol):
    """Keys and values of earlier positions, for generation."""

    def attend(self, layer: int, qkv_bthd: Tensor, positions: Positions) -> Tensor:
        """Attention of the new positions [B, t, H, D] over the earlier ones and themselves."""


class RMSNorm(nn.Module):
    """The scale of a norm; the computation is `Ops.add_norm`."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon


class Matrix(nn.Module):
    """A weight [rows, columns] in fp32, without values until `Transformer.initialize`."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, shape: ModelShape, ops: Ops, index: int) -> None:
        super().__init__()
        self.ops, self.index = ops, index
        self.heads, self.kv_heads, self.head_size = shape.heads, shape.kv_heads, shape.head_size
        query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.q_proj = Matrix(query, shape.hidden_size)
        self.k_proj = Matrix(key, shape.hidden_size)
        self.v_proj = Matrix(key, shape.hidden_size)
        self.o_proj = Matrix(shape.hidden_size, query)

    def forward(self, x_nd: Tensor, positions: Positions, cache: AttentionCache | None) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        projections = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        qkv = self.ops.linear(x_nd, *projections)
        qkv_bthd = qkv.view(positions.batch, -1, self.heads + 2 * self.kv_heads, self.head_size)
        if cache is None:
            out = self.ops.attention(
                qkv_bthd,
                positions.cosine,
                positions.sine,
                positions.starts,
                self.heads,
                self.kv_heads,
            )
        else:
            out = cache.attend(self.index, qkv_bthd, positions)
        return self.ops.linear(out.reshape(len(x_nd), -1), self.o_proj.weight)


class FeedForward(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: ModelShape, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.gate_proj = Matrix(shape.intermediate_size, shape.hidden_size)
        self.up_proj = Matrix(shape.intermediate_size, shape.hidden_size)
        self.down_proj = Matrix(shape.hidden_size, shape.intermediate_size)

    def forward(self, x_nd: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        gate_up = self.ops.linear(x_nd, self.gate_proj.weight, self.up_proj.weight)
        out = self.ops.swiglu(gate_up)
        with self.ops.recomputed(out, partial(self.ops.swiglu, gate_up)):
            return self.ops.linear(out, self.down_proj.weight)


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm."""

    def __init__(self, shape: ModelShape, ops: Ops, index: int) -> None:
        super().__init__()
        self.ops = ops
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.self_attn = Attention(shape, ops, index)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.mlp = FeedForward(shape, ops)

    def forward(
        self,
        x_nd: Tensor,
        branch_nd: Tensor | None,
        positions: Positions,
        cache: AttentionCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Residual stream and the branch to add to it, before -> after the layer."""
        norm = self.input_layernorm
        x_nd, normed = self.ops.add_norm(x_nd, branch_nd, norm.weight, norm.epsilon)
        with self.ops.recomputed(normed, partial(self._normed, norm, x_nd)):
            branch_nd = self.self_attn(normed, positions, cache)
        norm = self.post_attention_layernorm
        x_nd, normed = self.ops.add_norm(x_nd, branch_nd, norm.weight, norm.epsilon)
        with self.ops.recomputed(normed, partial(self._normed, norm, x_nd)):
            return x_nd, self.mlp(normed)

    def _normed(self, norm: RMSNorm, x_nd: Tensor) -> Tensor:
        return self.ops.add_norm(x_nd, None, norm.weight, norm.epsilon)[1]


def _again(
    block: nn.Module, x_nd: Tensor, branch_nd: Tensor | None, positions: Positions
) -> tuple[Tensor, Tensor]:
    """A layer whose activations are not kept (arXiv 1604.06174)."""
    out: tuple[Tensor, Tensor] = checkpoint(
        block, x_nd, branch_nd, positions, use_reentrant=False, preserve_rng_state=False
    )
    return out


class Segment(nn.Module):
    """Consecutive layers with what stands at their ends: a pipeline stage, or the whole model.

    Attributes:
        shape, ops, dtype: as for `Transformer`.
        cosine, sine: rotary tables [T, D / 2] of all positions.
        embed_tokens: the token embedding, where the first layer is in it; else None.
        layers: the layers by their number in the whole model, as text.
        recompute: whether layers keep their inputs only and are computed again in backward, whole.
        norm, lm_head: the last norm and the head, where the last layer is in it; else None.
    """

    def __init__(
        self, shape: ModelShape, ops: Ops, dtype: torch.dtype, rotary: tuple[Tensor, Tensor]
    ) -> None:
        super().__init__()
        self.shape, self.ops, self.dtype = shape, ops, dtype
        self.cosine: Tensor
        self.sine: Tensor
        self.register_buffer("cosine", rotary[0], persistent=False)
        self.register_buffer("sine", rotary[1], persistent=False)
        self.recompute = False
        self.embed_tokens: Matrix | None = None
        self.layers = nn.ModuleDict()
        self.norm: RMSNorm | None = None
        self.lm_head: Matrix | None = None

    def forward(
        self, stream: Tensor, targets_bt: Tensor, starts_bt: Tensor | None, scale: float
    ) -> Tensor:
        """The loss of a batch: `scale` times the sum over its targets, in nats (fp32).

        Args:
            stream: token ids [B, T], or the residual stream [N, hidden] that the segment before
                has returned.
            targets_bt: the token after each, int64; a negative one is left out.
            starts_bt: where each token's document begins, or None.
            scale: factor on the sum.

        Returns:
            The loss, or the residual stream [N, hidden] where other layers follow.
        """
        batch, length = targets_bt.shape
        positions = Positions(batch, self.cosine[:length], self.sine[:length], starts_bt)
        states = self.hidden(stream, positions)
        if self.lm_head is None:
            return states
        return self.ops.cross_entropy(states, self.lm_head.weight, targets_bt.reshape(-1), scale)

    def hidden(
        self, stream: Tensor, positions: Positions, cache: AttentionCache | None = None
    ) -> Tensor:
        """Ids [B, T] or residual stream -> final normed states, or the residual stream after."""
        x_nd, branch_nd = stream, None
        if self.embed_tokens is not None:
            x_nd = self.ops.embedding(stream.reshape(-1), self.embed_tokens.weight).to(self.dtype)
        for block in self.layers.values():
            if self.recompute and torch.is_grad_enabled():
                x_nd, branch_nd = _again(block, x_nd, branch_nd, positions)
            else:
                x_nd, branch_nd = block(x_nd, branch_nd, positions, cache)
        if self.norm is None:
            return x_nd if branch_nd is None else x_nd + branch_nd
        _, normed = self.ops.add_norm(x_nd, branch_nd, self.norm.weight, self.norm.epsilon)
        return normed


class Transformer(Segment):
    """The model, or the part of it that one rank holds, in one number format with fp32 weights.

    Weights have no values before `initialize`.

    Args:
        shape: the whole model's numbers.
        ops: the operations it is made of.
        dtype: format of activations and matrix products.
        part: numbers of the layers it holds; None: all of them. The embedding comes with the first
            layer, the head with the last; where they are one matrix, with either.
    """

    def __init__(
        self,
        shape: ModelShape,
        ops: Ops,
        dtype: torch.dtype,
        part: Iterable[int] | None = None,
    ) -> None:
        rotary = rotary_tables(shape.sequence_length, shape.head_size, shape.rope_theta)
        super().__init__(shape, ops, dtype, rotary)
        numbers = list(range(shape.layers) if part is None else part)
        last = shape.layers - 1 in numbers
        if 0 in numbers or (last and shape.tied_embeddings):
            self.embed_tokens = Matrix(shape.vocab_size, shape.hidden_size)
        for index in numbers:
            self.layers[str(index)] = Block(shape, ops, index)
        if last:
            self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
            self.lm_head = Matrix(shape.vocab_size, shape.hidden_size)
        if shape.tied_embeddings and self.embed_tokens and self.lm_head:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.cosine.device

    def segment(self, numbers: Iterable[int]) -> Segment:
        """Some of the held layers as a pipeline stage; it shares their weights."""
        part = Segment(self.shape, self.ops, self.dtype, (self.cosine, self.sine))
        part.recompute = self.recompute
        for index in numbers:
            part.layers[str(index)] = self.layers[str(index)]
        if "0" in part.layers:
            part.embed_tokens = self.embed_tokens
        if str(self.shape.layers - 1) in part.layers:
            part.norm, part.lm_head = self.norm, self.lm_head
        return part

    def next_logits(self, ids_bt: Tensor, positions: Positions, cache: AttentionCache) -> Tensor:
        """Logits [V], in fp32, of the token that follows the last of `ids_bt` ([1, T])."""
        assert self.lm_head is not None, "a part of a model"
        last = self.hidden(ids_bt, positions, cache)[-1:]
        return F.linear(last, self.lm_head.weight.to(last.dtype))[0].float()

    def for_inference(self) -> "Transformer":
        """The model with its matrices kept in the computing format, for use without training."""
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() > 1:
                parameter.data = parameter.data.to(self.dtype)
        return self.eval()

    @torch.no_grad()
    def initialize(self, draw: Callable[[str, Tensor, float], None]) -> None:
        """Fills the weights through `draw(name, weight, deviation)`.

        Each is drawn by its name, so that a layout never changes its numbers.

        Normal with standard deviation 0.02, the projections back into the residual stream smaller
        by sqrt(2 x layers) (GPT-2's rule); norms are 1.
        """
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
                continue
            back = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = 0.02 / (2 * self.shape.layers) ** 0.5 if back else 0.02
            draw(name, weight, deviation)
