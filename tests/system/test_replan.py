"""A pipeline whose ranks' speeds drift while it trains."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from danlu.config.load import load
from danlu.train.planning import plan_run
from running import TINY, events, losses

WORDS = (
    *TINY,
    "model.layers=6",
    "model.tied_embeddings=false",
    "precision.format=fp32",
    "pipeline_parallel.stages=2",
    "pipeline_parallel.schedule=1f1b",
    "pipeline_parallel.micro_batches=4",
    "train.steps=24",
    "monitor.progress=false",
    "checkpoint.every=1000",
)


def train(folder, slow_from, *words):
    """Two ranks; the second one is slow from a step on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("drifting.py")), str(slow_from)]
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [*command, *WORDS, *words, f"folder={folder}"],
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(said)


def test_layers_move_away_from_a_rank_that_became_slow(tmp_path):
    train(tmp_path / "even", 10**6, "pipeline_parallel.layers=[3, 3]")
    train(tmp_path / "drift", 2, "pipeline_parallel.layers=measured")
    replans = events(tmp_path / "drift", "replan")
    assert replans, "no replan"
    plan = json.loads((tmp_path / "drift" / "plan.json").read_text())
    first, second = plan["layout"]["stages"]
    assert first > second
    assert replans[-1]["after"] == f"{first}, {second}"
    assert losses(tmp_path / "drift") == pytest.approx(losses(tmp_path / "even"), rel=1e-5)
    assert len(losses(tmp_path / "drift")) == 24
    notes = [note["text"] for note in events(tmp_path / "drift", "note")]
    assert sum(text.startswith("A step was faster than the peak") for text in notes) == 1


def test_layers_stay_where_the_memory_limit_allows_no_other_cut(tmp_path):
    needed = plan_run(load(None, *WORDS)).predicted.memory_bytes
    words = ("pipeline_parallel.layers=measured", f"memory.limit={needed}")
    train(tmp_path / "drift", 2, *words)
    assert not events(tmp_path / "drift", "replan")
    notes = [note["text"] for note in events(tmp_path / "drift", "note")]
    assert any("Layers stay cut 3, 3: with" in text and "are allowed" in text for text in notes)
    assert len(losses(tmp_path / "drift")) == 24
