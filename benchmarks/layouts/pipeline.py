"""Pipelines: utilisation in simulation and measured, by schedule; balanced against equal cuts.

A rank is busy while it is inside a stage's forward or backward pass: those calls of PyTorch's
stages are wrapped in clocks. Waiting for a neighbour happens between them.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.layouts.ranks import (
    Sample,
    Trial,
    calm,
    median_ratio,
    median_seconds,
    model,
    run,
    timed,
)
from benchmarks.results import table
from danlu.base.units import format_duration
from danlu.hardware.comm import Comm
from danlu.planner.schedule import SCHEDULES, StageCost, order, problem, simulate
from danlu.train.loop import forward_backward

MICRO_BATCHES = 8
SIMULATED = [("gpipe", 16), ("1f1b", 16), ("interleaved", 15), ("interleaved", 20),
             ("zero_bubble", 16), ("dualpipe_v", 16)]  # fmt: skip
"""Schedule and micro-batches on five ranks; interleaved needs rounds of equal size."""
EVEN = model(8, 256, 4, 704, 512, 256)
HEAVY_HEAD = model(8, 256, 4, 704, 8192, 256)


def measure(*, rounds: int) -> dict[str, Any]:
    """Simulations on five ranks, and what two real ranks do, by schedule."""
    found: dict[str, Any] = {"five_ranks": five_ranks()}
    print(f"pipeline: {len(SCHEDULES)} schedules on 2 ranks", flush=True)
    words = {name: _words(EVEN, name) for name in SCHEDULES}
    found["two_ranks"] = _merged(run(2, race, {"layouts": words, "rounds": rounds}))
    return found


def balance(*, rounds: int) -> dict[str, Any]:
    """A model whose head is as much work as three layers: cut by cost, and by number."""
    print("pipeline: balanced against equal cut", flush=True)
    words = {
        cut: [*_words(HEAVY_HEAD, "1f1b"), f"pipeline_parallel.layers={word}"]
        for cut, word in (("equal", "equal"), ("balanced", "auto"))
    }
    found = _merged(run(2, race, {"layouts": words, "rounds": rounds}))
    gains = {
        "simulated_gain": found["equal"]["planned_seconds"] / found["balanced"]["planned_seconds"],
        "simulated_gain_measured_costs":
            found["equal"]["simulated_seconds"] / found["balanced"]["simulated_seconds"],
        "measured_gain": median_ratio(found["equal"]["steps"], found["balanced"]["steps"]),
    }  # fmt: skip
    return {name: gain - 1 for name, gain in gains.items()} | {"cuts": found}


def five_ranks() -> dict[str, float]:
    """Simulated utilisation of five equal ranks; a forward pass is half of a backward pass."""
    found = {}
    for name, micro_batches in SIMULATED:
        its, chunks = SCHEDULES[name], SCHEDULES[name].chunks
        assert problem(name, 5, micro_batches) is None
        costs = [StageCost(1 / chunks, 1 / chunks, 1 / chunks)] * (5 * chunks)
        timeline = simulate(order(name, 5, micro_batches), costs, pairs=its.pairs)
        found[f"{name}, {micro_batches}"] = timeline.utilisation
    return found


def _words(size: list[str], schedule: str) -> list[str]:
    return [*size, "pipeline_parallel.stages=2", f"pipeline_parallel.schedule={schedule}",
            f"pipeline_parallel.micro_batches={MICRO_BATCHES}",
            f"train.batch_tokens={MICRO_BATCHES * 512}"]  # fmt: skip


class Clocks:
    """Clocks around the passes of a rank's stages."""

    def __init__(self, trial: Trial) -> None:
        assert trial.learner.pipeline is not None
        schedule = trial.learner.pipeline._training
        self.stages = getattr(schedule, "_stages", None) or [schedule._stage]
        self.wall: dict[str, list[float]] = defaultdict(list)
        self.processor: dict[str, list[float]] = defaultdict(list)
        for stage in self.stages:
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, name, self._clocked(getattr(stage, name), stage.stage_index, name))

    def clear(self) -> None:
        """Forgets what was measured."""
        self.wall.clear()
        self.processor.clear()

    def _clocked(self, work: Callable[..., Any], stage: int, name: str) -> Callable[..., Any]:
        def call(*args: Any, **words: Any) -> Any:
            kind = {"forward": "F", "backward": "B"}[name.split("_")[0]]
            if name == "backward_weight_one_chunk":
                kind = "W"
            elif kind == "B" and not words.get("full_backward", True):
                kind = "I"
            began, used = time.perf_counter(), time.thread_time()
            found = work(*args, **words)
            self.processor[f"{kind}{stage}"].append(time.thread_time() - used)
            self.wall[f"{kind}{stage}"].append(time.perf_counter() - began)
            return found

        return call


def race(comm: Comm, task: dict[str, Any]) -> dict[str, Any]:
    """Steps of every layout, and of its stages without communication, in turn."""
    trials = {name: Trial(words, comm) for name, words in task["layouts"].items()}
    clocks = {name: Clocks(trial) for name, trial in trials.items()}
    found: dict[str, Any] = {name: defaultdict(list) for name in trials}
    for turn in range(task["rounds"] + 1):
        for name, trial in trials.items():
            clock, own = clocks[name], found[name]
            clock.clear()
            step = timed(comm, lambda trial=trial: forward_backward(trial.learner, trial.batches))
            trial.update()
            alone = _alone(comm, trial, clock)
            if turn:
                own["steps"].append(step)
                own["busy"].append(sum(map(sum, clock.wall.values())) / step.seconds)
                own["busy_processor"].append(sum(map(sum, clock.processor.values())) / step.seconds)
                own["ceilings"].append(alone)
                own["costs"].append({k: statistics.median(t) for k, t in clock.wall.items()})
    for name, trial in trials.items():
        found[name] |= {
            "stages": list(trial.plan.layout.stages),
            "planned_seconds": trial.plan.predicted.step_seconds,
            "planned": trial.plan.predicted.utilisation,
        }
    return found


