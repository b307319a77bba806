"""Does speed cost learning? danlu as it trains by default against a plain fp32 loop, in pairs.

Both start with the same weights and read the same samples in the same order; the plain loop is
written out below in ordinary PyTorch (fp32, eager, no danlu operation), so that nothing that danlu
could get wrong is shared. Compared is the loss on held-out text at the end, for several seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

import danlu
from benchmarks.results import origin, table, write
from danlu.data.loader import Batch, evaluation_windows
from danlu.hardware.comm import Comm
from danlu.train.build import build, build_loader
from danlu.train.loop import clip, forward_backward, update

Weights = dict[str, Tensor]


def plain_loss(w: Weights, shape: Any, batch: Batch) -> Tensor:
    """Mean loss of a Llama-style decoder, from named fp32 weights."""
    b, t = batch.ids_bt.shape
    size = shape.head_size
    angle = torch.outer(torch.arange(t), shape.rope_theta ** (-torch.arange(0, size, 2) / size))
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), w[name], shape.norm_epsilon)

    def rotate(x: Tensor) -> Tensor:
        half = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
        return x * cos + half * sin

    x = F.embedding(batch.ids_bt, w["embed_tokens.weight"])
    for i in range(shape.layers):
        p = f"layers.{i}"
        h = norm(x, f"{p}.input_layernorm.weight")
        q, k, v = (
            F.linear(h, w[f"{p}.self_attn.{n}_proj.weight"]).view(b, t, -1, size).transpose(1, 2)
            for n in "qkv"
        )
        out = F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads
        )
        out = out.transpose(1, 2).reshape(b, t, -1)
        x = x + F.linear(out, w[f"{p}.self_attn.o_proj.weight"])
        h = norm(x, f"{p}.post_attention_layernorm.weight")
        gate = F.silu(F.linear(h, w[f"{p}.mlp.gate_proj.weight"]))
        up = F.linear(h, w[f"{p}.mlp.up_proj.weight"])
        x = x + F.linear(gate * up, w[f"{p}.mlp.down_proj.weight"])
    logits = F.linear(norm(x, "norm.weight"), w["lm_head.weight"])
    return F.cross_entropy(logits.flatten(0, 1), batch.targets_bt.flatten())


def train_plain(config: Any, plan: Any, corpus: Any, weights: Weights) -> float:
    """The plain loop; returns the held-out loss."""
    parameters = {name: w.clone().requires_grad_() for name, w in weights.items()}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    # Only for its schedule and its ranks.
    learner = build(config, plan, Comm(), scratch=Path("build"), note=print)
    loader = build_loader(config, plan, corpus, learner.ranks)
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * learner.schedule.factor(step)
        batches = loader.next_step()
        for batch in batches:
            (plain_loss(parameters, plan.model, batch) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    loader.close()
    return held_out(parameters, plan, corpus)


def train_danlu(config: Any, plan: Any, corpus: Any) -> tuple[float, Weights]:
    """Danlu's own step; returns the held-out loss and the weights that it began with."""
    learner = build(config, plan, Comm(), scratch=Path("build"), note=print)
    first = {name: w.detach().clone() for name, w in learner.model.named_parameters()}
    loader = build_loader(config, plan, corpus, learner.ranks)
    for step in range(plan.steps):
        forward_backward(learner, loader.next_step())
        clip(learner)
        update(learner, plan.learning_rate * learner.schedule.factor(step))
    loader.close()
    last = {name: w.detach() for name, w in learner.model.named_parameters()}
    return held_out(last, plan, corpus), first


@torch.no_grad()
def held_out(weights: Weights, plan: Any, corpus: Any) -> float:
    """The loss on held-out text in fp32, by the plain code for both."""
    batches = evaluation_windows(
        corpus.stream("validation"),
        sequence_length=plan.model.sequence_length,
        micro_batch=8,
        tokens=100_000,
    )
    total = sum(float(plain_loss(weights, plan.model, b)) * b.tokens for b in batches)
    return total / sum(b.tokens for b in batches)


def main() -> None:
    """Runs the pairs and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    rows, differences = [], []
    for seed in track(range(options.seeds), description="pairs"):
        with tempfile.TemporaryDirectory() as scratch:
            config = danlu.load(
                None, "model.preset=tiny", "model.hidden_size=128", "model.heads=4",
                "model.tied_embeddings=false", "model.intermediate_size=352",
                "data_pipeline.tokenizer.vocab_size=2048", "train.batch_tokens=2048",
                f"train.steps={options.steps}", f"train.seed={seed}", "train.device=cpu",
                f"folder={Path(scratch) / 'run'}", "optimizer.learning_rate=0.003",
            )  # fmt: skip
            plan, corpus = danlu.plan(config), danlu.prepare(config.data_pipeline)
            fast, weights = train_danlu(config, plan, corpus)
            plain = train_plain(config, plan, corpus, weights)
        differences.append(fast - plain)
        rows.append([str(seed), f"{plain:.4f}", f"{fast:.4f}", f"{fast - plain:+.4f}"])
    figures = {
        "difference": differences,
        "mean": statistics.mean(differences),
        "format": plan.format,
        "backend": plan.backend,
        "steps": options.steps,
    }
    page = [
        "# Quality: danlu's default against a plain fp32 loop",
        "",
        *origin("quality", f"{options.seeds} paired seeds"),
        "",
        f"{plan.parameters / 1e6:.2f} M parameters, {options.steps} steps of {plan.batch_tokens}"
        f" tokens of Python sources; danlu in {plan.format} with {plan.backend} kernels. Same first"
        " weights, same samples, same order. Held-out loss in nats a token, in fp32 for both.",
        "",
        *table(["seed", "plain fp32", "danlu", "difference"], rows),
        "",
        f"Mean difference {figures['mean']:+.4f} nats.",
    ]
    write("quality", figures, page)


if __name__ == "__main__":
    main()
