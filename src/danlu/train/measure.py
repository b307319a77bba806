"""What predictions leave open, measured on the machine: layouts, and the time of layers."""

import gc
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from danlu.config.run import RunConfig
from danlu.data.loader import Batch
from danlu.hardware.comm import Comm
from danlu.hardware.device import open_device
from danlu.kernels.dispatch import choose_ops, torch_ops
from danlu.models.transformer import Transformer
from danlu.planner.plan import Decision, Plan
from danlu.planner.search import pin_layout
from danlu.precision.formats._base import FORMATS
from danlu.train.balance import LayerSeconds
from danlu.train.build import Learner, build
from danlu.train.loop import clip, forward_backward, update
from danlu.train.planning import plan_run

__all__ = ["Measured", "explained", "fastest", "measure_layers", "time_steps"]


class Measured(NamedTuple):
    """A layout's plan with the seconds that its step took."""

    plan: Plan
    seconds: float


def fastest(
    config: RunConfig, plan: Plan, comm: Comm, *, scratch: Path, count: int, steps: int = 3
) -> list[Measured]:
    """Trains the best predicted layouts of a plan for a few steps each on drawn tokens.

    Args:
        config: what the user wants.
        plan: with its alternatives, the best first.
        comm: all ranks; they all call this.
        scratch: as for `build`.
        count: layouts to measure.
        steps: of each, after one that is not counted.

    Returns:
        What was measured, the fastest first; the same on every rank.
    """
    found = []
    for other in plan.alternatives[:count]:
        chosen = pin_layout(config, other)
        candidate = plan_run(chosen, plan.cluster, world=comm.world, before=plan)
        learner = build(config, candidate, comm, scratch=scratch, note=_quiet)
        seconds = comm.largest(statistics.median(time_steps(learner, steps)))
        why = f"the fastest of {count} that were tried"
        found.append(Measured(explained(candidate, plan, why), seconds))
        del learner
        gc.collect()  # wrapped models are cyclic
    return sorted(found, key=lambda m: m.seconds)


def explained(plan: Plan, before: Plan, reason: str) -> Plan:
    """A plan for a layout that was fixed, with the reasons of the plan that left it open.

    Args:
        plan: whose numbers hold.
        before: whose reasons, runners-up and rejected families are kept.
        reason: of the numbers that differ.
    """
    now = {d.key: d.value for d in plan.decisions}
    kept = tuple(
        d if now.get(d.key, d.value) == d.value else Decision(d.key, now[d.key], reason)
        for d in before.decisions
    )
    known = {d.key for d in kept}
    added = tuple(replace(d, reason=reason) for d in plan.decisions if d.key not in known)
    mine = [a for a in before.alternatives if a.layout == plan.layout] or list(plan.alternatives)
    others = [a for a in before.alternatives if a.layout != plan.layout]
    return replace(
        plan,
        decisions=kept + added,
        alternatives=(*mine[:1], *others),
        rejected=before.rejected,
    )


def measure_layers(plan: Plan, comm: Comm) -> LayerSeconds:
    """Seconds of a micro-batch, forward and backward, in the embedding, one block, and the head.

    Every rank measures at the same time, as they will compute; the mean over ranks. Tensor
    parallelism is left out: it shortens all of them alike.

    Args:
        plan: for its model, micro-batch, format and kernels.
        comm: all ranks; they all call this.
    """
    device = open_device(plan.cluster.device.kind, threads=plan.threads, index=comm.local_rank)
    ops = choose_ops(plan.cluster.device, _quiet) if plan.backend == "native" else torch_ops()
    with device.torch:
        model = Transformer(replace(plan.model, layers=3), ops, FORMATS.find(plan.format).dtype)
        model.initialize(_draw)
        ids = torch.randint(
            0, plan.model.vocab_size, (plan.micro_batch, plan.model.sequence_length)
        )
        stream = torch.randn(ids.numel(), plan.model.hidden_size, dtype=model.dtype)
    inputs = (ids, stream.requires_grad_(), stream)
    seconds = torch.zeros(3, dtype=torch.float64)
    for number, given in enumerate(inputs):
        segment = model.segment([number])
        taken = []
        for _ in range(4):
            comm.wait()
            began = time.perf_counter()
            segment(given, ids, None, 1.0).float().sum().backward()
            device.synchronize()
            taken.append(time.perf_counter() - began)
        seconds[number] = statistics.median(taken[1:])
    first, block, last = (comm.sum(seconds) / comm.world).tolist()
    return LayerSeconds(max(first - block, 0.0), block, max(last - block, 0.0))


def time_steps(learner: Learner, steps: int) -> list[float]:
    """Seconds of each of some whole training steps on drawn tokens, after one of warm-up."""
    plan, comm = learner.plan, learner.ranks.comm
    draw = torch.Generator().manual_seed(learner.ranks.copy)
    size = (plan.micro_batch, plan.model.sequence_length)
    seconds = []
    for _ in range(steps + 1):
        pieces = [
            torch.randint(0, plan.model.vocab_size, size, generator=draw)
            for _ in range(plan.accumulation)
        ]
        comm.wait()
        began = time.perf_counter()
        forward_backward(learner, [Batch(ids, ids, None) for ids in pieces])
        clip(learner)
        update(learner, 0.0)
        learner.device.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _draw(_name: str, weight: Tensor, deviation: float) -> None:
    weight.normal_(0.0, deviation)


def _quiet(text: str) -> None:
    """Kernels were spoken of once already."""
