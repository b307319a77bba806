"""A run folder as training leaves it, made up: curves, evaluations, samples, a resume."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

START = 1_760_000_000.0
BATCH_TOKENS = 16_384
STEP_SECONDS = 1.31

CONFIG = """\
name: tiny-python
folder: runs/tiny-python
model:
  preset: small
  sequence_length: 256
data_pipeline:
  sources:
  - type: python_stdlib  # the source code of this very Python
  tokenizer: {type: bpe, vocab_size: 8192}
train:
  steps: 400
  batch_tokens: 16384
  seed: 0
monitor:
  sample_prompts: ['def ', 'import ', 'class ']
"""

_CODE = {
    "def ": [
        "   ,  the the self . . (",
        "self(self, self):\n    return self.self(self)\n\n    def self",
        "get_name(self, name):\n    if name is None:\n        return None\n    return self._name",
        "_read_chunk(self, size=-1):\n    \"\"\"Read up to size bytes.\"\"\"\n    if size < 0:\n"
        "        return self.read()\n    data = self._buffer[:size]\n    return data",
    ],
    "import ": [
        "  \n\n = = 0",
        "os\nimport os\nimport os\nimport sys",
        "os\nimport sys\nimport re\n\nfrom os import path",
        "os\nimport sys\nimport functools\nfrom collections import OrderedDict\n\n__all__ = [",
    ],
    "class ": [
        "self self , , def",
        "Test(self):\n    def test(self):\n        self.assertEqual(self, self)",
        "TestCase(unittest.TestCase):\n    def setUp(self):\n        self.x = None",
        "HTMLParser(ParserBase):\n    \"\"\"Find tags.</script><script>alert(1)</script>\"\"\"\n\n"
        "    def __init__(self, *, convert_charrefs=True):\n        self.reset()",
    ],
}  # fmt: skip


def plan(steps: int = 400) -> dict[str, Any]:
    """A `plan.json`, as much of it as the monitor reads."""
    device = {
        "kind": "cpu", "name": "AMD EPYC 7B13", "memory_bytes": 15 * 2**30,
        "peak_flops": {"fp32": 2.1e11, "bf16": 4.3e11}, "bandwidth": 2.4e10, "threads": 2,
        "features": ["avx2", "fma"], "source": "measured",
    }  # fmt: skip
    model = {
        "vocab_size": 8192, "hidden_size": 256, "layers": 8, "heads": 4, "kv_heads": 4,
        "head_size": 64, "intermediate_size": 704, "sequence_length": 256,
        "tied_embeddings": False, "rope_theta": 10000.0, "norm_epsilon": 1e-5,
    }  # fmt: skip
    seconds = {
        "matrix products": 0.93,
        "attention": 0.11,
        "memory traffic": 0.13,
        "optimizer": 0.06,
    }
    memory = {"weights": 42e6, "gradients": 42e6, "optimizer": 84e6, "activations": 1.6e9,
              "torch": 2.5e8}  # fmt: skip
    return {
        "hash": "3fa92c01b7de", "model": model, "parameters": 10_623_232, "flops_per_token": 6.9e7,
        "layout": {"data": 1, "tensor": 1, "pipeline": 1},
        "threads": 2, "micro_batch": 16, "accumulation": 4,
        "batch_tokens": BATCH_TOKENS, "steps": steps, "learning_rate": 1.6e-3, "format": "fp32",
        "backend": "native", "compile": False,
        "cluster": {"nodes": 1, "devices_per_node": 1, "device": device,
                    "node_bandwidth": 1e10, "network_bandwidth": 1e9},
        "predicted": {"step_seconds": 1.23, "tokens_per_second": BATCH_TOKENS / 1.23,
                      "mfu": 0.44, "memory": memory, "seconds": seconds},
        "decisions": [
            {"key": "train.steps", "value": steps, "reason": "240 s at 1.23 s a step, rounded up"},
            {"key": "train.batch_tokens", "value": BATCH_TOKENS,
             "reason": "Step law for 10.6 M parameters and 6.5 M tokens"},
            {"key": "precision.format", "value": "fp32", "reason": "this CPU has no bf16 units"},
            {"key": "kernels.compile", "value": False,
             "reason": "compiling takes 38 s and would save 12 s in this run"},
        ],
    }  # fmt: skip


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Writes a JSON-lines file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_run(
    folder: Path,
    steps: int = 400,
    *,
    evaluate_every: int = 40,
    resume_at: int | None = 240,
    stop: str | None = "done",
    seed: int = 0,
) -> Path:
    """Writes the folder of a run that did `steps` of its steps, and returns it.

    Args:
        evaluate_every: steps between evaluations (with samples and a checkpoint); 0 for none.
        resume_at: the run was killed ten steps after this one and went on from it an hour later.
        stop: the reason in its last event; None for a run that is still going or was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(plan(steps)), encoding="utf-8")
    life = _Life(random.Random(seed), evaluate_every, steps)
    life.begin({"kind": "start"})
    if resume_at is not None and resume_at + 10 < steps:
        life.train(1, resume_at + 10)
        life.clock += 3600.0
        life.begin({"kind": "start"}, {"kind": "resume", "step": resume_at})
        life.train(resume_at + 1, steps)
    else:
        life.train(1, steps)
    if stop is not None:
        life.event({"kind": "stop", "step": steps, "reason": stop, "message": ""})
    write_lines(folder / "metrics.jsonl", life.metrics)
    write_lines(folder / "events.jsonl", life.events)
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run folder: `make_run(steps=400, name="run", …)`, see `write_run`."""

    def make(steps: int = 400, *, name: str = "run", **more: Any) -> Path:
        return write_run(tmp_path / name, steps, **more)

    return make


@pytest.fixture
def append_lines() -> Callable[..., None]:
    """Appends records to a JSON-lines file, as a process of the run would."""

    def append(path: Path, *records: dict[str, Any]) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    return append


class _Life:
    """Makes the lines up."""

    def __init__(self, chance: random.Random, evaluate_every: int, steps: int) -> None:
        self.chance, self.every, self.steps = chance, evaluate_every, steps
        self.clock = START
        self.metrics: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def begin(self, *events: dict[str, Any]) -> None:
        for event in events:
            more = {"plan": "3fa92c01b7de", "world": 1, "device": "AMD EPYC 7B13"}
            self.event(event | (more if event["kind"] == "start" else {}))
        self.clock += 11.0

    def event(self, event: dict[str, Any]) -> None:
        self.events.append({"time": round(self.clock, 3), **event})

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            seconds = STEP_SECONDS * self.chance.lognormvariate(0, 0.03)
            if step == first:
                seconds += 21.0
            elif self.chance.random() < 0.02:
                seconds *= 1.8
            self.clock += seconds
            self.metrics.append(self._step(step, seconds))
            if self.every and step % self.every == 0:
                self._evaluate(step)

    def _step(self, step: int, seconds: float) -> dict[str, Any]:
        warmup, done = min(step / 20, 1.0), step / self.steps
        rate = 1.6e-3 * warmup * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        speed = BATCH_TOKENS / seconds
        return {
            "time": round(self.clock, 3), "kind": "step", "step": step, "tokens": BATCH_TOKENS,
            "loss": self._loss(step) + self.chance.gauss(0, 0.06),
            "gradient_norm": (0.4 + 3 * math.exp(-step / 15)) * self.chance.lognormvariate(0, 0.2),
            "learning_rate": rate, "seconds": seconds, "tokens_per_second": speed,
            "mfu": speed * 6.9e7 * 0.142 / 4.0e11, "memory_bytes": int(1.93e9 + 4e7 * warmup),
            "data_seconds": 0.004 * self.chance.lognormvariate(0, 0.4),
        }  # fmt: skip

    def _loss(self, step: int) -> float:
        return 2.35 + 4.2 * math.exp(-step / 18) + 2.6 * math.exp(-step / 130)

    def _evaluate(self, step: int) -> None:
        loss = self._loss(step) + 0.08 + self.chance.gauss(0, 0.01)
        self.clock += 2.2
        self.metrics.append({
            "time": round(self.clock, 3), "kind": "evaluation", "step": step, "loss": loss,
            "bits_per_byte": loss / math.log(2) / 3.4, "tokens": 65_536, "seconds": 2.2,
        })  # fmt: skip
        stage = min(int(step / self.steps * 4), 3)
        for prompt, texts in _CODE.items():
            self.clock += 0.6
            self.event({"kind": "sample", "step": step, "prompt": prompt, "text": texts[stage]})
        path = f"checkpoints/step-{step:06d}"
        self.event({"kind": "checkpoint", "step": step, "path": path, "seconds": 0.31})
