"""The plain PyTorch model, for the tools that bring a loop but no model of their own.

Letters: b batch, t position, d model width, h head, v vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers.workload import Workload


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, with a weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        """Normalise (b, t, d)."""
        return F.rms_norm(x_btd, (x_btd.size(-1),), self.weight.to(x_btd.dtype), 1e-6)


def rotary_table(length: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary angles, each (length, head_dim)."""
    inverse = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(length).float(), inverse)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.size(-1) // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Block(nn.Module):
    """One decoder layer: attention, then SwiGLU, each normed before and added after."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        dim = work.dim
        self.heads = work.heads
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * work.ffn, bias=False)
        self.down = nn.Linear(work.ffn, dim, bias=False)

    def forward(self, x_btd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Map (b, t, d) to (b, t, d)."""
        b, t, d = x_btd.shape
        qkv = self.qkv(self.attention_norm(x_btd)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        x_btd = x_btd + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(self.ffn_norm(x_btd)).chunk(2, -1)
        return x_btd + self.down(F.silu(gate) * up)


class PlainModel(nn.Module):
    """Token ids and targets (b, t) in, mean cross-entropy in fp32 out."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.embed = nn.Embedding(work.vocab, work.dim)
        self.blocks = nn.ModuleList(Block(work) for _ in range(work.layers))
        self.norm = RMSNorm(work.dim)
        self.head = nn.Linear(work.dim, work.vocab, bias=False)
        cos, sin = rotary_table(work.sequence, work.dim // work.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids_bt: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next token, a 0-d fp32 tensor."""
        x_btd = self.embed(ids_bt)
        for block in self.blocks:
            x_btd = block(x_btd, self.cos, self.sin)
        logits_btv = self.head(self.norm(x_btd)).float()
        return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


def count_parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def adamw(model: nn.Module, work: Workload, **how: bool) -> torch.optim.AdamW:
    """PyTorch's AdamW on all weights; ``how`` picks the implementation (``fused=True``)."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=work.learning_rate,
        betas=(work.beta1, work.beta2),
        weight_decay=work.weight_decay,
        **how,
    )
