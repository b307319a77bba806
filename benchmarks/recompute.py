"""What recompute saves and costs: memory and step time of none, selective and full, interleaved."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import danlu
from benchmarks.results import ROOT, table
from danlu.base.units import format_bytes, format_duration
from danlu.hardware.comm import Comm
from danlu.train.build import build
from danlu.train.measure import time_steps

CHOICES = ("none", "selective", "full")
MODEL = (
    "model.preset=30m", "train.batch_tokens=8192", "train.micro_batch=16", "train.steps=100",
    "train.device=cpu",
)  # fmt: skip
"""28 M parameters, 16 sequences of 512 at once."""


def measure(choice: str, steps: int) -> dict[str, float]:
    """Median step, CPU time a step, and peak resident memory of one choice, and the plan's."""
    config = danlu.load(None, *MODEL, f"memory.recompute={choice}")
    plan = danlu.plan(config)
    learner = build(config, plan, Comm(), scratch=Path("build"), note=print)
    time_steps(learner, 1)
    began = time.process_time()
    seconds = statistics.median(time_steps(learner, steps))
    return {
        "seconds": seconds,
        "cpu_seconds": (time.process_time() - began) / (steps + 1),
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "predicted_seconds": plan.predicted.step_seconds,
        "predicted_bytes": plan.predicted.memory_bytes,
    }


def main() -> None:
    """Measures each choice in turn, each time in a process of its own, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", choices=CHOICES, help="measure one, here, and print it as JSON")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options.steps)))
        return
    found: dict[str, list[dict[str, float]]] = {choice: [] for choice in CHOICES}
    for _ in range(options.repeats):
        for choice in CHOICES:
            command = [sys.executable, "-m", "benchmarks.recompute", "--only", choice]
            command += ["--steps", str(options.steps)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            found[choice].append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for choice, runs in found.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append(
            [
                choice,
                format_bytes(int(middle["predicted_bytes"])),
                format_bytes(int(middle["bytes"])),
                format_duration(middle["predicted_seconds"]),
                format_duration(middle["seconds"]),
                format_duration(middle["cpu_seconds"]),
                ", ".join(f"{run['seconds']:.2f} ({run['cpu_seconds']:.2f})" for run in runs),
            ]
        )
    head = ["recompute", "memory predicted", "measured", "step predicted", "measured",
            "CPU time", "repeats, s (CPU)"]  # fmt: skip
    print("\n".join(table(head, rows)))


if __name__ == "__main__":
    main()
