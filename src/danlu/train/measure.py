"""The best predicted layouts, measured on the real machine; the fastest is kept."""

import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from danlu.config.run import RunConfig
from danlu.data.loader import Batch
from danlu.hardware.comm import Comm
from danlu.planner.plan import Plan
from danlu.planner.search import pin_layout
from danlu.train.build import Learner, build
from danlu.train.loop import clip, forward_backward, update
from danlu.train.planning import plan_run

__all__ = ["Measured", "fastest", "time_steps"]


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
        tokens = candidate.batch_tokens / plan.batch_tokens
        found.append(Measured(candidate, seconds / tokens))
        del learner
    return sorted(found, key=lambda m: m.seconds)


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


def _quiet(text: str) -> None:
    """Kernels were spoken of once already."""
