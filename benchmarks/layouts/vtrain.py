"""The planner's cost terms, calibrated on few of the runs that vTrain published of A100 machines.

The terms of a run are the parts of `planner.cost`, put together as it does. One factor a term, none
negative, is fitted to a random choice of runs, weighted by relative error and drawn towards 1 (the
planner's own constants), and asked about the others.

`multi.csv` was measured. `single.csv` is called measured too, but its rows are sums: step times are
linear in layers and in micro-batches to 1e-5, and all-reduce among 8 copies takes less than among 2
by just what vTrain's simulator computes (`docs/log.md`). So its 32 times of a block may come from
profiled kernels, but it says nothing about the noise of steps.
"""

from __future__ import annotations

import csv
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.results import table
from danlu.base.facts import ClusterFacts, LayerCost
from danlu.hardware.cluster import parse_cluster
from danlu.planner.cost import Setting, efficiency, layer_seconds, overlapped, step_cost
from danlu.planner.layout import Layout
from danlu.planner.stages import equal

Array = NDArray[np.float64]
CALIBRATION, REPEATS, NEAR, CHOICES = 50, 60, 1.05, 3
PULL = 0.07  # a factor that is off by 1 counts in the fit like one run that is wrong by 7 %
WORK, DISPATCH, REST = slice(0, 6), 6, slice(7, 12)  # columns of `_terms`
VOCABULARY = 51200  # of the GPT-2 tokenizer, padded as Megatron does


@dataclass(frozen=True)
class Run:
    """A measured run: what was the same for its rivals, its layout, its step time."""

    group: tuple[int, ...]
    hidden: int
    layers: int
    heads: int
    length: int
    devices: int
    layout: Layout
    micro_batch: int
    micro_batches: int
    seconds: float


def measure(folder: Path) -> dict[str, Any]:
    """Accuracy and choices on the runs of one machine and on those of several."""
    found = {}
    for name in ("single", "multi"):
        runs = [_run(row) for row in _rows(folder / f"{name}.csv")]
        runs = [run for run in runs if run is not None]
        print(f"vtrain: {len(runs)} runs of {name}.csv", flush=True)
        found[name] = _repeated(runs)
    return found


