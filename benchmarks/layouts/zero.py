"""ZeRO: bytes of state that a rank holds, against theory; its price in throughput; offload."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from benchmarks.layouts.ranks import (
    Sample,
    Trial,
    median_ratio,
    median_seconds,
    model,
    peak_resident_bytes,
    resident_bytes,
    run,
)
from benchmarks.results import table
from danlu.base.units import format_bytes, format_duration
from danlu.hardware.comm import Comm
from danlu.train.build import Learner
from danlu.train.loop import forward_backward

MODEL = model(8, 320, 5, 896, 2048, 256)
STAGES = (0, 1, 2, 3)
OFFLOADS = (0.0, 0.3, 1.0)


def measure(*, ranks: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """All of it, as JSON."""
    held: dict[str, dict[str, Any]] = {str(stage): {} for stage in STAGES}
    for n in ranks:
        print(f"zero: state held by each of {n} ranks", flush=True)
        for stage, one in run(n, hold, None)[0].items():
            held[stage][str(n)] = one
    print("zero: throughput of the stages", flush=True)
    speed = run(2, race, {"layouts": {str(z): _two(z) for z in STAGES}, "rounds": rounds})[0]
    peaks = {}
    for stage in STAGES:
        print(f"zero: peak memory of stage {stage}", flush=True)
        peaks[str(stage)] = max(run(2, peak, _two(stage)))
    print("zero: offload", flush=True)
    names = {str(share): _offload(share) for share in OFFLOADS}
    offload_speed = run(1, race, {"layouts": names, "rounds": rounds})[0]
    offload = {
        name: run(1, offloaded, words)[0] | offload_speed[name] for name, words in names.items()
    }
    return {"held": held, "speed": speed, "peak_bytes": peaks, "offload": offload}


def _two(stage: int) -> list[str]:
    """8192 tokens a step on two copies, one micro-batch each."""
    return [*MODEL, f"zero_optimization.stage={stage}", "data_parallel.degree=2",
            "train.batch_tokens=8192", "train.micro_batch=16"]  # fmt: skip


def _offload(share: float) -> list[str]:
    return [*MODEL, "train.batch_tokens=4096", f"zero_optimization.offload_ratio={share}"]


def hold(comm: Comm, _: None) -> dict[str, Any]:
    """Bytes held at the end of the first of two micro-batches' backward, by stage."""
    found = {}
    for stage in STAGES if comm.world > 1 else (0,):
        words = [*MODEL, f"zero_optimization.stage={stage}", f"data_parallel.degree={comm.world}",
                 f"train.batch_tokens={512 * comm.world}", "train.micro_batch=1"]  # fmt: skip
        trial = Trial(words, comm)
        trial.step()  # the optimizer's moments come to be with the first update
        first, last = trial.batches
        learner, scale = trial.learner, 1 / trial.plan.batch_tokens
        with learner.micro_batch(last=False):
            learner.forward(first.ids_bt, first.targets_bt, None, scale).backward()
        bytes_ = _held(learner)
        with learner.micro_batch(last=True):
            learner.forward(last.ids_bt, last.targets_bt, None, scale).backward()
        at_update = _held(learner)
        trial.update()
        theory = _theory(trial.plan.parameters, stage, comm.world)
        found[str(stage)] = {"bytes": bytes_, "theory": theory, "at_update": at_update}
    return found if comm.world > 1 else {str(stage): found["0"] for stage in STAGES}


def _theory(parameters: int, stage: int, ranks: int) -> float:
    """fp32 weights, gradients and moments, and bf16 weights where those are gathered."""
    share = ranks if stage else 1
    weights = 4 / share + (2 if stage in (1, 2) else 0)
    gradients = 4 / ranks if stage >= 2 else 4
    return parameters * (weights + gradients + 8 / share)


def _held(learner: Learner) -> int:
    """Bytes of all storages behind weights, gradients and moments that are alive now."""
    alive = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _state(learner)}
    return sum(alive.values())


