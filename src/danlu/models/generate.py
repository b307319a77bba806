"""Text from a trained model, one token after another, with a key/value cache."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.base.facts import ModelShape
from danlu.kernels.ops.attention import rotary_tables, rotate
from danlu.models.transformer import Positions, Transformer

__all__ = ["KVCache", "Sampling", "generate"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; 0 (less than 1e-5) always takes the likeliest token.
        top_k: only the k likeliest tokens; 0 means all.
        top_p: only the likeliest tokens that together reach this probability; at least one.
        seed: of the draw.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.95
    seed: int = 0


class KVCache:
    """Keys and values of all earlier positions: [layers, B, T, kv_heads, D] each."""

    def __init__(self, shape: ModelShape, batch: int, capacity: int, like: Tensor) -> None:
        size = (shape.layers, batch, capacity, shape.kv_heads, shape.head_size)
        self.keys = torch.zeros(size, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.length = 0

    def attend(self, layer: int, qkv_bthd: Tensor, positions: Positions) -> Tensor:
        """Stores the new positions' keys and values and attends over all so far."""
        q, k, v = torch.split(qkv_bthd, [self.heads, self.kv_heads, self.kv_heads], dim=2)
        q = rotate(q, positions.cosine, positions.sine)
        end = self.length + q.shape[1]
        self.keys[layer, :, self.length : end] = rotate(k, positions.cosine, positions.sine)
        self.values[layer, :, self.length : end] = v
        seen = torch.arange(end, device=q.device)
        mask = seen[None, :] <= seen[self.length : end, None]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            self.keys[layer, :, :end].transpose(1, 2),
            self.values[layer, :, :end].transpose(1, 2),
            attn_mask=mask,
            enable_gqa=self.heads != self.kv_heads,
        )
        return out.transpose(1, 2)


@torch.no_grad()
def generate(
    model: Transformer, prompt_ids: list[int], tokens: int, end: int, sampling: Sampling
) -> Iterator[int]:
    """Yields up to `tokens` new token ids after `prompt_ids`; stops at the end-of-document token.

    The window is the model's sequence length: when it is full, the older half is forgotten and the
    rest is read again.
    """
    shape, device = model.shape, model.device
    draw = torch.Generator(device="cpu").manual_seed(sampling.seed)
    window = list(prompt_ids)[-(shape.sequence_length - 1) :] or [end]
    cache, fresh = _new_cache(model), window
    for _ in range(tokens):
        if cache.length + len(fresh) > shape.sequence_length:
            window = window[-(shape.sequence_length // 2) :]
            cache, fresh = _new_cache(model), window
        ids = torch.tensor([fresh], device=device)
        tables = rotary_tables(len(fresh), shape.head_size, shape.rope_theta, cache.length)
        positions = Positions(1, tables[0].to(device), tables[1].to(device))
        logits = model.next_logits(ids, positions, cache).cpu()
        cache.length += len(fresh)
        token = _choose(logits, sampling, draw)
        if token == end:
            return
        yield token
        window.append(token)
        fresh = [token]


def _new_cache(model: Transformer) -> KVCache:
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    return KVCache(model.shape, 1, model.shape.sequence_length, like)


def _choose(logits: Tensor, sampling: Sampling, draw: torch.Generator) -> int:
    if sampling.temperature < 1e-5:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    ordered, order = logits.softmax(-1).sort(descending=True)
    kept = ordered * ((ordered.cumsum(0) - ordered) < sampling.top_p)
    kept[0] = ordered[0]
    return int(order[torch.multinomial(kept, 1, generator=draw)])
