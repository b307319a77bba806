"""The training loop."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from danlu.base.facts import StepReport
from danlu.data.loader import Batch, Loader
from danlu.monitor.meter import Meter
from danlu.parallel.gradients import clip_gradients, combine_gradients
from danlu.train.balance import Balancer
from danlu.train.build import Learner
from danlu.train.control import StopRequest

__all__ = ["Ended", "clip", "forward_backward", "on_device", "train_steps", "update"]


class Ended(NamedTuple):
    """The last step whose update was done, and why no other followed.

    `reason` is `done`, `interrupted`, `nan`, or `replan` where another plan is wanted.
    """

    step: int
    reason: str


def train_steps(
    learner: Learner,
    loader: Loader,
    meter: Meter,
    stop: StopRequest,
    *,
    first: int,
    check_every: int,
    report_every: int,
    on_report: Callable[[StepReport], None],
    after_step: Callable[[int], bool],
    balancer: Balancer | None = None,
) -> Ended:
    """Trains after step `first`, up to the plan's last; says where and why it ended.

    Args:
        learner: what is trained.
        loader: its batches, at the position of step `first`.
        meter: measures.
        stop: a wish to end after the step.
        first: steps already done.
        check_every: steps after which ranks look at the loss and agree on a wish to stop.
        report_every: steps between two reports (which make the host wait for the device).
        on_report: given each report.
        after_step: called after each step (its update is done) with its number; says whether
            training should pause for another plan.
        balancer: deals micro-batches by the speed of the copies.
    """
    plan = learner.plan
    for step in range(first + 1, plan.steps + 1):
        began = time.perf_counter()
        batches = loader.next_step()
        waited = time.perf_counter() - began
        rate = plan.learning_rate * learner.schedule.factor(step - 1)
        loss = forward_backward(learner, batches, balancer)
        norm = clip(learner)
        meter.add(loss, tokens=plan.batch_tokens, data_seconds=waited)
        stopping, due = False, step % report_every == 0 or step in (first + 1, plan.steps)
        if due or step % check_every == 0:
            report, stopping = meter.collect(step, norm, rate, stop=stop.wanted)
            finite = meter.finite(report)
            if due or stopping or not finite:
                on_report(report)
                meter.restart()
            if not finite:  # before the update: the weights are still good
                return Ended(step - 1, "nan")
        update(learner, rate)
        if balancer is not None:
            balancer.after_step()
        replan = after_step(step)
        if stopping:
            return Ended(step, "interrupted")
        if replan:
            return Ended(step, "replan")
    return Ended(max(first, plan.steps), "done")


def forward_backward(
    learner: Learner, batches: Sequence[Batch], balancer: Balancer | None = None
) -> Tensor:
    """Gradients of a step's mean loss; returns this rank's share of that mean.

    Averaging over copies of the model divides by their number, so each copy's loss carries that
    factor.
    """
    layout = learner.plan.layout
    scale = layout.data / learner.plan.batch_tokens
    moved = [on_device(batch, learner.device.torch) for batch in batches]
    if learner.average is not None:
        learner.average.begin(len(moved))
    if learner.pipeline is not None:
        total = learner.pipeline.run(moved, scale)
    else:
        total = torch.zeros((), device=learner.device.torch)
        for index, (ids, targets, starts) in enumerate(moved):
            last, began = index == len(moved) - 1, time.perf_counter()
            with learner.micro_batch(last=last):
                loss = learner.forward(ids, targets, starts, scale)
                loss.backward()
            if balancer is not None and not last:
                learner.device.synchronize()
                balancer.add(time.perf_counter() - began)
            total += loss.detach()
    if learner.average is not None:
        learner.average.finish()
    combine_gradients(learner.model, learner.ranks, learner.bucket, twice=learner.twice)
    return total / (layout.data * layout.tensor)


def on_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, targets and document starts of a batch, on `device`."""
    starts = None if batch.starts_bt is None else batch.starts_bt.to(device)
    return batch.ids_bt.to(device), batch.targets_bt.to(device), starts


def clip(learner: Learner) -> Tensor:
    """The global gradient norm, before gradients are scaled down to the limit."""
    if learner.offload is not None:
        learner.offload.fetch()
    return clip_gradients(learner.model, learner.ranks, learner.clip, twice=learner.twice)


def update(learner: Learner, rate: float) -> None:
    """One optimizer step at learning rate `rate`; gradients are gone afterwards."""
    for group in learner.optimizer.param_groups:
        group["lr"] = rate
    (learner.offload or learner.optimizer).step()
    learner.optimizer.zero_grad(set_to_none=True)
