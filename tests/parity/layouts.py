"""Runs layouts side by side on Gloo ranks of this machine, for tests that compare them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from danlu.config.load import load
from danlu.data.prepare import prepare
from running import TINY

WORDS = (
    *TINY,
    "precision.format=fp32",
    "model.layers=4",
    "model.heads=4",
    "model.tied_embeddings=false",
    "train.batch_tokens=512",
    "train.steps=20",
)
"""A model of four layers and four heads, 16 sequences a step, in fp32."""
TIED = "model.tied_embeddings=true"
"""The same model with one matrix as embedding and head."""


def run(ranks, layouts, folder, *, steps=20, words=WORDS, reshard=(), targets=None, sources=None):
    """Trains each layout on `ranks` ranks; name -> what came out, with all weights by name.

    Args:
        ranks: processes.
        layouts: name -> overrides.
        folder: for what is written; `folder/NAME` holds each layout's checkpoint of half time.
        steps: of each layout.
        words: overrides for all.
        reshard: pairs of a checkpoint's name and a target's: loaded, and trained for three steps.
        targets: name -> overrides of reshard's targets; the layouts when left out.
        sources: name -> folder of checkpoints that are not in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    corpus = prepare(load(None, *words).data_pipeline)
    task = {
        "corpus": str(corpus.folder),
        "out": str(folder),
        "layouts": {name: [*words, *more] for name, more in layouts.items()},
        "targets": {name: [*words, *more] for name, more in (targets or layouts).items()},
        "steps": steps,
        "reshard": list(reshard),
        "checkpoints": {name: str(path) for name, path in (sources or {}).items()},
    }
    file = folder / "task.json"
    file.write_text(json.dumps(task))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("ranks.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(file)],
            env=os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    output = [process.communicate(timeout=1500)[0] for process in processes]
    assert not any(p.returncode for p in processes), "\n".join(o[-3000:] for o in output)
    results = json.loads((folder / "results-0.json").read_text())
    for name in layouts:
        weights = {}
        for rank in range(ranks):
            for key, weight in torch.load(folder / f"{name}-{rank}.pt").items():
                same = weights.setdefault(key, weight)
                assert torch.equal(weight, same), f"{name}: {key} differs between ranks"
        results[name]["weights"] = weights
    return results
