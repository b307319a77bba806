"""What the planner predicts against what is measured, over models of several sizes."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import danlu
from benchmarks.results import origin, table, write
from danlu.base.units import format_bytes, format_duration
from danlu.data.loader import Batch
from danlu.hardware.comm import Comm
from danlu.hardware.device import probe
from danlu.train.build import build
from danlu.train.loop import clip, forward_backward, update

CASES = [
    ("tiny", 2048, 256),
    ("small", 2048, 256),
    ("small", 8192, 256),
    ("small", 2048, 1024),
    ("30m", 2048, 512),
    ("30m", 4096, 1024),
    ("125m", 2048, 1024),
]
"""Preset, tokens a step, sequence length."""


def measure(preset: str, tokens: int, length: int, steps: int) -> dict[str, Any]:
    """Median step time and the plan's, for one case, peaks taken in the same minute."""
    probe("cpu", fresh=True)
    config = danlu.load(
        None, f"model.preset={preset}", f"model.sequence_length={length}",
        f"train.batch_tokens={tokens}", "train.steps=100", "train.device=cpu",
    )  # fmt: skip
    plan = danlu.plan(config)
    learner = build(config, plan, Comm(), scratch=Path("build"), note=print)
    draw = torch.Generator().manual_seed(0)
    seconds, memory = [], 0
    for _ in range(steps + 1):
        size = (plan.accumulation, plan.micro_batch, length)
        ids = torch.randint(0, plan.model.vocab_size, size, generator=draw)
        began = time.perf_counter()
        forward_backward(learner, [Batch(part, part, None) for part in ids])
        clip(learner)
        update(learner, 1e-4)
        seconds.append(time.perf_counter() - began)
        memory = max(memory, learner.device.memory_bytes())
    measured = statistics.median(seconds[1:])
    return {
        "case": f"{preset}, {tokens} tokens, sequences of {length}",
        "predicted_seconds": plan.predicted.step_seconds,
        "measured_seconds": measured,
        "time_ratio": measured / plan.predicted.step_seconds,
        "predicted_bytes": plan.predicted.memory_bytes,
        "measured_bytes": memory,
        "mfu": plan.flops_per_token * tokens / measured / plan.peak_flops,
    }


def main() -> None:
    """Runs every case (each in this process, one after another) and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    found = [measure(*case, options.steps) for case in track(CASES, description="cases")]
    errors = [abs(f["time_ratio"] - 1) for f in found]
    rows = [
        [
            f["case"],
            format_duration(f["predicted_seconds"]),
            format_duration(f["measured_seconds"]),
            f"{f['time_ratio']:.2f}",
            f"{f['mfu']:.0%}",
            format_bytes(f["predicted_bytes"]),
            format_bytes(f["measured_bytes"]),
        ]
        for f in found
    ]
    head = ["case", "step predicted", "measured", "ratio", "MFU", "memory predicted", "measured"]
    page = [
        "# Plan: predicted against measured",
        "",
        *origin("plan", f"median of {options.steps} steps a case"),
        "",
        "Rates of the machine are measured anew before each case. Memory is the process's resident"
        " memory; cases run one after another in one process, whose memory does not shrink.",
        "",
        *table(head, rows),
        "",
        f"Median error of the step time: {statistics.median(errors):.0%}, worst {max(errors):.0%}.",
    ]
    write("plan", {"cases": found, "time_error_median": statistics.median(errors)}, page)


if __name__ == "__main__":
    main()
