"""From a config and a cluster to a Plan: every `auto` becomes a number, with its reason.

Pure arithmetic; no torch, no files, no clock.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from danlu.base.errors import ConfigError
from danlu.base.facts import ClusterFacts, LayerCost, ModelShape
from danlu.base.units import format_bytes, format_count, format_duration, format_rate
from danlu.config.parallel import (
    DataParallelConfig,
    PipelineParallelConfig,
    TensorParallelConfig,
    ZeroConfig,
)
from danlu.config.run import RunConfig
from danlu.planner.cost import Setting, StepCost, efficiency, step_cost
from danlu.planner.layout import Layout
from danlu.planner.layouts import Degrees, degrees, impossible, variants
from danlu.planner.memory import memory_bytes
from danlu.planner.plan import Alternative, Decision, Plan, Prediction
from danlu.planner.schedule import SCHEDULES, problem

__all__ = ["make_plan", "pin", "pin_layout"]

_MEMORY_SHARE = 0.9
_MICRO_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Tokens at once beyond which a device computes no faster (CPU: measured optimum 2 to 4
thousand)."""
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
    draft = _Draft(config, shape, layers, cluster)
    _choose_arithmetic(draft)
    options = _options(draft, world)
    draft.take(options[0])
    _choose_length(draft)
    _choose_compile(draft)
    _choose_length(draft)  # once more, at the speed that compiling gives
    _choose_layout(draft, options, world)
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
    tensor = config.tensor_parallel.model_copy(update={"degree": layout.tensor})
    data = config.data_parallel.model_copy(update={"degree": layout.data})
    zero = config.zero_optimization.model_copy(update={"stage": layout.zero})
    return config.model_copy(
        update={
            "data_parallel": data,
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "zero_optimization": zero,
            "train": config.train.model_copy(update={"micro_batch": choice.micro_batch}),
        }
    )


