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

__all__ = ["Parts", "build", "build_model"]


@dataclass
class Parts:
    """What the loop works with.

    Attributes:
        plan: the numbers.
        comm: all ranks.
        device: what this rank computes on.
        model: the transformer itself.
        forward: what the loop calls: the model, or the model with its gradients averaged over
            ranks. optimizer, schedule: the update rule and its learning rate.
        loader: batches of this rank.
        corpus: the prepared text.
        document_end: the end-of-document token where attention keeps inside documents.
    """

    plan: Plan
    comm: Comm
    device: Device
    model: Transformer
    forward: nn.Module
    optimizer: torch.optim.AdamW
    schedule: Schedule
    loader: Loader
    corpus: Corpus
    document_end: int | None

    def without_averaging(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, backward passes add to this rank's gradients alone (all but a step's last)."""
        if isinstance(self.forward, DistributedDataParallel):
            return self.forward.no_sync()
        return contextlib.nullcontext()


def build(
    config: RunConfig,
    plan: Plan,
    corpus: Corpus,
    comm: Comm,
    *,
    position: int = 0,
    note: Callable[[str], None],
) -> Parts:
    """Builds every part of a run; the model has its first weights.

    Args:
        config: for what the plan does not decide (optimizer constants, seed).
        plan: the numbers.
        corpus: the prepared text.
        comm: all ranks.
        position: samples that the run has already read.
        note: told what a person should know (a kernel that falls back).
    """
    kind = plan.cluster.device.kind
    end = corpus.tokenizer.end if config.data_pipeline.attention_within_documents else None
    device = open_device(kind, threads=plan.threads, index=comm.local_rank)
    ops = choose_ops(plan.cluster.device, note) if plan.backend == "native" else torch_ops()
    model = build_model(plan, ops, device.torch)
    model.initialize(_initializer(config.train.seed))
    if plan.compile:
        for block in model.layers:
            block.compile(dynamic=False)
    return Parts(
        plan=plan,
        comm=comm,
        device=device,
        model=model,
        forward=_averaged(model, config, comm, device),
        optimizer=build_adamw(model.named_parameters(), config.optimizer, plan.learning_rate),
        schedule=_schedule(config, plan),
        document_end=end,
        loader=_loader(config, plan, corpus, comm, position, end),
        corpus=corpus,
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


def _loader(
    config: RunConfig, plan: Plan, corpus: Corpus, comm: Comm, position: int, end: int | None
) -> Loader:
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
        document_starts=end,
    )
