"""From a Plan to the parts of a run, in one fixed order."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from danlu.base.files import explain_disk_full
from danlu.config.run import RunConfig
from danlu.data.corpus import Corpus
from danlu.data.loader import Loader, training_order
from danlu.hardware.cluster import usable_memory
from danlu.hardware.comm import Comm, launched_nodes
from danlu.hardware.device import Device, open_device
from danlu.hardware.seed import generator
from danlu.kernels.dispatch import Ops, choose_ops, torch_ops
from danlu.kernels.recompute import selective_ops
from danlu.models.transformer import DIVIDED, PLACEMENTS, Transformer
from danlu.optim.optimizers.adamw import build_adamw
from danlu.optim.schedules._base import SCHEDULES, Schedule
from danlu.parallel import zero
from danlu.parallel.gradients import CopyAverage
from danlu.parallel.mesh import Ranks, arrange, fill
from danlu.parallel.offload import FileOffload, HostOffload, Offload
from danlu.parallel.pipeline import Pipeline
from danlu.parallel.tensor import split_model, split_ops
from danlu.planner.layout import Layout
from danlu.planner.plan import Plan
from danlu.precision.formats._base import FORMATS

__all__ = ["Learner", "build", "build_loader", "build_model", "document_end"]


@dataclass(frozen=True)
class Learner:
    """What learns: a model on its devices, with its update rule.

    Attributes:
        plan: the numbers.
        ranks: this rank's place among all.
        device: what this rank computes on.
        model: the transformer, or the part of it that this rank holds.
        forward: what computes a micro-batch's loss where this rank holds all layers: the model, or
            the model that averages gradients over ranks.
        pipeline: what runs a whole step where layers are cut into stages, else None.
        sharded: modules whose weights ZeRO has sharded over ranks.
        average: what averages gradients over copies of a model that is shared among ranks, where
            neither `forward` nor ZeRO does.
        twice: the weight that the first and the last pipeline rank both hold, on these, else None.
        optimizer, schedule: the update rule and its learning rate.
        offload: the part of the optimizer's state that lives off the device, or None.
        clip: largest global gradient norm, or None.
        bucket: bytes in which gradients travel.
    """

    plan: Plan
    ranks: Ranks
    device: Device
    model: Transformer
    forward: nn.Module
    pipeline: Pipeline | None
    sharded: tuple[nn.Module, ...]
    average: CopyAverage | None
    twice: nn.Parameter | None
    optimizer: torch.optim.AdamW
    offload: Offload | None
    schedule: Schedule
    clip: float | None
    bucket: int

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around one micro-batch: ranks exchange gradients in the last one, if they can wait."""
        if self.sharded:
            zero.before_micro_batch(self.model, self.plan.layout.zero, last=last)
        if isinstance(self.forward, DistributedDataParallel) and not last:
            return self.forward.no_sync()
        return contextlib.nullcontext()


def build(
    config: RunConfig, plan: Plan, comm: Comm, *, scratch: Path, note: Callable[[str], None]
) -> Learner:
    """Builds what learns, in one fixed order; the model has its first weights.

    Args:
        config: for what the plan does not decide (optimizer constants, seed).
        plan: the numbers.
        comm: all ranks.
        scratch: a folder for state that does not stay in memory.
        note: told what a person should know (a kernel that falls back).
    """
    kind = plan.cluster.device.kind
    device = open_device(kind, threads=plan.threads, index=comm.local_rank)
    ranks = arrange(plan.layout, comm)
    ops = (
        choose_ops(plan.cluster.device, note, required=config.kernels.backend == "native")
        if plan.backend == "native"
        else torch_ops()
    )
    model = build_model(plan, ops, device.torch, ranks)
    segments = _segments(model, ranks)
    if plan.compile:
        for block in model.layers.values():
            block.compile(dynamic=False)
    sharded: tuple[nn.Module, ...] = ()
    if plan.layout.zero:
        sharded = tuple(segments.values())
        zero.shard_state(sharded, model.layers.values(), ranks, model.dtype)
    for module in (model, *segments.values()):
        module.to(device.torch)
    if sharded and plan.model.tied_embeddings and model.embed_tokens and model.lm_head:
        zero.tie(model.embed_tokens, model.lm_head, sharded)
    model.initialize(_initializer(config.train.seed))
    pipeline = None
    if plan.layout.pipeline > 1:
        pipeline = Pipeline(segments, ranks, plan.accumulation, device.torch)
    optimizer = build_adamw(model.named_parameters(), config.optimizer, plan.learning_rate)
    return Learner(
        plan=plan,
        ranks=ranks,
        device=device,
        model=model,
        forward=_averaged(model, config, ranks, device),
        pipeline=pipeline,
        sharded=sharded,
        average=_average(segments, config, ranks),
        twice=_twice(model, ranks),
        optimizer=optimizer,
        offload=_offload(
            optimizer, plan.layout.offload, device, scratch / f"optimizer-{comm.rank}", comm.world
        ),
        schedule=_schedule(config, plan),
        clip=config.optimizer.gradient_clip,
        bucket=config.communication.bucket,
    )


