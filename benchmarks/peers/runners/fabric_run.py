"""Lightning Fabric around the plain model."""

from __future__ import annotations

from benchmarks.peers.protocol import Gate, Peer, serve

PEER = Peer(
    name="fabric",
    environment="lightning",
    package="lightning",
    settings={
        "default": "Fabric() as in its quick start: 32-true, eager, AdamW as PyTorch defaults it",
        "best": 'precision="bf16-mixed", torch.compile before setup, fused AdamW',
    },
)


def run(gate: Gate) -> None:
    import torch
    from lightning import Fabric

    from benchmarks.peers.runners.model import PlainModel, adamw, count_parameters
    from benchmarks.peers.runners.stream import batches, inputs_and_targets, prepare

    work = gate.work
    best = gate.setting == "best"
    fabric = Fabric(accelerator="cpu", devices=1, **({"precision": "bf16-mixed"} if best else {}))
    fabric.launch()
    prepare(work)
    plain = PlainModel(work)
    optimizer = adamw(plain, work, **({"fused": True} if best else {}))
    model, optimizer = fabric.setup(
        torch.compile(plain, dynamic=False) if best else plain, optimizer
    )
    gate.ready(parameters=count_parameters(plain))
    for block in batches(work):
        loss = model(*inputs_and_targets(block))
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=work.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        gate.tick(loss.detach())


if __name__ == "__main__":
    serve(PEER, run)
