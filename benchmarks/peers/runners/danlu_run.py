"""danlu as it trains by default: the step of its own loop, on a plan it makes itself."""

from __future__ import annotations

from benchmarks.peers.protocol import Gate, Peer, serve

PEER = Peer(
    name="danlu",
    environment=None,
    package="danlu",
    settings={"best": "its defaults: format, kernels and allocator as planned for this machine"},
)


def run(gate: Gate) -> None:
    from pathlib import Path

    import torch

    import danlu
    from benchmarks.peers.runners.stream import batches, inputs_and_targets
    from danlu.data.loader import Batch
    from danlu.hardware.comm import Comm
    from danlu.hardware.device import probe
    from danlu.train.build import build
    from danlu.train.loop import clip, forward_backward, update

    work = gate.work
    probe("cpu")
    config = danlu.load(
        {
            "model": {
                "vocab_size": work.vocab,
                "hidden_size": work.dim,
                "layers": work.layers,
                "heads": work.heads,
                "intermediate_size": work.ffn,
                "sequence_length": work.sequence,
            },
            "data_pipeline": {"tokenizer": {"vocab_size": work.vocab}},
            "train": {
                "steps": 1000,
                "batch_tokens": work.tokens_per_step,
                "seed": work.weight_seed,
                "device": "cpu",
            },
            "optimizer": {
                "learning_rate": work.learning_rate,
                "beta1": work.beta1,
                "beta2": work.beta2,
                "weight_decay": work.weight_decay,
                "gradient_clip": work.clip_norm,
            },
            "launch": {"threads": work.threads},
        }
    )
    learner = build(config, danlu.plan(config), Comm(), scratch=Path("build"), note=print)
    size = learner.plan.micro_batch
    gate.ready(parameters=sum(p.numel() for p in learner.model.parameters()))
    for block in batches(work):
        ids, targets = inputs_and_targets(block)
        pieces = zip(torch.split(ids, size), torch.split(targets, size), strict=True)
        loss = forward_backward(learner, [Batch(i, t, None) for i, t in pieces])
        clip(learner)
        update(learner, work.learning_rate)
        gate.tick(loss)


if __name__ == "__main__":
    serve(PEER, run)
