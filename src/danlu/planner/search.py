"""From a config and a cluster to a Plan: every `auto` becomes a number, with its reason.

Pure arithmetic; no torch, no files, no clock.
"""

import itertools
import math
from collections.abc import Sequence

from danlu.base.errors import ConfigError
from danlu.base.facts import ClusterFacts, LayerCost, ModelShape
from danlu.base.units import format_bytes, format_count, format_duration, format_rate
from danlu.config.run import RunConfig
from danlu.planner.draft import Draft, least_micro_batches
from danlu.planner.layout import Layout
from danlu.planner.plan import Alternative, Plan, Prediction
from danlu.planner.weigh import Weighed, choose_layout, open_layouts

__all__ = ["make_plan", "pin", "pin_layout"]

_COMPILE_PAYS_SECONDS = {"cpu": 900.0, "cuda": 300.0}
_CHECKPOINT_SECONDS = 600.0
_EVALUATION_SHARE = 0.04


def make_plan(
    config: RunConfig,
    shape: ModelShape,
    layers: Sequence[LayerCost],
    cluster: ClusterFacts,
    *,
    world: int | None = None,
) -> Plan:
    """Decides every number of a run.

    Args:
        config: what the user wants.
        shape: the model in numbers.
        layers: what its layers cost.
        cluster: the machines.
        world: ranks that a launcher has already started.

    Raises:
        ConfigError: numbers that do not go together, or a model that does not fit into memory.
    """
    draft = Draft(config, shape, layers, cluster)
    _choose_arithmetic(draft)
    found = open_layouts(draft, world)
    draft.take(found[0])
    _choose_batch(draft, found)
    _choose_compile(draft)
    layouts = _choose_batch(draft, found)  # once more, at the speed that compiling gives
    best = choose_layout(draft, layouts)
    _tell_layout(draft, best, searched=len(found), world=world)
    _choose_steps(draft)
    _choose_optimizer(draft)
    _choose_intervals(draft)
    return _finish(draft)


def pin(config: RunConfig, plan: Plan) -> RunConfig:
    """The config with those `auto`s replaced that decide what a run learns.

    A resumed run keeps its length, batch and learning rate, whatever the machines are now.
    """
    train = config.train.model_copy(
        update={"steps": plan.steps, "batch_tokens": plan.batch_tokens}
        if config.train.steps == "auto"
        else {"batch_tokens": plan.batch_tokens}
    )
    optimizer = config.optimizer.model_copy(update={"learning_rate": plan.learning_rate})
    schedule = config.schedule.model_copy(update={"warmup_steps": plan.warmup_steps})
    precision = config.precision.model_copy(update={"format": plan.format})
    return config.model_copy(
        update={
            "train": train,
            "optimizer": optimizer,
            "schedule": schedule,
            "precision": precision,
        }
    )


def pin_layout(config: RunConfig, choice: Alternative) -> RunConfig:
    """The config with a layout that was weighed in place of its `auto`s."""
    layout = choice.layout
    pipeline = config.pipeline_parallel.model_copy(update={"stages": layout.pipeline})
    if layout.pipeline > 1:
        pipeline = pipeline.model_copy(
            update={
                "schedule": layout.schedule,
                "layers": layout.stages,
                "micro_batches": choice.micro_batches,
            }
        )
    tensor = config.tensor_parallel.model_copy(
        update={"degree": layout.tensor, "sequence_parallel": layout.sequence_parallel}
    )
    data = config.data_parallel.model_copy(update={"degree": layout.data})
    zero = config.zero_optimization.model_copy(
        update={"stage": layout.zero, "offload_ratio": layout.offload}
    )
    memory = config.memory.model_copy(update={"recompute": layout.recompute})
    return config.model_copy(
        update={
            "data_parallel": data,
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "zero_optimization": zero,
            "memory": memory,
            "train": config.train.model_copy(update={"micro_batch": choice.micro_batch}),
        }
    )


