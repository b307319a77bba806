"""What the planner predicts against what is measured, over layouts that really run here.

Step times of all layouts of a model on as many ranks are taken in turn in one group of processes;
peak memory in a new group for each layout.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import danlu
from benchmarks.layouts.ranks import (
    Sample,
    Trial,
    machine_now,
    median_seconds,
    model,
    peak_resident_bytes,
    run,
)
from benchmarks.results import table
from danlu.base.facts import ClusterFacts
from danlu.base.units import format_bytes, format_duration
from danlu.hardware.cluster import local_cluster
from danlu.hardware.comm import Comm
from danlu.train.planning import plan_run

DP, TP, PP = "data_parallel.degree=", "tensor_parallel.degree=", "pipeline_parallel.stages="
ROWS, WHOLE = (f"tensor_parallel.sequence_parallel={value}" for value in ("true", "false"))
ZERO, MICRO, PIECES = "zero_optimization.stage=", "train.micro_batch=", "pipeline_parallel."


def _pp(ranks: int, schedule: str, pieces: int) -> list[str]:
    return [f"{PP}{ranks}", f"{PIECES}schedule={schedule}", f"{PIECES}micro_batches={pieces}"]


TWO = {
    "DP": [f"{DP}2"],
    "DP, 4 micro-batches": [f"{DP}2", f"{MICRO}2"],
    "ZeRO 1": [f"{DP}2", f"{ZERO}1"],
    "ZeRO 2": [f"{DP}2", f"{ZERO}2"],
    "ZeRO 3": [f"{DP}2", f"{ZERO}3"],
    "ZeRO 3, 4 micro-batches": [f"{DP}2", f"{ZERO}3", f"{MICRO}2"],
    "TP": [f"{TP}2", ROWS],
    "TP, whole rows": [f"{TP}2", WHOLE],
    "PP gpipe, 4": _pp(2, "gpipe", 4),
    "PP 1f1b, 4": _pp(2, "1f1b", 4),
    "PP 1f1b, 8": _pp(2, "1f1b", 8),
    "PP interleaved, 8": _pp(2, "interleaved", 8),
    "PP zero_bubble, 8": _pp(2, "zero_bubble", 8),
    "PP dualpipe_v, 8": _pp(2, "dualpipe_v", 8),
}
FOUR = {
    "DP": [f"{DP}4"],
    "ZeRO 2": [f"{DP}4", f"{ZERO}2"],
    "ZeRO 3": [f"{DP}4", f"{ZERO}3"],
    "TP": [f"{TP}4", ROWS],
    "PP 1f1b, 8": _pp(4, "1f1b", 8),
    "TP x DP": [f"{TP}2", ROWS, f"{DP}2"],
    "TP x ZeRO 3": [f"{TP}2", ROWS, f"{DP}2", f"{ZERO}3"],
    "TP x PP 1f1b, 8": [f"{TP}2", ROWS, *_pp(2, "1f1b", 8)],
    "PP 1f1b, 4 x DP": [*_pp(2, "1f1b", 4), f"{DP}2"],
    "PP zero_bubble, 4 x ZeRO 1": [*_pp(2, "zero_bubble", 4), f"{DP}2", f"{ZERO}1"],
}
THREE = {
    "DP": [f"{DP}3"],
    "ZeRO 2": [f"{DP}3", f"{ZERO}2"],
    "ZeRO 3": [f"{DP}3", f"{ZERO}3"],
    "TP, whole rows": [f"{TP}3", WHOLE],
    "PP 1f1b, 6": _pp(3, "1f1b", 6),
    "PP zero_bubble, 6": _pp(3, "zero_bubble", 6),
}
SMALL = model(8, 256, 4, 704, 2048, 256, "train.batch_tokens=4096")
WIDE = model(4, 512, 8, 1408, 4096, 256, "train.batch_tokens=4096")
MIDDLE = model(6, 384, 6, 1056, 2304, 256, "train.batch_tokens=4608")
UNSEEN = "6 layers of width 384, 3 ranks"
GROUPS: dict[str, tuple[int, list[str], dict[str, list[str]]]] = {
    "8 layers of width 256, 2 ranks": (2, SMALL, TWO),
    "4 layers of width 512, 2 ranks": (2, WIDE, TWO),
    "8 layers of width 256, 4 ranks": (4, SMALL, FOUR),
    UNSEEN: (3, MIDDLE, THREE),
}
"""The constants in `danlu.planner` were fitted to the other groups, on the machine that
docs/results/layouts.md names; `UNSEEN` was first measured when they stood."""


def measure(
    *, rounds: int, memory: bool = True, groups: Sequence[str] = tuple(GROUPS)
) -> dict[str, Any]:
    """Step time and peak memory of all layouts, by group, with the machine's rates meanwhile."""
    found = {}
    wanted = {name: GROUPS[name] for name in groups}
    for group, (ranks, size, layouts) in wanted.items():
        words = {name: [*size, *more] for name, more in layouts.items()}
        print(f"planner: step times of {len(words)} layouts, {group}", flush=True)
        found[group] = run(ranks, race, {"layouts": words, "rounds": rounds})[0]
    for group, (ranks, size, layouts) in wanted.items() if memory else ():
        for name, more in layouts.items():
            print(f"planner: memory of {name}, {group}", flush=True)
            found[group]["bytes"][name] = max(run(ranks, peak, [*size, *more]))
    return found