def _rows(path: Path) -> list[Mapping[str, str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def _run(row: Mapping[str, str]) -> Run | None:
    """None where the numbers do not make a layout."""
    number = {key.strip(): float(value) for key, value in row.items() if value}
    hidden, layers = int(number["hidden size"]), int(number["# layers"])
    tensor, pipeline = int(number["tensor parallelism"]), int(number["pipeline parallelism"])
    data, micro = int(number["data parallelism"]), int(number["micro batch"])
    devices, batch = int(number["# GPUs"]), int(number["global batch"])
    if tensor * pipeline * data != devices or batch % (data * micro) or pipeline > layers:
        return None
    few = batch // (data * micro) < pipeline  # too few for 1F1B, which is then the same as GPipe
    layout = Layout(
        schedule="gpipe" if few else "1f1b",
        data=data, tensor=tensor, pipeline=pipeline,
        stages=equal(layers, pipeline) if pipeline > 1 else (),
        split_layers=tuple(range(layers)) if tensor > 1 else (), split_ends=tensor > 1,
    )  # fmt: skip
    length = int(number["sequence length"])
    return Run(
        group=(hidden, layers, length, devices, batch), hidden=hidden, layers=layers,
        heads=int(number["attention heads"]), length=length, devices=devices, layout=layout,
        micro_batch=micro, micro_batches=batch // (data * micro),
        seconds=number["iteration time (ms)"] / 1e3,
    )  # fmt: skip


def _repeated(runs: Sequence[Run]) -> dict[str, Any]:
    terms = np.array([_terms(run) for run in runs])
    measured = np.array([run.seconds for run in runs])
    rivals = defaultdict(list)
    for index, run in enumerate(runs):
        rivals[run.group].append(index)
    groups = [group for group in rivals.values() if len(group) >= 2]
    uncalibrated = np.array([_cost(run, run.layout) for run in runs])
    trials = []
    for repeat in range(REPEATS):
        chosen = random.Random(repeat).sample(range(len(runs)), CALIBRATION)
        others = np.setdiff1d(np.arange(len(runs)), chosen)
        predicted = predict(terms, calibrate(terms[chosen], measured[chosen]))
        errors = np.abs(predicted[others] / measured[others] - 1)
        trials.append({
            "mape": float(errors.mean()),
            "median": float(np.median(errors)),
            **_choices(predicted, measured, groups),
            **_held_out(terms, measured, groups, random.Random(repeat)),
        })  # fmt: skip
    large = [group for group in groups if len(group) >= 4]
    return {
        "runs": len(runs),
        "groups": len(groups),
        **{key: statistics.mean(trial[key] for trial in trials) for key in trials[0]},
        "groups_of_four": len(large),
        "uncalibrated": _choices(uncalibrated, measured, groups),
    }


def _held_out(
    terms: Array, measured: Array, groups: Sequence[list[int]], draw: random.Random
) -> dict[str, float]:
    """Error and choices in half of the groups, with factors fitted to runs of the other half."""
    mixed = draw.sample(list(groups), len(groups))
    half = len(groups) // 2
    known = [index for group in mixed[:half] for index in group]
    chosen = draw.sample(known, min(CALIBRATION, len(known)))
    predicted = predict(terms, calibrate(terms[chosen], measured[chosen]))
    judged = [index for group in mixed[half:] for index in group]
    return {
        "held_out_mape": float(np.abs(predicted[judged] / measured[judged] - 1).mean()),
        "held_out": _choices(predicted, measured, mixed[half:])["top_three"],
    }


def predict(terms: Array, factors: Array) -> Array:
    """Seconds of steps."""
    scaled = terms * factors
    blocks = np.vectorize(overlapped)(scaled[:, DISPATCH], scaled[:, WORK].sum(axis=1))
    return np.asarray(blocks + scaled[:, REST].sum(axis=1))


def calibrate(terms: Array, measured: Array) -> Array:
    """The factors of least squared relative error and distance from 1: Gauss-Newton steps."""
    relative, one = terms / measured[:, None], np.ones(terms.shape[1])

    def loss(factors: Array) -> float:
        off, moved = predict(relative, factors) - 1, PULL * (factors - one)
        return float(off @ off + moved @ moved)

    factors, small = one, 1e-6
    for _ in range(40):
        now = predict(relative, factors)
        moved = [predict(relative, factors + small * axis) for axis in np.eye(len(one))]
        slopes = (np.stack(moved, axis=1) - now[:, None]) / small
        wanted = nonnegative(
            np.vstack([slopes, PULL * np.eye(len(one))]),
            np.concatenate([1 - now + slopes @ factors, PULL * one]),
        )
        steps = [factors + share * (wanted - factors) for share in (1, 0.5, 0.25, 0.1, 0.03)]
        best = min(steps, key=loss)
        if loss(best) > loss(factors) - 1e-9:
            break
        factors = best
    return factors


def _choices(predicted: Array, measured: Array, groups: Sequence[list[int]]) -> dict[str, float]:
    """How often the best three predicted contain a good plan, and what the first one loses."""
    first, hits = [], []
    for group in groups:
        ranked = sorted(group, key=lambda index: predicted[index])
        best = min(measured[group])
        first.append(float(measured[ranked[0]] / best - 1))
        hits.append((len(group), min(measured[ranked[:CHOICES]]) <= NEAR * best))
    more = [hit for size, hit in hits if size > CHOICES]
    return {
        "first_regret": statistics.mean(first),
        "top_three": sum(hit for _, hit in hits) / len(hits),
        "top_three_of_more": sum(more) / len(more) if more else 1.0,
    }


def _layers(run: Run) -> tuple[LayerCost, ...]:
    """GPT-2's layers: attention, and a feed-forward of two matrices, four times as wide."""
    h = float(run.hidden)
    block = LayerCost(
        "layer", int(12 * h * h), 24 * h * h, 2 * run.length * h, 0, 70 * h + 5 * run.heads
        * run.length, 0, 40 * h + 5 * run.heads * run.length,
    )  # fmt: skip
    head = int(VOCABULARY * h)
    return (
        LayerCost("embedding", head, 0.0, 0.0, 0, 6 * h),
        *[block] * run.layers,
        LayerCost("head", 0, 2.0 * head, 0.0, 0, 12 * h + 4 * VOCABULARY, 0, 4 * VOCABULARY),
    )


def _setting(run: Run) -> Setting:
    inside = min(8, run.devices)
    cluster: ClusterFacts = parse_cluster(f"{max(1, run.devices // 8)}x{inside}xa100")
    reached = efficiency(cluster.device, "torch", compiled=False)
    return Setting(cluster, run.hidden, "fp16", reached, 1.0)


def _cost(run: Run, layout: Layout) -> float:
    """Seconds as the planner predicts them with its own constants."""
    tokens = run.micro_batch * run.length
    return step_cost(
        _layers(run), layout, _setting(run), micro_tokens=tokens, micro_batches=run.micro_batches
    ).total


def _terms(run: Run) -> list[float]:
    """Seconds by term; what a pipeline computes is longer by its simulated waiting."""
    layout, setting, layers = run.layout, _setting(run), _layers(run)
    tokens = float(run.micro_batch * run.length)
    split = layout.tensor > 1
    cost = step_cost(layers, layout, setting, micro_tokens=tokens, micro_batches=run.micro_batches)
    busy = cost.seconds
    idle = busy.get("bubble", 0.0)
    alone = step_cost(
        layers, replace(layout, data=1), setting,
        micro_tokens=tokens, micro_batches=run.micro_batches,
    )  # fmt: skip
    copies = busy["communication"] - alone.seconds["communication"]
    computing = sum(busy.values()) - idle - busy["optimizer"] - copies
    stretch = run.micro_batches * (1 + idle / computing)
    block = layer_seconds(layers[1], layout, setting, tokens, split=split)
    latency = layer_seconds(layers[1], layout, setting, 0.0, split=split)["communication"]
    head = layer_seconds(layers[-1], layout, setting, tokens, split=split)
    shared = setting.bandwidth * layout.tensor
    rows = 2 * tokens * setting.reached.traffic
    count = run.layers / layout.pipeline * stretch
    across = layout.data * layout.tensor * layout.pipeline > 8 and layout.data > 1
    sent = rows * run.hidden / setting.cluster.node_bandwidth if layout.pipeline > 1 else 0.0
    return [
        count * block["matrix products"],
        count * block["attention"],
        count * rows * layers[1].split_traffic / shared,
        count * rows * (layers[1].traffic_elements - layers[1].split_traffic) / setting.bandwidth,
        count * (block["communication"] - latency),
        count * latency,
        count * setting.reached.overhead_seconds,
        stretch * sum(head.values()),
        0.0 if across else copies,
        copies if across else 0.0,
        stretch * sent,
        busy["optimizer"],
    ]


def nonnegative(a: Array, b: Array) -> Array:
    """The x >= 0 of least |a x - b|, by Lawson and Hanson's active sets (1974, chapter 23)."""
    scale = np.where(np.linalg.norm(a, axis=0) > 0, np.linalg.norm(a, axis=0), 1.0)
    a = a / scale
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)
    for _ in range(3 * len(x)):
        slope = np.where(free, -np.inf, a.T @ (b - a @ x))
        if slope.max() < 1e-9:
            break
        free[slope.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                break
            share = (x[below] / (x[below] - wanted[below] + 1e-300)).min()
            x += share * (wanted - x)
            free &= x > 1e-12
            x[~free] = 0.0
        x = wanted
    return x / scale


def page(found: dict[str, Any]) -> list[str]:
    """The results in Markdown."""
    rows = [
        [f"{name}.csv", str(v["runs"]), f"{v['mape']:.1%}", f"{v['median']:.1%}",
         f"{v['first_regret']:.1%}", f"{v['top_three']:.1%} of {v['groups']}",
         f"{v['top_three_of_more']:.1%} of {v['groups_of_four']}", f"{v['held_out']:.1%}",
         f"{v['held_out_mape']:.1%}", f"{v['uncalibrated']['top_three']:.1%}"]
        for name, v in found.items()
    ]  # fmt: skip
    return [
        "## Published A100 runs",
        "",
        f"Factors for the planner's cost terms fitted to {CALIBRATION} random runs, asked about the"
        f" others, mean of {REPEATS} such choices. A case is a model, a number of GPUs and a global"
        " batch; it counts where one of the three plans predicted to be fastest is within 5 % of"
        " the best (goal 95 % of the cases; the next column leaves out cases with no more than"
        " three plans; `cases not fitted to`: half of them, by runs of the other half; the last"
        " column is without calibration). `single.csv` behaves like the output of vTrain's"
        " simulator, not like measured steps (`docs/log.md`); `multi.csv` was measured.",
        "",
        *table(["runs of vTrain", "runs", "mean error", "median", "first choice loses",
                "top three holds a good plan", "of more than three plans", "of cases not fitted to",
                "mean error there", "constants as they are"], rows),
        "",
    ]  # fmt: skip
