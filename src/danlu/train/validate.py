"""Proof of a layout at small scale, before a cluster is rented.

The plan's layout is reduced to ranks that one machine carries (the same kinds of parallelism, the
same schedule, ZeRO stage, and some layers split or all), trained for a few steps at a small width,
and compared with one process that trains the same model on the same tokens.
"""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException

from danlu.base.errors import ConfigError, MachineError
from danlu.config.load import load
from danlu.data.loader import Batch
from danlu.hardware.comm import Comm, join_ranks
from danlu.planner.layout import Layout
from danlu.planner.plan import Plan
from danlu.planner.schedule import SCHEDULES
from danlu.train.build import build
from danlu.train.loop import clip, forward_backward, update
from danlu.train.planning import plan_run
from danlu.train.ranks import PEER_IS_GONE, RankEndedError, lost_a_peer, start_ranks

__all__ = ["ALLOWED", "Validation", "main", "validate"]

ALLOWED = 1e-5
"""Largest relative difference of a loss in fp32 that counts as equal."""
_SEQUENCE = 32
_TIMEOUT = 120.0


@dataclass(frozen=True)
class Validation:
    """What came out.

    Attributes:
        layout: that was run.
        losses, reference: of each step, over the layout's ranks and in one process.
        norms, reference_norms: global gradient norms of the same.
    """

    layout: Layout
    losses: tuple[float, ...]
    reference: tuple[float, ...]
    norms: tuple[float, ...]
    reference_norms: tuple[float, ...]

    @property
    def worst(self) -> float:
        """Largest relative difference of a loss."""
        return _worst(self.losses, self.reference)

    @property
    def passed(self) -> bool:
        """Whether the layout trains like one process."""
        return self.worst <= ALLOWED and _worst(self.norms, self.reference_norms) <= 100 * ALLOWED

    def text(self) -> str:
        """The finding in a few lines."""
        lines = [
            f"Ran as {self.layout.text()} on {self.layout.ranks} processes, at small width, fp32.",
            "",
            "  step  one process  this layout",
        ]
        for step, (one, other) in enumerate(zip(self.reference, self.losses, strict=True), 1):
            lines.append(f"  {step:>4}  {one:>11.6f}  {other:>11.6f}")
        verdict = "trains like one process" if self.passed else "does NOT train like one process"
        lines += ["", f"The layout {verdict}: losses differ by {self.worst:.1e} at most."]
        return "\n".join(lines)


def _worst(values: Sequence[float], reference: Sequence[float]) -> float:
    if not all(map(math.isfinite, (*values, *reference))):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))


def validate(plan: Plan, *, most_ranks: int = 8, steps: int = 5) -> Validation:
    """Runs a plan's layout in small and compares it with one process.

    Args:
        plan: for any cluster.
        most_ranks: processes to start at most; the layout is reduced to that.
        steps: to train.

    Raises:
        ConfigError: fewer processes than two for each axis of the layout.
        MachineError: a rank died.
    """
    small = reduced(plan.layout, most_ranks)
    words = _words(small, plan)
    alone = _train(words, Comm(), 1, steps)
    with tempfile.TemporaryDirectory(prefix="danlu-validate-") as folder:
        task = Path(folder) / "task.json"
        task.write_text(json.dumps({"words": words + _degrees(small), "steps": steps}))
        logs = Path(folder) / "logs"
        try:
            start_ranks("danlu.train.validate", str(task), small.ranks, logs, timeout=_TIMEOUT)
        except SignalException:
            raise KeyboardInterrupt from None
        except RankEndedError as ended:
            raise MachineError(f"a rank of {small.ranks} refused the layout ({ended}).") from None
        found = json.loads((Path(folder) / "found.json").read_text())
    return Validation(small, *(tuple(v) for v in (found[0], alone[0], found[1], alone[1])))


