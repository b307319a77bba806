"""The training loop."""

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from danlu.base.facts import StepReport
from danlu.data.loader import Batch
from danlu.monitor.meter import Meter
from danlu.train.build import Parts
from danlu.train.control import StopRequest

__all__ = ["Ended", "train_steps"]


class Ended(NamedTuple):
    """The last step whose update was done, and why no other followed.

    `reason` is `done`, `interrupted` or `nan`.
    """

    step: int
    reason: str


def train_steps(
    parts: Parts,
    meter: Meter,
    stop: StopRequest,
    *,
    first: int,
    clip: float | None,
    report_every: int,
    on_report: Callable[[StepReport], None],
    after_step: Callable[[int], None],
) -> Ended:
    """Trains after step `first`, up to the plan's last; says where and why it ended.

    Args:
        parts: what is trained.
        meter: measures.
        stop: a wish to end after the step.
        first: steps already done.
        clip: largest global gradient norm.
        report_every: steps between two reports (which make the host wait for the device).
        on_report: given each report.
        after_step: called after each step (its update is done) with its number.
    """
    for step in range(first + 1, parts.plan.steps + 1):
        began = time.perf_counter()
        batches = parts.loader.next_step()
        waited = time.perf_counter() - began
        rate = parts.plan.learning_rate * parts.schedule.factor(step - 1)
        for group in parts.optimizer.param_groups:
            group["lr"] = rate
        loss = _forward_backward(parts, batches)
        norm = _clip(parts, clip)
        meter.add(loss, tokens=parts.plan.batch_tokens, data_seconds=waited)
        stopping = False
        if step % report_every == 0 or step in (first + 1, parts.plan.steps):
            report, stopping = meter.collect(step, norm, rate, stop=stop.wanted)
            on_report(report)
            if not meter.finite(report):  # before the update: the weights are still good
                return Ended(step - 1, "nan")
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        after_step(step)
        if stopping:
            return Ended(step, "interrupted")
    return Ended(max(first, parts.plan.steps), "done")


def _forward_backward(parts: Parts, batches: tuple[Batch, ...]) -> Tensor:
    """Gradients of a step's mean loss; returns this rank's share of that mean.

    Averaging over ranks divides by their number, so each rank's loss carries that factor.
    """
    device, world = parts.device.torch, parts.comm.world
    scale = world / parts.plan.batch_tokens
    total = torch.zeros((), device=device)
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        starts = None if batch.starts_bt is None else batch.starts_bt.to(device)
        with contextlib.nullcontext() if last else parts.without_averaging():
            ids, targets = batch.ids_bt.to(device), batch.targets_bt.to(device)
            loss = parts.forward(ids, targets, starts, scale)
            loss.backward()
        total += loss.detach()
    return total / world


def _clip(parts: Parts, limit: float | None) -> Tensor:
    """The global gradient norm, before gradients are scaled down to `limit` where it is larger."""
    parameters = list(parts.model.parameters())
    return torch.nn.utils.clip_grad_norm_(parameters, torch.inf if limit is None else limit)
