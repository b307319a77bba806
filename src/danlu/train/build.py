"""From a Plan to the parts of a run, in one fixed order."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from danlu.config.run import RunConfig
from danlu.data.corpus import Corpus
from danlu.data.loader import Loader, training_order
from danlu.hardware.comm import Comm
from danlu.hardware.device import Device, open_device
from danlu.hardware.seed import generator
from danlu.kernels.dispatch import Ops, choose_ops, torch_ops
from danlu.models.transformer import Transformer
from danlu.optim.optimizers.adamw import build_adamw
from danlu.optim.schedules._base import SCHEDULES, Schedule
from danlu.planner.plan import Plan
from danlu.precision.formats._base import FORMATS

__all__ = ["Learner", "build", "build_loader", "build_model", "document_end"]


@dataclass(frozen=True)
class Learner:
    """What learns: a model on its device, with its update rule.

    Attributes:
        plan: the numbers.
        comm: all ranks.
        device: what this rank computes on.
        model: the transformer itself.
        forward: what the loop calls: the model, or the model that averages gradients over ranks.
        optimizer, schedule: the update rule and its learning rate.
        clip: largest global gradient norm, or None.
    """

    plan: Plan
    comm: Comm
    device: Device
    model: Transformer
    forward: nn.Module
    optimizer: torch.optim.AdamW
    schedule: Schedule
    clip: float | None

    def without_averaging(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, backward passes add to this rank's gradients alone (all but a step's last)."""
        if isinstance(self.forward, DistributedDataParallel):
            return self.forward.no_sync()
        return contextlib.nullcontext()


def build(config: RunConfig, plan: Plan, comm: Comm, *, note: Callable[[str], None]) -> Learner:
    """Builds what learns, in one fixed order; the model has its first weights.

    Args:
        config: for what the plan does not decide (optimizer constants, seed).
        plan: the numbers.
        comm: all ranks.
        note: told what a person should know (a kernel that falls back).
    """
    kind = plan.cluster.device.kind
    device = open_device(kind, threads=plan.threads, index=comm.local_rank)
    ops = choose_ops(plan.cluster.device, note) if plan.backend == "native" else torch_ops()
    model = build_model(plan, ops, device.torch)
    model.initialize(_initializer(config.train.seed))
    if plan.compile:
        for block in model.layers.values():
            block.compile(dynamic=False)
    return Learner(
        plan=plan,
        comm=comm,
        device=device,
        model=model,
        forward=_averaged(model, config, comm, device),
        optimizer=build_adamw(model.named_parameters(), config.optimizer, plan.learning_rate),
        schedule=_schedule(config, plan),
        clip=config.optimizer.gradient_clip,
    )


def build_model(plan: Plan, ops: Ops, device: torch.device) -> Transformer:
    """The transformer on its device, its weights without values yet."""
    number_format = FORMATS.find(plan.format)
    with device:
        return Transformer(plan.model, ops, number_format.dtype)


def _initializer(seed: int) -> Callable[[str, Tensor, float], None]:
    def draw(name: str, weight: Tensor, deviation: float) -> None:
        numbers = torch.empty(weight.shape)  # on the CPU: the same first weights on every device
        weight.copy_(numbers.normal_(0.0, deviation, generator=generator(seed, "weights", name)))

    return draw


def _averaged(model: Transformer, config: RunConfig, comm: Comm, device: Device) -> nn.Module:
    if comm.world == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=None if device.kind == "cpu" else [device.torch.index],
        bucket_cap_mb=config.communication.bucket / 2**20,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )


def _schedule(config: RunConfig, plan: Plan) -> Schedule:
    schedule = SCHEDULES.find(config.schedule.type)
    return schedule(
        steps=plan.steps,
        warmup_steps=plan.warmup_steps,
        decay_fraction=config.schedule.decay_fraction,
        final_factor=config.schedule.final_factor,
    )


def document_end(config: RunConfig, corpus: Corpus) -> int | None:
    """The end-of-document token where attention keeps inside documents, else None."""
    return corpus.tokenizer.end if config.data_pipeline.attention_within_documents else None


def build_loader(
    config: RunConfig, plan: Plan, corpus: Corpus, comm: Comm, *, position: int = 0
) -> Loader:
    """This rank's batches, from the sample at `position` on."""
    stream = corpus.stream("train")
    length = plan.model.sequence_length
    return Loader(
        stream,
        training_order(stream, sequence_length=length, seed=config.train.seed),
        sequence_length=length,
        batch_sequences=plan.batch_sequences,
        micro_batch=plan.micro_batch,
        rank=comm.rank,
        world=comm.world,
        position=position,
        prefetch=config.data_pipeline.prefetch,
        document_starts=document_end(config, corpus),
    )
