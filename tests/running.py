"""What tests of whole runs share: a tiny run, the command line as a process, a run's losses."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

TEXT = Path(sysconfig.get_path("stdlib")) / "email"
TINY = (
    f"data_pipeline.sources=[{{type: files, path: {TEXT}, include: '*.py'}}]",
    "data_pipeline.tokenizer.vocab_size=512",
    "data_pipeline.validation_fraction=0.1",
    "model.preset=tiny",
    "model.layers=2",
    "model.hidden_size=32",
    "model.heads=2",
    "model.intermediate_size=64",
    "model.sequence_length=32",
    "train.batch_tokens=256",
    "optimizer.learning_rate=0.003",
    "monitor.sample_tokens=8",
    "train.device=cpu",
    "launch.threads=1",
)
"""Overrides of a run that takes a few milliseconds a step, on text that every Python has."""


def danlu(*words, cwd, environment=None, timeout=120, check=True):
    """Runs the command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "danlu", *words],
        cwd=cwd,
        env=os.environ | {"COLUMNS": "100"} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def records(run, kind="step"):
    """The run's metric records of one kind; of a step that was done twice, the later one."""
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}


def losses(run):
    """Loss by step."""
    return {step: line["loss"] for step, line in records(run).items()}


def events(run, kind):
    """The run's events of one kind."""
    lines = [json.loads(line) for line in (Path(run) / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]