def build_model(plan: Plan, ops: Ops, device: torch.device, ranks: Ranks) -> Transformer:
    """The part of the transformer that this rank holds, its weights without values yet.

    Where ranks share the model it is made on the CPU, whose memory is not touched before weights
    have values: no rank needs room for more than its part.
    """
    layout, dtype = plan.layout, FORMATS.find(plan.format).dtype
    part = None
    if layout.pipeline > 1:
        part = [i for s in layout.stage_numbers(ranks.stage) for i in layout.layers_of(s)]
    sequence = layout.sequence_parallel
    if layout.recompute == "selective":
        ops = selective_ops(ops, compiled=plan.compile)
    if layout.tensor > 1:
        ops = split_ops(ops, ranks.axis("tensor"), sequence_parallel=sequence)
    if layout.zero:
        ops = zero.gathered_ops(ops)
    with device if layout.plain else torch.device("cpu"):
        model = Transformer(plan.model, ops, dtype, part)
    model.recompute = layout.recompute == "full"
    if layout.tensor > 1:
        split_model(
            model,
            ranks.axis("tensor"),
            PLACEMENTS,
            DIVIDED,
            wanted=partial(_is_split, layout),
            sequence_parallel=sequence,
        )
    return model


def _is_split(layout: Layout, path: str) -> bool:
    """Whether the layout splits the weight of the module at `path`."""
    _, _, rest = path.partition(".")
    return int(rest.split(".")[0]) in layout.split_layers if rest else layout.split_ends


def _segments(model: Transformer, ranks: Ranks) -> dict[int, nn.Module]:
    """What this rank calls: its pipeline stages by number, or the whole model."""
    layout = ranks.layout
    if layout.pipeline == 1:
        return {0: model}
    return {s: model.segment(layout.layers_of(s)) for s in layout.stage_numbers(ranks.stage)}


def _average(segments: dict[int, nn.Module], config: RunConfig, ranks: Ranks) -> CopyAverage | None:
    layout = ranks.layout
    if layout.data == 1 or layout.zero or layout.plain:
        return None
    return CopyAverage(segments.values(), ranks.group("data"), config.communication.bucket)


def _twice(model: Transformer, ranks: Ranks) -> nn.Parameter | None:
    """The matrix that is embedding and head, where these are on two ranks and this is one."""
    if not (model.shape.tied_embeddings and ranks.layout.ends_apart and model.embed_tokens):
        return None
    return model.embed_tokens.weight


def _initializer(seed: int) -> Callable[[str, Tensor, float], None]:
    def draw(name: str, weight: Tensor, deviation: float) -> None:
        numbers = torch.empty(weight.shape)  # on the CPU: the same first weights on every device
        numbers.normal_(0.0, deviation, generator=generator(seed, "weights", name))
        fill(weight, numbers)

    return draw


def _averaged(model: Transformer, config: RunConfig, ranks: Ranks, device: Device) -> nn.Module:
    """The model, or with plain data parallelism the one that averages during backward."""
    if not ranks.layout.plain or ranks.layout.data == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=None if device.kind == "cpu" else [device.torch.index],
        bucket_cap_mb=config.communication.bucket / 2**20,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,  # they are tables that never change
    )


def _offload(
    optimizer: torch.optim.AdamW, share: float, device: Device, file: Path, world: int
) -> Offload | None:
    if not share:
        return None
    if device.kind != "cpu":
        room = usable_memory() // -(-world // launched_nodes())
        return HostOffload(optimizer, share, device.torch, room=room)
    with explain_disk_full(file.parent, "Make room, or lower zero_optimization.offload_ratio."):
        return FileOffload(optimizer, share, file)


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
    config: RunConfig, plan: Plan, corpus: Corpus, ranks: Ranks, *, position: int = 0
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
        rank=ranks.copy,
        world=plan.layout.data,
        position=position,
        prefetch=config.data_pipeline.prefetch,
        document_starts=document_end(config, corpus),
    )
