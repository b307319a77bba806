"""DeepSpeed's engine around the plain model: one rank that uses all threads."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.peers.protocol import Gate, Peer, serve

PEER = Peer(
    name="deepspeed",
    environment="deepspeed",
    package="deepspeed",
    settings={
        "default": "ZeRO 0, fp32, eager, its own FusedAdam",
        "best": "ZeRO 0, bf16 engine (fp32 master weights), engine.compile(), its own FusedAdam",
    },
    notes="ZeRO 0 was the fastest of 0 to 3 with one rank; ready only after building its operators",
)


def run(gate: Gate) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    from benchmarks.peers.runners.model import PlainModel, count_parameters
    from benchmarks.peers.runners.stream import (
        batches,
        inputs_and_targets,
        prepare,
        single_rank,
    )

    work = gate.work
    single_rank()
    deepspeed.init_distributed("gloo")
    prepare(work)
    model = PlainModel(work)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=engine_config(gate)
    )
    if gate.setting == "best":
        engine.compile()
    prepare(work)
    gate.ready(parameters=count_parameters(model))
    for block in batches(work):
        loss = engine(*inputs_and_targets(block))
        engine.backward(loss)
        engine.step()
        gate.tick(loss.detach())


def engine_config(gate: Gate) -> dict[str, Any]:
    work = gate.work
    return {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": work.clip_norm,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": gate.setting == "best"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": work.learning_rate,
                "betas": [work.beta1, work.beta2],
                "weight_decay": work.weight_decay,
            },
        },
    }


if __name__ == "__main__":
    serve(PEER, run)