@dataclass
class _Draft:
    """A plan in the making: the inputs, and the numbers decided so far."""

    config: RunConfig
    shape: ModelShape
    layers: Sequence[LayerCost]
    cluster: ClusterFacts
    layout: Layout = field(default_factory=Layout)
    threads: int = 1
    format: str = "fp32"
    backend: str = "torch"
    compiled: bool = False
    batch_sequences: int = 1
    steps: int = 1
    micro_batch: int = 1
    warmup_steps: int = 0
    learning_rate: float = 0.0
    evaluate_every: int = 1
    evaluate_tokens: int = 1
    checkpoint_every: int = 1
    alternatives: tuple[Alternative, ...] = ()
    rejected: tuple[Decision, ...] = ()
    decisions: dict[str, Decision] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.cluster.device.kind

    @property
    def flops_per_token(self) -> float:
        return 3.0 * sum(c.forward_flops + c.attention_flops for c in self.layers)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    def decide(self, key: str, value: object, reason: str) -> None:
        self.decisions[key] = Decision(key, str(value), reason)

    def take(self, layout: Layout) -> None:
        """Goes on with this layout; the CPU threads of a rank follow."""
        self.layout = layout
        cores, here = self.cluster.device.threads or 8, -(-layout.ranks // self.cluster.nodes)
        threads = self.config.launch.threads
        self.threads = max(1, cores // here) if threads == "auto" else threads
        why = f"{cores} CPUs among {here} ranks a machine" if threads == "auto" else "configured"
        self.decide("launch.threads", self.threads, why)

    def setting(self, layout: Layout) -> Setting:
        per_node = -(-layout.ranks // self.cluster.nodes)
        return Setting(
            cluster=self.cluster,
            width=self.shape.hidden_size,
            number_format=self.format,
            reached=efficiency(self.cluster.device, self.backend, compiled=self.compiled),
            device_share=1 / per_node if self.kind == "cpu" else 1.0,
        )

    def cost(self, layout: Layout, micro_batch: float, micro_batches: int) -> StepCost:
        return step_cost(
            self.layers,
            layout,
            self.setting(layout),
            micro_tokens=micro_batch * self.shape.sequence_length,
            micro_batches=micro_batches,
        )

    def memory(
        self, layout: Layout, micro_batch: int, micro_batches: int
    ) -> tuple[dict[str, int], ...]:
        return memory_bytes(
            self.layers,
            self.shape,
            layout,
            kind=self.kind,
            number_format=self.format,
            micro_tokens=micro_batch * self.shape.sequence_length,
            micro_batches=micro_batches,
            backend=self.backend,
        )

    def memory_limit(self, layout: Layout) -> int:
        limit = self.config.memory.limit
        if limit != "auto":
            return limit
        sharing = -(-layout.ranks // self.cluster.nodes) if self.kind == "cpu" else 1
        return int(_MEMORY_SHARE * self.cluster.device.memory_bytes / sharing)


@dataclass(frozen=True)
class _Option:
    """A layout with its micro-batches, what it costs, and what it needs."""

    layout: Layout
    micro_batch: int
    micro_batches: int
    cost: StepCost
    memory: tuple[dict[str, int], ...]

    @property
    def bytes(self) -> int:
        """Of the rank that needs most."""
        return max(sum(parts.values()) for parts in self.memory)


def _options(draft: _Draft, world: int | None) -> list[Layout]:
    """All layouts that the config leaves open, simplest first.

    Raises:
        ConfigError: none is possible; the reason of the first.
    """
    config, cluster = draft.config, draft.cluster
    devices = cluster.devices if draft.kind != "cpu" else max(world or 0, cluster.nodes)
    if draft.kind == "cpu" and world is None:
        fixed = [
            size
            for size in (
                config.data_parallel.degree,
                config.tensor_parallel.degree,
                config.pipeline_parallel.stages,
            )
            if size != "auto"
        ]
        devices = max(devices, math.prod(fixed))  # ranks of a CPU machine are processes
    node = cluster.devices_per_node if draft.kind != "cpu" else devices
    found: list[Layout] = []
    refused: list[ConfigError] = []
    for one in sorted(degrees(config, devices, node, draft.shape.layers, world), key=_complexity):
        if error := impossible(config, draft.shape, one):
            refused.append(error)
            continue
        setting = draft.setting(Layout(one.data, one.tensor, one.pipeline))
        for layout in variants(config, draft.shape, draft.layers, one, setting):
            if error := _wrong_micro_batches(config, layout):
                refused.append(error)
            else:
                found.append(layout)
    if not found:
        raise (
            refused[0]
            if refused
            else ConfigError(
                "pipeline_parallel.stages", "no layout is possible.", "Use fewer stages."
            )
        )
    counted: dict[str, int] = {}
    for error in refused:
        counted[str(error)] = counted.get(str(error), 0) + 1
    draft.rejected = tuple(
        Decision("divisibility", f"{count} x", reason) for reason, count in counted.items()
    )
    return found


def _wrong_micro_batches(config: RunConfig, layout: Layout) -> ConfigError | None:
    """Why a layout's schedule cannot run the configured number of micro-batches, or None."""
    wanted = config.pipeline_parallel.micro_batches
    if layout.pipeline == 1 or wanted == "auto":
        return None
    reason = problem(layout.schedule, layout.pipeline, wanted, layout.chunks)
    if reason is None:
        return None
    return ConfigError(
        "pipeline_parallel.micro_batches", reason, "Or use another pipeline_parallel.schedule."
    )


def _complexity(one: Degrees) -> tuple[int, int, int]:
    return (one.tensor * one.pipeline, one.pipeline, one.tensor)


def _least_micro_batches(config: RunConfig, layout: Layout) -> int:
    """Fewest micro-batches that a layout's schedule runs with."""
    wanted = config.pipeline_parallel.micro_batches
    if wanted != "auto":
        return wanted
    if layout.pipeline == 1:
        return 1
    return max(1, SCHEDULES[layout.schedule].fewest_per_rank) * layout.pipeline


def _choose_arithmetic(draft: _Draft) -> None:
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


def _choose_length(draft: _Draft) -> None:
    """Batch and steps together: the Step law (arXiv 2503.04715) ties the batch to all tokens."""
    train, length = draft.config.train, draft.shape.sequence_length
    layout, least = draft.layout, _least_micro_batches(draft.config, draft.layout)
    whole = draft.cost(layout, 1.0, least)
    per_token = (whole.total - draft.cost(layout, 0.0, least).total) / (length * least)
    per_token /= layout.data
    if train.batch_tokens != "auto":
        tokens = float(train.batch_tokens)
        reason = "configured"
    elif train.steps != "auto":
        tokens = (0.58 * train.steps**0.571) ** (1 / (1 - 0.571))
        reason = f"Step law for {train.steps} steps"
    else:
        budget = train.duration / max(per_token, 1e-12)
        tokens = 0.58 * budget**0.571
        reason = f"Step law for about {format_count(budget)} tokens"
    copies = layout.data * least
    share = copies * length
    sequences = max(1, round(tokens / share)) * copies
    if train.batch_tokens != "auto" and sequences * length != train.batch_tokens:
        if train.batch_tokens % share == 0:
            sequences = train.batch_tokens // length
        else:
            reason = f"{train.batch_tokens} rounded to multiples of {copies} sequences"
    draft.batch_sequences = sequences
    draft.decide("train.batch_tokens", sequences * length, reason)
    if train.steps != "auto":
        draft.steps, reason = train.steps, "configured"
    else:
        step = draft.cost(layout, sequences / copies, least).total
        draft.steps = max(1, int(train.duration / step))
        reason = f"what fits into {format_duration(train.duration)} at the predicted speed"
    draft.decide("train.steps", draft.steps, reason)


def _choose_layout(draft: _Draft, layouts: Sequence[Layout], world: int | None) -> None:
    """The fastest layout that fits, with its micro-batch; the batch stays what it is.

    Raises:
        ConfigError: none fits, with the smallest change that would.
    """
    open_axes = len({(x.data, x.tensor, x.pipeline) for x in layouts}) > 1
    tokens = draft.batch_sequences
    options: list[_Option] = []
    unfit: list[_Option] = []
    problems: list[ConfigError] = []
    layouts = _compilable(draft, layouts)
    rough = sorted(layouts, key=lambda x: _rough_seconds(draft, x)) if len(layouts) > 1 else layouts
    for layout in rough:
        if len(options) >= _SIMULATED:
            break
        try:
            option = _best_micro_batch(draft, layout)
        except ConfigError as error:
            problems.append(error)
            continue
        fits = option.bytes <= draft.memory_limit(layout)
        (options if fits else unfit).append(option)
    if not options:
        raise _too_big(draft, min(unfit, key=lambda o: o.bytes)) if unfit else problems[0]
    options.sort(key=_sequence_seconds)
    best = options[0]
    draft.alternatives = tuple(_alternative(draft, o) for o in options[:6])
    draft.rejected += _rejections(draft, options, unfit, problems)
    layout = best.layout
    draft.take(layout)
    draft.micro_batch = best.micro_batch
    draft.batch_sequences = layout.data * best.micro_batch * best.micro_batches
    if draft.batch_sequences != tokens:
        reason = f"{tokens * draft.shape.sequence_length} rounded to what the layout divides"
        draft.decide(
            "train.batch_tokens", draft.batch_sequences * draft.shape.sequence_length, reason
        )
    _tell_layout(draft, best, searched=len(layouts) if open_axes else 0, world=world)


_SIMULATED = 24
"""Most layouts whose schedules are simulated; a rough formula has ordered them before."""


def _compilable(draft: _Draft, layouts: Sequence[Layout]) -> Sequence[Layout]:
    """The layouts whose schedules go with torch.compile, or all of them without it.

    Raises:
        ConfigError: compiling and a schedule are both configured and exclude each other.
    """
    if not draft.compiled:
        return layouts
    kept = [x for x in layouts if x.pipeline == 1 or SCHEDULES[x.schedule].compiles]
    if kept:
        return kept
    if draft.config.kernels.compile is True:
        raise ConfigError(
            "kernels.compile",
            f"{layouts[0].schedule} splits backward, which compiled stages cannot.",
            "Use pipeline_parallel.schedule=1f1b, or kernels.compile=auto.",
        )
    draft.compiled = False
    draft.decide("kernels.compile", False, f"{layouts[0].schedule} splits backward")
    return layouts


def _rough_seconds(draft: _Draft, layout: Layout, micro_batches: int | None = None) -> float:
    """Seconds a sequence: the same model without simulation, plus the schedule's usual bubble."""
    least = _least_micro_batches(draft.config, layout)
    flat = replace(layout, pipeline=1, stages=())
    mine = max(least, draft.batch_sequences // layout.data)
    count = micro_batches or least
    seconds = draft.cost(flat, mine / count, count).total / layout.pipeline
    idle = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 0.5, "zero_bubble": 0.17, "dualpipe_v": 0.33}
    if layout.pipeline > 1:
        rounds = micro_batches or mine
        seconds *= 1 + idle[layout.schedule] * (layout.pipeline - 1) / rounds
    return seconds / (mine * layout.data)


def _best_micro_batch(draft: _Draft, layout: Layout) -> _Option:
    """The fastest micro-batch of a layout that fits, or the smallest where none does.

    Raises:
        ConfigError: no micro-batch is possible with the configured numbers.
    """
    config, length = draft.config, draft.shape.sequence_length
    least = _least_micro_batches(config, layout)
    mine = max(1, round(draft.batch_sequences / (layout.data * least))) * least
    if config.train.batch_tokens != "auto":
        mine = draft.batch_sequences // layout.data
        if draft.batch_sequences % (layout.data * least):
            raise ConfigError(
                "train.batch_tokens",
                f"{draft.batch_sequences} sequences do not split into {least} micro-batches on"
                f" {layout.data} copies.",
                f"Use a multiple of {layout.data * least * length} tokens.",
            )
    limit = draft.memory_limit(layout)
    fitting: list[_Option] = []
    smallest: _Option | None = None
    for size in _micro_batches(draft, layout, mine):
        memory = draft.memory(layout, size, min(mine // size, _memory_rounds(layout)))
        smallest = _Option(layout, size, mine // size, StepCost({}), memory)
        if smallest.bytes <= limit:
            fitting.append(smallest)
            if layout.pipeline == 1:
                break  # the largest is the fastest
    assert smallest is not None
    if not fitting:
        return smallest
    fitting.sort(key=lambda o: _rough_seconds(draft, layout, o.micro_batches))
    timed = [
        replace(o, cost=draft.cost(layout, o.micro_batch, o.micro_batches)) for o in fitting[:2]
    ]
    return min(timed, key=lambda o: o.cost.total)


def _sequence_seconds(option: _Option) -> float:
    return option.cost.total / (option.layout.data * option.micro_batch * option.micro_batches)


def _memory_rounds(layout: Layout) -> int:
    """Micro-batches after which no more are held at once, all of them in GPipe."""
    return 10**9 if layout.schedule == "gpipe" else 4 * layout.pipeline


def _micro_batches(draft: _Draft, layout: Layout, mine: int) -> list[int]:
    """Micro-batch sizes that are possible for `mine` sequences a copy, largest first.

    Raises:
        ConfigError: the configured ones are not.
    """
    config = draft.config
    wanted, pieces = config.train.micro_batch, config.pipeline_parallel.micro_batches
    cap = max(1, _MICRO_TOKENS[draft.kind] // draft.shape.sequence_length)
    sizes = [m for m in range(mine, 0, -1) if mine % m == 0]
    if wanted != "auto":
        if wanted not in sizes:
            raise ConfigError(
                "train.micro_batch",
                f"{wanted} does not divide the {mine} sequences of a rank's step.",
                f"Use {', '.join(str(m) for m in sorted(sizes)[:12])}.",
            )
        sizes = [wanted]
    if pieces != "auto" and layout.pipeline > 1:
        if wanted not in ("auto", mine // pieces):
            raise ConfigError(
                "train.micro_batch",
                f"{wanted} is not what {pieces} pipeline micro-batches make of {mine} sequences.",
                f"Use {mine // pieces}, or leave one of the two out.",
            )
        sizes = [mine // pieces]
    elif wanted == "auto":
        sizes = [m for m in sizes if m <= cap] or sizes[-1:]
    if layout.pipeline == 1:
        return sizes
    wrong = {m: problem(layout.schedule, layout.pipeline, mine // m, layout.chunks) for m in sizes}
    possible = [m for m in sizes if wrong[m] is None]
    if not possible:
        reason = wrong[sizes[-1]] or ""
        raise ConfigError(
            "pipeline_parallel.micro_batches", reason, "Use a larger train.batch_tokens."
        )
    return possible


def _too_big(draft: _Draft, option: _Option) -> ConfigError:
    """The error of a model that does not fit, with the smallest change of layout that helps."""
    limit, needed = draft.memory_limit(option.layout), option.bytes
    change = _change_that_fits(draft, option.layout.ranks)
    help_ = f"It fits with {change}; or use" if change else "Use"
    return ConfigError(
        "model",
        f"a rank needs {format_bytes(needed)} of memory, {format_bytes(limit)} are allowed.",
        f"{help_} a smaller model.preset, model.sequence_length or train.micro_batch, or raise"
        " memory.limit.",
    )


def _change_that_fits(draft: _Draft, ranks: int) -> str | None:
    """The simplest layout of as many ranks that would fit, in the words of a command line."""
    config = draft.config
    free = config.model_copy(
        update={
            "data_parallel": DataParallelConfig(),
            "tensor_parallel": TensorParallelConfig(degree="auto"),
            "pipeline_parallel": PipelineParallelConfig(stages="auto", schedule="1f1b"),
            "zero_optimization": ZeroConfig(stage="auto"),
        }
    )
    other = replace(draft, config=free, decisions={})
    for layout in _options(other, ranks):
        try:
            option = _best_micro_batch(other, layout)
        except ConfigError:
            continue
        if option.bytes <= other.memory_limit(layout):
            wanted = config.tensor_parallel.split_layers
            words = {
                "tensor_parallel.split_layers": ("all" if layout.tensor > 1 else wanted, wanted),
                "data_parallel.degree": (layout.data, config.data_parallel.degree),
                "tensor_parallel.degree": (layout.tensor, config.tensor_parallel.degree),
                "pipeline_parallel.stages": (layout.pipeline, config.pipeline_parallel.stages),
                "zero_optimization.stage": (layout.zero, config.zero_optimization.stage),
            }
            changed = [f"{k}={new}" for k, (new, old) in words.items() if old not in (new, "auto")]
            return " ".join(changed) or None
    return None


def _alternative(draft: _Draft, option: _Option) -> Alternative:
    tokens = option.layout.data * option.micro_batch * option.micro_batches
    seconds = option.cost.total
    return Alternative(
        layout=option.layout,
        micro_batch=option.micro_batch,
        micro_batches=option.micro_batches,
        step_seconds=seconds,
        tokens_per_second=tokens * draft.shape.sequence_length / seconds,
        memory_bytes=option.bytes,
        bubble=option.cost.seconds.get("bubble", 0.0) / seconds,
    )


def _rejections(
    draft: _Draft,
    options: Sequence[_Option],
    unfit: Sequence[_Option],
    problems: Sequence[ConfigError],
) -> tuple[Decision, ...]:
    """Why the families of layouts that were not chosen were not: memory, waiting, sending."""
    rows: dict[str, Decision] = {}
    best = options[0]
    for option in options[1:]:
        name = _family(option.layout)
        more = _sequence_seconds(option) / _sequence_seconds(best) - 1
        seconds = option.cost.seconds
        part = max(("bubble", "communication"), key=lambda part: seconds.get(part, 0.0))
        share = seconds.get(part, 0.0) / option.cost.total
        why = f"{more:.0%} slower; {share:.0%} of its step is {part}"
        rows.setdefault(name, Decision(name, part, why))
    for option in sorted(unfit, key=lambda o: o.bytes):
        name, limit = _family(option.layout), draft.memory_limit(option.layout)
        why = f"needs {format_bytes(option.bytes)} a rank, {format_bytes(limit)} are allowed"
        rows.setdefault(name, Decision(name, "memory", why))
    rows.pop(_family(best.layout), None)
    for error in problems:
        rows.setdefault(str(error), Decision(error.where, "schedule", str(error)))
    return tuple(rows.values())[:16]


def _runs(numbers: Sequence[int]) -> str:
    """`2, 2, 2, 1` as `2 x 3, 1`."""
    runs = [(value, len(list(group))) for value, group in itertools.groupby(numbers)]
    return ", ".join(f"{value} x {times}" if times > 1 else f"{value}" for value, times in runs)


def _family(layout: Layout) -> str:
    return f"TP {layout.tensor}, PP {layout.pipeline}, DP {layout.data}"


def _tell_layout(draft: _Draft, best: _Option, *, searched: int, world: int | None) -> None:
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
    else:
        reason = f"what {layout.tensor} x {layout.pipeline} leave of {layout.ranks} {ranks}"
    draft.decide("data_parallel.degree", layout.data, reason)
    if layout.tensor > 1 or config.tensor_parallel.degree == "auto":
        draft.decide("tensor_parallel.degree", layout.tensor, why(config.tensor_parallel.degree))
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
    mine = best.micro_batch * best.micro_batches
    limit = draft.memory_limit(layout)
    reason = f"divides {mine} sequences, fits {format_bytes(limit)}, fills the device"
    if config.train.micro_batch != "auto":
        reason = "configured"
    draft.decide("train.micro_batch", best.micro_batch, reason)
    name = "pipeline_parallel.micro_batches" if layout.pipeline > 1 else "accumulation"
    draft.decide(name, best.micro_batches, "micro-batches of a copy in a step")


def _choose_compile(draft: _Draft) -> None:
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
    least = _least_micro_batches(draft.config, draft.layout)
    size = draft.batch_sequences / (draft.layout.data * least)
    seconds = draft.steps * draft.cost(draft.layout, size, least).total
    pays = seconds > _COMPILE_PAYS_SECONDS[draft.kind]
    draft.compiled = pays if wanted == "auto" else wanted
    reason = f"a run of {format_duration(seconds)} {'pays' if pays else 'does not pay'} it back"
    draft.decide("kernels.compile", draft.compiled, reason if wanted == "auto" else "configured")


def _choose_optimizer(draft: _Draft) -> None:
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


def _choose_intervals(draft: _Draft) -> None:
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


def _step(draft: _Draft) -> float:
    return draft.cost(draft.layout, draft.micro_batch, _micro_batch_count(draft)).total


def _micro_batch_count(draft: _Draft) -> int:
    return draft.batch_sequences // (draft.layout.data * draft.micro_batch)


def _finish(draft: _Draft) -> Plan:
    layout, length, count = draft.layout, draft.shape.sequence_length, _micro_batch_count(draft)
    cost = draft.cost(layout, draft.micro_batch, count)
    step, tokens = cost.total, draft.batch_sequences * length
    memory = draft.memory(layout, draft.micro_batch, min(count, _memory_rounds(layout)))
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