def _choose_arithmetic(draft: Draft) -> None:
    rates, wanted = draft.cluster.device.peak_flops, draft.config.precision.format
    if wanted == "auto":
        faster = "bf16" in rates and rates["bf16"] > 1.2 * rates["fp32"]
        draft.format = "bf16" if faster else "fp32"
        others = ", ".join(f"{k} {format_rate(v)}" for k, v in rates.items())
        reason = f"fastest that trains without loss scaling here ({others})"
    else:
        if wanted not in rates:
            raise ConfigError(
                "precision.format",
                f"{draft.cluster.device.name} does not compute {wanted}.",
                f"Use {' or '.join(rates)}.",
            )
        draft.format, reason = wanted, "configured"
    draft.decide("precision.format", draft.format, reason)
    backend = draft.config.kernels.backend
    possible = draft.kind == "cpu" and draft.format == "bf16"
    if backend == "native" and not possible:
        raise ConfigError(
            "kernels.backend",
            f"native kernels compute bf16 on a CPU, not {draft.format} on {draft.kind}.",
            "Use auto.",
        )
    fits = possible and "avx512_bf16" in draft.cluster.device.features
    draft.backend = ("native" if fits else "torch") if backend == "auto" else backend
    why = "configured"
    if backend == "auto":
        why = "AVX512-BF16 kernels exist for this CPU" if fits else "no native kernels for this"
    draft.decide("kernels.backend", draft.backend, why)


def _choose_batch(draft: Draft, layouts: Sequence[Layout]) -> Sequence[Layout]:
    """The sequences of a step, and the layouts that divide them.

    A configured batch is kept as it is. Otherwise the Step law (arXiv 2503.04715) ties the batch
    to all tokens of the run, and it is rounded so that ranks and their powers of two divide it.

    Raises:
        ConfigError: a configured batch that no layout divides.
    """
    train, length = draft.config.train, draft.shape.sequence_length
    units = {x: x.data * least_micro_batches(draft.config, x) for x in layouts}
    if train.batch_tokens != "auto":
        sequences, rest = divmod(train.batch_tokens, length)
        if rest:
            near = [n * length for n in (sequences, sequences + 1) if n]
            raise ConfigError(
                "train.batch_tokens",
                f"{train.batch_tokens} tokens are no whole number of sequences of {length}.",
                f"Use {' or '.join(str(n) for n in near)}.",
            )
        kept = [x for x in layouts if sequences % units[x] == 0]
        if not kept:
            unit = units[layouts[0]]
            raise ConfigError(
                "train.batch_tokens",
                f"{sequences} sequences of {length} do not split over {layouts[0].text()}.",
                f"Use a multiple of {unit * length}, or data_parallel.degree that divides.",
            )
        reason = "configured"
    else:
        wanted, reason = _step_law(draft)
        if train.micro_batch != "auto":
            units = {x: unit * train.micro_batch for x, unit in units.items()}
        fitting = [unit for unit in units.values() if unit * length <= wanted]
        unit = max(fitting, default=min(units.values()))
        sequences = _round(wanted / (unit * length)) * unit
        kept = [x for x in layouts if sequences % units[x] == 0]
    draft.batch_sequences = sequences
    draft.decide("train.batch_tokens", sequences * length, reason)
    draft.steps = train.steps if train.steps != "auto" else _steps_of(draft, kept[0])
    return kept


def _step_law(draft: Draft) -> tuple[float, str]:
    """Tokens of a step, and why."""
    train, layout = draft.config.train, draft.layout
    if train.steps != "auto":
        tokens = (0.58 * train.steps**0.571) ** (1 / (1 - 0.571))
        return tokens, f"Step law for {train.steps} steps"
    least, length = least_micro_batches(draft.config, layout), draft.shape.sequence_length
    one, none = draft.cost(layout, 1.0, least), draft.cost(layout, 0.0, least)
    seconds = (one.total - one.seconds["overhead"]) - (none.total - none.seconds["overhead"])
    per_token = seconds / (length * least * layout.data)
    budget = train.duration / max(per_token, 1e-12)
    return 0.58 * budget**0.571, f"Step law for about {format_count(budget)} tokens"


def _round(number: float) -> int:
    """To the nearest of 1, 2, 3, 4, 6, 8, 12, 16, …: numbers that many others divide."""
    if number < 1:
        return 1
    grain: int = 2 ** max(0, math.floor(math.log2(number)) - 1)
    return round(number / grain) * grain


def _steps_of(draft: Draft, layout: Layout) -> int:
    """Steps that fit into the configured duration, before the micro-batch is known."""
    least = least_micro_batches(draft.config, layout)
    step = draft.cost(layout, draft.batch_sequences / (layout.data * least), least).total
    return max(1, int(draft.config.train.duration / step))


def _choose_steps(draft: Draft) -> None:
    train = draft.config.train
    reason = "configured"
    if train.steps == "auto":
        draft.steps = max(1, int(train.duration / _step(draft)))
        reason = f"what fits into {format_duration(train.duration)} at the predicted speed"
    draft.decide("train.steps", draft.steps, reason)


