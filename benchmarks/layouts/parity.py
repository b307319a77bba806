"""Layouts against one process: the loss of each of 20 steps, in fp32, on this Python's own text."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.layouts.ranks import Trial, model, run
from benchmarks.results import ROOT, table
from danlu.data.loader import Batch
from danlu.hardware.comm import Comm
from danlu.train.loop import clip, forward_backward, update

WORDS = model(4, 32, 4, 64, 320, 32, "precision.format=fp32", "train.batch_tokens=512")
ALONE = {
    "documents kept apart": ["data_pipeline.attention_within_documents=true"],
    "tied": ["model.tied_embeddings=true"],
}
"""What a layout's name says of its model, which one process has too then."""


def layouts() -> dict[int, dict[str, list[str]]]:
    """Ranks -> name -> overrides: what the parity tests run too, but for a GPU's offload."""
    sys.path[:0] = [str(ROOT / "tests" / "parity"), str(ROOT / "tests")]
    from test_layouts import FOUR, TWO  # type: ignore[import-not-found]

    one = {"one process": [], **{f"one process, {kind}": words for kind, words in ALONE.items()}}
    two = {name: words for name, words in TWO.items() if "host memory" not in name}
    return {1: one, 2: two, 4: FOUR}


def measure(steps: int) -> dict[str, Any]:
    """Worst relative difference of loss and gradient norm, by layout."""
    curves: dict[str, list[list[float]]] = {}
    for ranks, some in layouts().items():
        print(f"parity: {len(some)} layouts on {ranks} ranks", flush=True)
        curves |= run(ranks, train, {"layouts": some, "steps": steps})[0]
    found = {}
    for name, curve in curves.items():
        kind = next((f", {kind}" for kind in ALONE if kind in name), "")
        reference = curves[f"one process{kind}"]
        pairs = list(zip(curve, reference, strict=True))
        found[name] = {
            what: max(abs(a[i] / b[i] - 1) for a, b in pairs)
            for i, what in enumerate(("loss", "norm"))
        }
    return {name: values for name, values in found.items() if not name.startswith("one process")}


def train(comm: Comm, task: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Loss and gradient norm of every step of each layout."""
    return {name: _curve(comm, words, task["steps"]) for name, words in task["layouts"].items()}


def _curve(comm: Comm, words: list[str], steps: int) -> list[list[float]]:
    trial = Trial([*WORDS, *words], comm)
    text = _text()
    found = []
    for step in range(steps):
        loss = forward_backward(trial.learner, _batches(trial, text, step))
        norm = clip(trial.learner)
        update(trial.learner, 0.003)
        found.append([float(comm.sum(loss.double())), float(norm)])
    return found


def _text() -> torch.Tensor:
    folder = Path(sysconfig.get_path("stdlib")) / "email"
    joined = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.from_numpy(np.frombuffer(joined, np.uint8).astype(np.int64))


def _batches(trial: Trial, text: torch.Tensor, step: int) -> list[Batch]:
    """This copy's share of the step's sequences, which are the same for every layout."""
    plan, length = trial.plan, trial.plan.model.sequence_length
    windows = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)
    first = step * plan.batch_sequences
    rows = torch.arange(first, first + plan.batch_sequences) * 7 % len(windows)
    mine = windows[rows].chunk(plan.layout.data)[trial.learner.ranks.copy]
    starts = None
    if trial.config.data_pipeline.attention_within_documents:
        starts = (torch.arange(length, dtype=torch.int32) // 10 * 10).expand(plan.micro_batch, -1)
    return [
        Batch(part[:, :-1].contiguous(), part[:, 1:].contiguous(), starts)
        for part in mine.split(plan.micro_batch)
    ]


def page(found: dict[str, Any]) -> list[str]:
    """The results in Markdown."""
    rows = [[name, f"{v['loss']:.1e}", f"{v['norm']:.1e}"] for name, v in found.items()]
    worst = max(v["loss"] for name, v in found.items() if "bf16" not in name)
    return [
        "## Parity",
        "",
        "Each layout trains a small model (4 layers, width 32, fp32) for 20 steps on 2 or 4"
        " ranks; worst relative difference of a step's loss and of its gradient norm from one"
        " process.",
        "",
        *table(["layout", "loss", "gradient norm"], rows),
        "",
        f"Worst in fp32: {worst:.1e} (goal 1e-5). bf16 rounds in another order.",
        "",
    ]
