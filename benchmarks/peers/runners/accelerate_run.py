"""Hugging Face Accelerate around the plain model."""

from __future__ import annotations

from benchmarks.peers.protocol import Gate, Peer, serve

PEER = Peer(
    name="accelerate",
    environment="hf",
    package="accelerate",
    settings={
        "default": "Accelerator() as in its quick start: fp32, eager, AdamW as PyTorch defaults it",
        "best": 'mixed_precision="bf16", dynamo_backend="inductor", fused AdamW',
    },
)


def run(gate: Gate) -> None:
    from accelerate import Accelerator

    from benchmarks.peers.runners.model import PlainModel, adamw, count_parameters
    from benchmarks.peers.runners.stream import batches, inputs_and_targets, prepare

    work = gate.work
    best = gate.setting == "best"
    how = {"mixed_precision": "bf16", "dynamo_backend": "inductor"} if best else {}
    accelerator = Accelerator(cpu=True, **how)
    prepare(work)
    plain = PlainModel(work)
    model, optimizer = accelerator.prepare(
        plain, adamw(plain, work, **({"fused": True} if best else {}))
    )
    gate.ready(parameters=count_parameters(plain))
    for block in batches(work):
        loss = model(*inputs_and_targets(block))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), work.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        gate.tick(loss.detach())


if __name__ == "__main__":
    serve(PEER, run)