def _tell_layout(draft: Draft, best: Weighed, *, searched: int, world: int | None) -> None:
    config, layout = draft.config, best.layout
    ranks = "ranks that the launcher started" if world is not None else "ranks"
    found = f"fastest of {searched} layouts that were weighed"

    def why(value: object) -> str:
        return "configured" if value != "auto" else found

    if config.data_parallel.degree != "auto":
        reason = "configured"
    elif world is not None and layout.data == world:
        reason = "ranks that the launcher started"
    elif layout.data == layout.ranks:
        reason = "one process a CPU machine" if draft.kind == "cpu" else "one a device"
        if draft.kind != "cpu" and layout.ranks < draft.cluster.devices:
            reason = f"of {draft.cluster.devices} devices, what the batch splits over"
    else:
        reason = f"what {layout.tensor} x {layout.pipeline} leave of {layout.ranks} {ranks}"
    draft.decide("data_parallel.degree", layout.data, reason)
    if layout.tensor > 1 or config.tensor_parallel.degree == "auto":
        draft.decide("tensor_parallel.degree", layout.tensor, why(config.tensor_parallel.degree))
    if layout.tensor > 1:
        rows = config.tensor_parallel.sequence_parallel
        reason = "faster, or smaller, in the cost model" if rows == "auto" else "configured"
        draft.decide("tensor_parallel.sequence_parallel", layout.sequence_parallel, reason)
    if layout.pipeline > 1 or config.pipeline_parallel.stages == "auto":
        draft.decide(
            "pipeline_parallel.stages", layout.pipeline, why(config.pipeline_parallel.stages)
        )
    if layout.pipeline > 1:
        shown = _runs(layout.stages)
        wanted = config.pipeline_parallel
        reason = "fastest in simulation" if wanted.schedule == "auto" else "configured"
        draft.decide("pipeline_parallel.schedule", layout.schedule, reason)
        reason = "balanced by cost" if wanted.layers == "auto" else f"configured ({wanted.layers})"
        draft.decide("pipeline_parallel.layers", shown, reason)
    if layout.zero or config.zero_optimization.stage not in (0,):
        reason = "one copy: nothing to shard" if layout.data == 1 else "configured"
        if config.zero_optimization.stage == "auto" and layout.data > 1:
            reason = "the fastest that fits"
        draft.decide("zero_optimization.stage", layout.zero, reason)
    if config.zero_optimization.offload_ratio != 0:
        share = config.zero_optimization.offload_ratio
        draft.decide("zero_optimization.offload_ratio", layout.offload, why(share))
    if config.memory.recompute != "none":
        draft.decide("memory.recompute", layout.recompute, why(config.memory.recompute))
    mine = best.micro_batch * best.micro_batches
    limit = draft.memory_limit(layout)
    reason = f"divides {mine} sequences, fits {format_bytes(limit)}, fills the device"
    if config.train.micro_batch != "auto":
        reason = "configured"
    draft.decide("train.micro_batch", best.micro_batch, reason)
    name = "pipeline_parallel.micro_batches" if layout.pipeline > 1 else "accumulation"
    draft.decide(name, best.micro_batches, "micro-batches of a copy in a step")


def _runs(numbers: Sequence[int]) -> str:
    """`2, 2, 2, 1` as `2 x 3, 1`."""
    runs = [(value, len(list(group))) for value, group in itertools.groupby(numbers)]
    return ", ".join(f"{value} x {times}" if times > 1 else f"{value}" for value, times in runs)


def _choose_compile(draft: Draft) -> None:
    wanted = draft.config.kernels.compile
    if draft.backend == "native":
        if wanted is True:
            raise ConfigError(
                "kernels.compile",
                "native kernels are not compiled by torch.",
                "Use kernels.backend=torch, or leave it out.",
            )
        draft.decide("kernels.compile", False, "native kernels need none")
        return
    least = least_micro_batches(draft.config, draft.layout)
    size = draft.batch_sequences / (draft.layout.data * least)
    seconds = draft.steps * draft.cost(draft.layout, size, least).total
    least_seconds = _COMPILE_PAYS_SECONDS[draft.kind]
    pays = seconds > least_seconds
    draft.compiled = pays if wanted == "auto" else wanted
    limit = format_duration(least_seconds)
    reason = f"pays in runs of more than {limit}" + ("" if pays else ", which this is not")
    draft.decide("kernels.compile", draft.compiled, reason if wanted == "auto" else "configured")


