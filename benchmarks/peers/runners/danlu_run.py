"""A plain PyTorch loop: the line every tool has to beat."""

from __future__ import annotations

from benchmarks.peers.protocol import Gate, Peer, serve

PEER = Peer(
    name="danlu",
    environment=None,
    package="rich",
    settings={
        "best": "fake",
    },
)


def run(gate: Gate) -> None:
    import torch

    from benchmarks.peers.runners.model import PlainModel, adamw, count_parameters
    from benchmarks.peers.runners.stream import batches, inputs_and_targets, prepare

    work = gate.work
    best = True
    prepare(work)
    model = PlainModel(work)
    forward = torch.compile(model, dynamic=False) if best else model
    optimizer = adamw(model, work, fused=True)
    gate.ready(parameters=count_parameters(model))
    for block in batches(work):
        with torch.autocast("cpu", torch.bfloat16, enabled=best):
            loss = forward(*inputs_and_targets(block))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        gate.tick(loss.detach())


if __name__ == "__main__":
    serve(PEER, run)