def reduced(layout: Layout, most: int) -> Layout:
    """The layout with degrees of 2 where they were larger, stages as many as `most` ranks carry.

    Raises:
        ConfigError: not even stages of 2.
    """
    tensor, data = min(layout.tensor, 2), min(layout.data, 2)
    least = tensor * data * min(layout.pipeline, 2)
    if least > most:
        raise ConfigError(
            "--ranks", f"{most} processes cannot carry {layout.text()}.", f"Use {least} or more."
        )
    pipeline = min(layout.pipeline, most // (tensor * data))
    chunks = layout.chunks
    return Layout(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        schedule=layout.schedule,
        stages=(1,) * (chunks * pipeline) if pipeline > 1 else (),
        zero=layout.zero if data > 1 else 0,
        offload=layout.offload,
        recompute=layout.recompute,
    )


def _words(small: Layout, plan: Plan) -> list[str]:
    """Overrides of a small model that the reduced layout divides, with as many micro-batches."""
    wanted = plan.layout
    layers = max(len(small.stages), 4)
    rounds = max(2, SCHEDULES[small.schedule].fewest_per_rank) * small.pipeline
    words = [
        "model.preset=tiny",
        f"model.layers={layers}",
        "model.hidden_size=32",
        f"model.heads={2 * small.tensor}",
        "model.head_size=8",
        "model.intermediate_size=64",
        f"model.sequence_length={_SEQUENCE}",
        f"model.tied_embeddings={str(plan.model.tied_embeddings).lower()}",
        "data_pipeline.tokenizer.type=bytes",
        f"train.batch_tokens={2 * rounds * small.data * _SEQUENCE}",
        "train.steps=100",
        "train.device=cpu",
        "precision.format=fp32",
        "launch.threads=1",
        f"launch.timeout={_TIMEOUT}",
    ]
    if wanted.tensor > 1 and not wanted.split_ends:
        words.append("tensor_parallel.split_layers=::2")
    if wanted.tensor > 1:
        shared = str(wanted.sequence_parallel).lower()
        words.append(f"tensor_parallel.sequence_parallel={shared}")
    return words


def _degrees(small: Layout) -> list[str]:
    words = [
        f"data_parallel.degree={small.data}",
        f"tensor_parallel.degree={small.tensor}",
        f"pipeline_parallel.stages={small.pipeline}",
        f"zero_optimization.stage={small.zero}",
        f"zero_optimization.offload_ratio={small.offload}",
        f"memory.recompute={small.recompute}",
    ]
    if small.pipeline > 1:
        words.append(f"pipeline_parallel.schedule={small.schedule}")
    return words


def _train(words: list[str], comm: Comm, world: int, steps: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a few steps on drawn tokens, the same for any layout."""
    config = load(None, *words)
    plan = plan_run(config, world=world)
    with tempfile.TemporaryDirectory(prefix="danlu-validate-") as scratch:
        learner = build(config, plan, comm, scratch=Path(scratch), note=print)
    draw = torch.Generator().manual_seed(config.train.seed)
    losses, norms = [], []
    for _ in range(steps):
        size = (plan.batch_sequences, plan.model.sequence_length + 1)
        tokens = torch.randint(0, plan.model.vocab_size, size, generator=draw)
        mine = tokens.chunk(plan.layout.data)[learner.ranks.copy]
        pieces = torch.split(mine, plan.micro_batch)
        loss = forward_backward(learner, [Batch(t[:, :-1], t[:, 1:], None) for t in pieces])
        norms.append(float(clip(learner)))
        update(learner, plan.learning_rate)
        losses.append(float(comm.sum(loss.double())))
    return losses, norms


def main(argument: str) -> int:
    """One rank; the argument is the path of its task. Returns the exit code."""
    path = Path(argument)
    task: dict[str, Any] = json.loads(path.read_text())
    comm = join_ranks("cpu", timeout_seconds=_TIMEOUT)
    try:
        found = _train(task["words"], comm, comm.world, task["steps"])
    except RuntimeError as error:
        if not lost_a_peer(error):
            raise
        return PEER_IS_GONE
    if comm.first:
        path.with_name("found.json").write_text(json.dumps(found))
    comm.close()
    return 0