def _choose_optimizer(draft: Draft) -> None:
    rate, schedule = draft.config.optimizer.learning_rate, draft.config.schedule
    tokens = draft.steps * draft.batch_sequences * draft.shape.sequence_length
    body = draft.shape.layers * draft.shape.layer_parameters
    law = 1.79 * body**-0.713 * max(tokens, 1) ** 0.307
    draft.learning_rate = float(f"{min(max(law, 1e-5), 5e-3):.3g}") if rate == "auto" else rate
    reason = f"Step law for {format_count(body)} weights, {format_count(tokens)} tokens"
    draft.decide(
        "optimizer.learning_rate", draft.learning_rate, reason if rate == "auto" else "configured"
    )
    if schedule.warmup_steps == "auto":
        least = min(100, draft.steps // 5)
        draft.warmup_steps = min(max(least, round(0.02 * draft.steps)), 2000)
        reason = "100 steps or 20 % of a short run, 2 % of a long one, at most 2,000"
    else:
        draft.warmup_steps, reason = schedule.warmup_steps, "configured"
    draft.decide("schedule.warmup_steps", draft.warmup_steps, reason)


def _choose_intervals(draft: Draft) -> None:
    every = draft.config.train.evaluate_every
    draft.evaluate_every = max(1, -(-draft.steps // 10)) if every == "auto" else every
    draft.decide(
        "train.evaluate_every",
        draft.evaluate_every,
        "ten a run" if every == "auto" else "configured",
    )
    wanted = draft.config.train.evaluate_tokens
    total = draft.steps * draft.batch_sequences * draft.shape.sequence_length
    times = -(-draft.steps // draft.evaluate_every)
    # A forward pass costs a third of a training pass.
    share = 3 * _EVALUATION_SHARE * total / times
    draft.evaluate_tokens = max(8192, min(2**20, round(share))) if wanted == "auto" else wanted
    reason = "4 % of the run for all evaluations" if wanted == "auto" else "configured"
    draft.decide("train.evaluate_tokens", draft.evaluate_tokens, reason)
    every = draft.config.checkpoint.every
    draft.checkpoint_every = (
        max(1, math.ceil(_CHECKPOINT_SECONDS / _step(draft))) if every == "auto" else every
    )
    reason = "about one in ten minutes" if every == "auto" else "configured"
    draft.decide("checkpoint.every", draft.checkpoint_every, reason)


def _step(draft: Draft) -> float:
    return draft.cost(draft.layout, draft.micro_batch, _micro_batch_count(draft)).total


def _micro_batch_count(draft: Draft) -> int:
    return draft.batch_sequences // (draft.layout.data * draft.micro_batch)


def _finish(draft: Draft) -> Plan:
    layout, length, count = draft.layout, draft.shape.sequence_length, _micro_batch_count(draft)
    cost = draft.cost(layout, draft.micro_batch, count)
    step, tokens = cost.total, draft.batch_sequences * length
    memory = draft.memory(layout, draft.micro_batch, count)
    peak = draft.cluster.device.peak_flops[draft.format]
    peak *= draft.cluster.nodes if draft.kind == "cpu" else layout.ranks
    return Plan(
        model=draft.shape,
        parameters=draft.parameters,
        flops_per_token=draft.flops_per_token,
        cluster=draft.cluster,
        layout=layout,
        threads=draft.threads,
        format=draft.format,
        backend=draft.backend,
        compile=draft.compiled,
        batch_tokens=tokens,
        micro_batch=draft.micro_batch,
        accumulation=count,
        steps=draft.steps,
        warmup_steps=draft.warmup_steps,
        learning_rate=draft.learning_rate,
        evaluate_every=draft.evaluate_every,
        evaluate_tokens=draft.evaluate_tokens,
        checkpoint_every=draft.checkpoint_every,
        predicted=Prediction(
            step_seconds=step,
            tokens_per_second=tokens / step,
            mfu=draft.flops_per_token * tokens / step / peak,
            seconds=cost.seconds,
            memory=max(memory, key=lambda parts: sum(parts.values())),
            ranks_memory=memory,
            utilisation=None if cost.timeline is None else cost.timeline.utilisation,
        ),
        alternatives=draft.alternatives,
        rejected=draft.rejected,
        decisions=tuple(draft.decisions.values()),
    )