def _state(learner: Learner) -> Iterator[torch.Tensor]:
    for parameter in learner.model.parameters():
        yield from _local([parameter, parameter.grad])
    for values in learner.optimizer.state.values():
        yield from _local(values.values())
    for module in learner.model.modules():
        groups = module._get_fsdp_state()._fsdp_param_groups if learner.sharded and hasattr(
            module, "_get_fsdp_state") else ()  # fmt: skip
        for part in (p for group in groups for p in group.fsdp_params):
            whole = getattr(part, "_unsharded_param", None)
            yield from _local([part._sharded_param_data, part.sharded_param.grad])
            yield from _local([part.unsharded_accumulated_grad])
            yield from _local([*part.all_gather_outputs, whole, getattr(whole, "grad", None)])


def _local(tensors: Iterable[Any]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            yield tensor._local_tensor
        elif tensor is not None:
            yield tensor


def race(comm: Comm, task: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds of a step of each layout, taken in turn, and throughput against the first."""
    trials = {name: Trial(words, comm) for name, words in task["layouts"].items()}
    steps: dict[str, list[Sample]] = {name: [] for name in trials}
    for turn in range(task["rounds"] + 1):
        for name, trial in trials.items():
            taken = trial.step()
            if turn:
                steps[name].append(taken)
    first = steps[next(iter(steps))]
    return {
        name: {"seconds": median_seconds(all_), "throughput": median_ratio(first, all_)}
        for name, all_ in steps.items()
    }


def peak(comm: Comm, words: list[str]) -> int:
    """The most resident bytes of this process over three steps."""
    trial = Trial(words, comm)
    for _ in range(3):
        trial.step()
    return peak_resident_bytes()


def offloaded(comm: Comm, words: list[str]) -> dict[str, float]:
    """Resident bytes at the end of backward, and the state's in and out of memory."""
    trial = Trial(words, comm)
    resident = []
    for _ in range(3):
        forward_backward(trial.learner, trial.batches)
        time.sleep(0.2)
        resident.append(resident_bytes())
        trial.update()
    there = trial.learner.offload
    return {
        "resident": statistics.median(resident[1:]),
        "in_file": there.bytes if there else 0,
        "state": 8 * trial.plan.parameters,
    }


def page(found: dict[str, Any]) -> list[str]:
    """The results in Markdown."""
    held = found["held"]
    ranks = list(held["0"])
    errors = [abs(v["bytes"] / v["theory"] - 1) for row in held.values() for v in row.values()]
    rows = [
        [f"stage {stage}", *(f"{format_bytes(v['bytes'])} ({v['bytes'] / v['theory'] - 1:+.1%})"
                             for v in row.values())]
        for stage, row in held.items()
    ]  # fmt: skip
    state = {stage: row["2"]["at_update"] for stage, row in held.items() if "2" in row}
    prices = [
        [f"stage {stage}", format_duration(s["seconds"]), f"{s['throughput']:.1%}",
         f"{1 - state[stage] / state['0']:.0%}" if stage in state else "",
         format_bytes(found["peak_bytes"][stage])]
        for stage, s in found["speed"].items()
    ]  # fmt: skip
    offload = [
        [f"{float(share):.0%}", format_bytes(int(v["resident"])), format_bytes(v["in_file"]),
         format_duration(v["seconds"]), f"{v['throughput']:.1%}"]
        for share, v in found["offload"].items()
    ]  # fmt: skip
    return [
        "## ZeRO",
        "",
        "State of a rank (10 M weights, bf16): fp32 weights, gathered bf16 weights, gradients and"
        " both moments, counted as live storages when the first of two micro-batches has ended its"
        " backward; in brackets against theory. Theory, in bytes a weight on N ranks: stage 0"
        " 4 + 4 + 8; stage 1 4/N + 2 + 4 + 8/N; stage 2 4/N + 2 + 4/N + 8/N; stage 3 16/N. One rank"
        " has nothing to shard.",
        "",
        *table(["", *(f"{n} ranks" for n in ranks)], rows),
        "",
        f"Largest difference from theory: {max(errors):.1%} (goal 5 %).",
        "",
        "Price on 2 ranks of one thread, 8192 tokens a step, one micro-batch each, stages taken in"
        " turn; state is what a rank holds when a step's last backward has ended (goal of stage 2:"
        " 40 % less at 97 % of the throughput):",
        "",
        *table(["", "step", "throughput of stage 0's", "less state", "peak of the process"],
               prices),
        "",
        "Offload of the optimizer's state to a file, one rank of one thread; resident memory of the"
        " process at the end of backward:",
        "",
        *table(["offloaded", "resident", "in the file", "step", "throughput"], offload),
        "",
    ]  # fmt: skip