def race(comm: Comm, task: dict[str, Any]) -> dict[str, Any]:
    """Step times of every layout in turn, and the machine's rates between the turns."""
    trials = {name: Trial(words, comm) for name, words in task["layouts"].items()}
    steps: dict[str, list[Sample]] = {name: [] for name in trials}
    machines = []
    for turn in range(task["rounds"] + 1):
        machines.append(machine_now(comm))
        for name, trial in trials.items():
            taken = trial.step()
            if turn:
                steps[name].append(taken)
    return {"machine": _typical(machines).to_dict(), "steps": steps, "bytes": {}}


def compare(measured: dict[str, Any]) -> dict[str, Any]:
    """What the planner predicts for the measured layouts, and the errors."""
    found: dict[str, dict[str, Any]] = {}
    for group, values in measured.items():
        ranks, size, layouts = GROUPS[group]
        cluster = ClusterFacts.from_dict(values["machine"])
        found[group] = {}
        for name, more in layouts.items():
            plan = plan_run(danlu.load(None, *size, *more), cluster, world=ranks)
            found[group][name] = {
                "predicted_seconds": plan.predicted.step_seconds,
                "parts": dict(plan.predicted.seconds),
                "measured_seconds": median_seconds([Sample(*s) for s in values["steps"][name]]),
                "predicted_bytes": plan.predicted.memory_bytes,
                "memory": dict(plan.predicted.memory),
            }
            if name in values["bytes"]:
                found[group][name]["measured_bytes"] = values["bytes"][name]
    return {"layouts": found, **_figures(found)}


def _typical(machines: list[ClusterFacts]) -> ClusterFacts:
    """The machine with the median of each rate."""
    rates = {
        name: statistics.median(m.device.peak_flops[name] for m in machines)
        for name in machines[0].device.peak_flops
    }
    bandwidth = statistics.median(m.device.bandwidth for m in machines)
    values = local_cluster().to_dict()
    values["device"] |= {"peak_flops": rates, "bandwidth": bandwidth}
    return ClusterFacts.from_dict(values | {"node_bandwidth": bandwidth / 4})


def peak(comm: Comm, words: list[str]) -> int:
    """The most resident bytes of this process over three steps."""
    trial = Trial(words, comm)
    for _ in range(3):
        trial.step()
    return peak_resident_bytes()


def _figures(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rows = [row for group in found.values() for row in group.values()]
    times = [row["predicted_seconds"] / row["measured_seconds"] - 1 for row in rows]
    sizes = [row["predicted_bytes"] / row["measured_bytes"] - 1
             for row in rows if "measured_bytes" in row]  # fmt: skip
    choices = {}
    for name, group in found.items():
        choice = min(group, key=lambda key: group[key]["predicted_seconds"])
        best = min(group, key=lambda key: group[key]["measured_seconds"])
        loss = group[choice]["measured_seconds"] / group[best]["measured_seconds"] - 1
        choices[name] = {"choice": choice, "best": best, "loss": loss}
    unseen = found.get(UNSEEN, {})
    return {
        "time_error_median": statistics.median(map(abs, times)),
        "time_error_worst": max(map(abs, times)),
        "unseen": _figures({UNSEEN: unseen}) if unseen and len(found) > 1 else None,
        "memory_error_median": statistics.median(map(abs, sizes)) if sizes else None,
        "memory_error_worst": max(map(abs, sizes)) if sizes else None,
        "choice_against_best": max(choice["loss"] for choice in choices.values()),
        "choices": choices,
    }  # fmt: skip


def page(measured: dict[str, Any]) -> list[str]:
    """The results in Markdown."""
    found = compare(measured)
    rows = []
    for group, layouts in found["layouts"].items():
        rows += [
            [f"{group}: {name}", format_duration(v["predicted_seconds"]),
             format_duration(v["measured_seconds"]),
             f"{v['predicted_seconds'] / v['measured_seconds'] - 1:+.0%}",
             format_bytes(v["predicted_bytes"]), format_bytes(v.get("measured_bytes", 0)),
             f"{v['predicted_bytes'] / v['measured_bytes'] - 1:+.0%}" if "measured_bytes" in v
             else ""]
            for name, v in layouts.items()
        ]  # fmt: skip
    choices = [
        [group, c["choice"], c["best"], f"{c['loss']:.1%}"] for group, c in found["choices"].items()
    ]
    memory, unseen = found["memory_error_median"] or 0.0, found["unseen"]
    turns = {len(steps) for group in measured.values() for steps in group["steps"].values()}
    return [
        "## Planner",
        "",
        f"{len(rows)} layouts, 4096 tokens a step (4608 on 3 ranks), ranks of one thread. Step"
        f" times are medians of {' or '.join(map(str, sorted(turns)))} steps, taken in turn with"
        " those of the same group; the prediction is for the machine's rates in the same minutes,"
        " which all ranks measure together between the turns. Memory is the resident peak, over"
        " three steps, of the rank that has most. The planner's constants were fitted to the first"
        f" three groups; `{UNSEEN}` was measured afterwards.",
        "",
        *table(["layout", "step predicted", "measured", "error", "memory predicted", "measured",
                "error"], rows),
        "",
        f"Step time: median error {found['time_error_median']:.1%} (goal 10 %), worst"
        f" {found['time_error_worst']:.0%}. Memory: median error {memory:.1%} (goal 5 %), worst"
        f" {found['memory_error_worst'] or 0.0:.0%}.",
        *([f"Of the group that nothing was fitted to: step time {unseen['time_error_median']:.1%},"
           f" memory {unseen['memory_error_median'] or 0.0:.1%}."] if unseen else []),
        "",
        "The fastest predicted of a group, against the fastest measured (goal 5 %):",
        "",
        *table(["group", "choice", "fastest", "slower by"], choices),
        "",
    ]  # fmt: skip