def _alone(comm: Comm, trial: Trial, clock: Clocks) -> Sample:
    """A time in which each rank computes its stages for all micro-batches, and nothing else."""
    learner, plan = trial.learner, trial.plan
    rows, width = plan.micro_batch * plan.model.sequence_length, plan.model.hidden_size
    stream = torch.randn(rows, width, dtype=learner.model.dtype)
    scale = 1 / plan.batch_tokens

    def work() -> None:
        for batch in trial.batches:
            for stage in clock.stages:
                first = stage.stage_index == 0
                given = batch.ids_bt if first else stream.detach().requires_grad_()
                out = stage.submod(given, batch.targets_bt, None, scale)
                out.backward(None if out.dim() == 0 else stream)

    taken = timed(comm, work)
    learner.optimizer.zero_grad(set_to_none=True)
    return taken


def _merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' figures together, with the simulation from the measured costs of the stages."""
    found = {}
    for name, one in ranks[0].items():
        steps = [Sample(*step) for step in one["steps"]]
        ceilings = [Sample(*step) for step in one["ceilings"]]
        quiet = calm(steps)
        costs = {
            key: statistics.median(rank[name]["costs"][i][key] for i in quiet)
            for rank in ranks
            for key in rank[name]["costs"][0]
        }
        schedule = name if name in SCHEDULES else "1f1b"
        its, chunks = SCHEDULES[schedule], len(one["stages"]) // 2
        timeline = simulate(
            order(schedule, 2, MICRO_BATCHES, chunks),
            [_stage_cost(costs, stage) for stage in range(len(one["stages"]))],
            pairs=its.pairs,
        )
        busy, processor = (
            statistics.mean(statistics.median(rank[name][key][i] for i in quiet) for rank in ranks)
            for key in ("busy", "busy_processor")
        )
        found[name] = {
            "simulated": timeline.utilisation,
            "measured": busy,
            "measured_processor": processor,
            "planned": one["planned"],
            "of_ceiling": median_ratio(ceilings, steps),
            "seconds": median_seconds(steps),
            "steps": steps,
            "planned_seconds": one["planned_seconds"],
            "simulated_seconds": timeline.seconds,
            "stages": one["stages"],
        }
    return found


def _stage_cost(costs: dict[str, float], stage: int) -> StageCost:
    """A stage's passes; where backward is never split, half of it stands for each part."""
    whole = costs.get(f"B{stage}", 0.0)
    inputs, weights = (costs.get(f"{kind}{stage}", whole / 2) for kind in "IW")
    return StageCost(costs[f"F{stage}"], inputs, weights)


def page(found: dict[str, Any]) -> list[str]:
    """The results in Markdown."""
    simulated = [[name, f"{share:.1%}"] for name, share in found["five_ranks"].items()]
    measured = [
        [name, "-".join(map(str, v["stages"])), f"{v['planned']:.1%}", f"{v['simulated']:.1%}",
         f"{v['measured']:.1%}", f"{v['measured_processor']:.1%}", format_duration(v["seconds"]),
         f"{v['of_ceiling']:.1%}"]
        for name, v in found["two_ranks"].items()
    ]  # fmt: skip
    best = max(found["five_ranks"].values())
    return [
        "## Pipeline",
        "",
        "Simulated utilisation of 5 ranks whose stages are equal and whose forward, backward for"
        " inputs and backward for weights take equally long; sending takes no time:",
        "",
        *table(["schedule, micro-batches", "utilisation"], simulated),
        "",
        f"Best {best:.1%} (goal 95 %).",
        "",
        f"Real: 2 ranks of one thread, 8 layers of width 256, {MICRO_BATCHES} micro-batches of 512"
        " tokens, schedules taken in turn. A rank is busy inside its stages' forward and backward"
        " calls (wall time; in the next column the CPU time of the same calls, which leaves out"
        " what other processes took). `planned` is the plan's utilisation before anything ran,"
        " `simulated` the same order with the measured costs of the stages. The ceiling is two"
        " ranks that compute the same stages and never communicate, in turn with the steps.",
        "",
        *table(["schedule", "layers", "planned", "simulated", "measured", "CPU time", "step",
                "throughput of the ceiling's"], measured),
        "",
    ]  # fmt: skip


def balance_page(found: dict[str, Any]) -> list[str]:
    """The results in Markdown."""
    rows = [
        [name, "-".join(map(str, v["stages"])), f"{v['simulated']:.1%}", f"{v['measured']:.1%}",
         format_duration(v["planned_seconds"]), format_duration(v["seconds"])]
        for name, v in found["cuts"].items()
    ]  # fmt: skip
    return [
        "## Balance",
        "",
        "A head with 8192 tokens is as much work as three of the 8 layers of width 256. Two stages,"
        " 1F1B, cuts taken in turn:",
        "",
        *table(["cut", "layers", "utilisation simulated", "measured", "step planned", "measured"],
               rows),
        "",
        f"Gain in throughput of the balanced cut: planned {found['simulated_gain']:.1%}, simulated"
        f" from measured costs {found['simulated_gain_measured_costs']:.1%}, measured"
        f" {found['measured_gain']:.1%} (goal 12 %).",
        "",
    ]  # fmt: skip
