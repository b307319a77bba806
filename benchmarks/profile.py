"""Where a training step's time goes: matrix products, attention, element-wise, the rest."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

import danlu
from benchmarks.results import origin, table, write
from danlu.base.units import format_duration
from danlu.data.loader import Batch
from danlu.hardware.comm import Comm
from danlu.hardware.device import probe
from danlu.train.build import build
from danlu.train.loop import clip, forward_backward, update

PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("AttentionFunction", "aten::_scaled_dot_product"),
    "loss rows": ("CrossEntropyFunction", "aten::_log_softmax", "aten::nll"),
    "norms and SwiGLU": ("AddNormFunction", "SwiGLUFunction", "aten::silu", "aten::rsqrt"),
    "casts and copies": ("aten::copy_", "aten::_to_copy", "aten::cat", "aten::fill_"),
    "optimizer and clipping": ("aten::_fused_adamw_", "aten::mul_", "aten::linalg_vector_norm"),
    "embedding": ("aten::embedding", "aten::index_select"),
    "allocation": ("aten::empty", "aten::resize_"),
}


def main() -> None:
    """Profiles some steps and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="30m")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    probe("cpu", fresh=True)
    config = danlu.load(
        None, f"model.preset={options.model}", f"train.batch_tokens={options.tokens}",
        "train.steps=100", "train.device=cpu",
    )  # fmt: skip
    plan = danlu.plan(config)
    learner = build(config, plan, Comm(), scratch=Path("build"), note=print)
    draw = torch.Generator().manual_seed(0)
    size = (plan.accumulation, plan.micro_batch, plan.model.sequence_length)

    def step() -> None:
        ids = torch.randint(0, plan.model.vocab_size, size, generator=draw)
        forward_backward(learner, [Batch(part, part, None) for part in ids])
        clip(learner)
        update(learner, 1e-4)

    step()
    process, faults = psutil.Process(), []
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        began = time.perf_counter()
        for _ in range(options.steps):
            before = _page_faults(process)
            step()
            faults.append(_page_faults(process) - before)
        wall = (time.perf_counter() - began) / options.steps
    parts: Counter[str] = Counter()
    for event in recorded.key_averages():
        parts[_part(event.key)] += event.self_cpu_time_total / 1e6 / options.steps
    parts["Python and what no operation accounts for"] = max(0.0, wall - sum(parts.values()))
    rows = [[name, format_duration(s), f"{s / wall:.1%}"] for name, s in parts.most_common()]
    mfu = plan.flops_per_token * plan.batch_tokens / wall / plan.peak_flops
    page = [
        f"# Profile: a step of {options.model}, {plan.batch_tokens} tokens",
        "",
        *origin("profile", f"mean of {options.steps} steps"),
        "",
        f"Step {format_duration(wall)}, MFU {mfu:.1%}; {sorted(faults)[len(faults) // 2]} page"
        " faults a step (median). Data is read ahead by another thread and costs nothing here.",
        "",
        *table(["part", "time", "share"], rows),
    ]
    figures = {"seconds": dict(parts), "wall": wall, "mfu": mfu, "page_faults": faults}
    write("profile", figures, page)


def _part(key: str) -> str:
    for part, names in PARTS.items():
        if key.startswith(names):
            return part
    return "other operations"


def _page_faults(process: psutil.Process) -> int:
    with open(f"/proc/{process.pid}/stat", encoding="ascii") as file:
        return int(file.read().rpartition(")")[2].split()[7])


if __name__ == "__main__":
    main()
