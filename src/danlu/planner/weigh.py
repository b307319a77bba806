"""Which layout: every one that the config leaves open, weighed by memory and by time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from danlu.base.errors import ConfigError
from danlu.base.units import format_bytes
from danlu.config.parallel import (
    DataParallelConfig,
    PipelineParallelConfig,
    TensorParallelConfig,
    ZeroConfig,
)
from danlu.config.run import RunConfig
from danlu.planner.cost import StepCost
from danlu.planner.draft import Draft, least_micro_batches
from danlu.planner.layout import Layout
from danlu.planner.layouts import Degrees, degrees, impossible, variants
from danlu.planner.plan import Alternative, Decision
from danlu.planner.schedule import SCHEDULES, problem

__all__ = ["Weighed", "choose_layout", "open_layouts"]

_MICRO_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Tokens at once beyond which a device computes no faster (CPU: measured optimum 2 to 4
thousand)."""


@dataclass(frozen=True)
class Weighed:
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


def open_layouts(draft: Draft, world: int | None) -> list[Layout]:
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
    batch = config.train.batch_tokens
    sequences = None if batch == "auto" else batch // draft.shape.sequence_length
    sizes = degrees(config, devices, node, draft.shape.layers, world, sequences)
    for one in sorted(sizes, key=_complexity):
        if error := impossible(config, draft.shape, one):
            refused.append(error)
            continue
        setting = draft.setting(Layout(one.data, one.tensor, one.pipeline))
        for layout in variants(config, draft.shape, draft.layers, one, setting):
            if isinstance(layout, ConfigError):
                refused.append(layout)
            elif error := _wrong_micro_batches(config, layout):
                refused.append(error)
            else:
                found.append(layout)
    if not found:
        raise refused[0]
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


def choose_layout(draft: Draft, layouts: Sequence[Layout]) -> Weighed:
    """The fastest layout that fits, with its micro-batch, for the draft's batch.

    The draft takes the layout; runners-up and rejected families are kept in it.

    Raises:
        ConfigError: none fits, with the smallest change that would.
    """
    options: list[Weighed] = []
    unfit: list[Weighed] = []
    problems: list[ConfigError] = []
    layouts = _compilable(draft, layouts)
    rough = {x: _rough_seconds(draft, x) for x in layouts} if len(layouts) > 1 else {}
    waiting: list[Layout] = []
    weighed: set[str] = set()
    near = _NEAR * min(rough.values(), default=0.0)
    for layout in sorted(layouts, key=lambda x: rough.get(x, 0.0)):
        name = _family(layout)
        if len(options) >= _SIMULATED and (name in weighed or rough[layout] > near):
            waiting.append(layout)
            continue
        try:
            option = _best_micro_batch(draft, layout)
        except ConfigError as error:
            problems.append(error)
            continue
        fits = option.bytes <= draft.memory_limit(layout)
        (options if fits else unfit).append(option)
        weighed |= {name} if fits else set()
    if not options:
        raise _too_big(draft, min(unfit, key=lambda o: o.bytes)) if unfit else problems[0]
    options.sort(key=lambda o: o.cost.total)
    best = options[0]
    draft.alternatives = tuple(_alternative(draft, o) for o in options[:6])
    draft.rejected += _rejections(draft, options, unfit, problems)
    draft.rejected += _left_out(draft, best, {x: rough[x] for x in waiting})
    draft.take(best.layout)
    draft.micro_batch = best.micro_batch
    return best


_SIMULATED, _NEAR = 24, 1.25
"""Layouts whose schedules are simulated, the fastest by a rough formula; and how much slower by it
the best of another family may be to be simulated too, since the formula errs by as much."""


def _compilable(draft: Draft, layouts: Sequence[Layout]) -> Sequence[Layout]:
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


def _rough_seconds(draft: Draft, layout: Layout, micro_batches: int | None = None) -> float:
    """Seconds a sequence: the same model without simulation, plus the schedule's usual bubble."""
    least = least_micro_batches(draft.config, layout)
    flat = replace(layout, pipeline=1, stages=())
    mine = draft.batch_sequences // layout.data
    count = micro_batches or least
    seconds = draft.cost(flat, mine / count, count).total / layout.pipeline
    idle = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 0.5, "zero_bubble": 0.17, "dualpipe_v": 0.33}
    if layout.pipeline > 1:
        rounds = micro_batches or mine
        seconds *= 1 + idle[layout.schedule] * (layout.pipeline - 1) / rounds
    return seconds / (mine * layout.data)


def _best_micro_batch(draft: Draft, layout: Layout) -> Weighed:
    """The fastest micro-batch of a layout that fits, or the smallest where none does.

    Raises:
        ConfigError: no micro-batch is possible with the configured numbers.
    """
    mine = draft.batch_sequences // layout.data
    limit = draft.memory_limit(layout)
    fitting: list[Weighed] = []
    smallest: Weighed | None = None
    for size in _micro_batches(draft, layout, mine):
        memory = draft.memory(layout, size, mine // size)
        smallest = Weighed(layout, size, mine // size, StepCost({}), memory)
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


def _micro_batches(draft: Draft, layout: Layout, mine: int) -> list[int]:
    """Micro-batch sizes that are possible for `mine` sequences a copy, largest first.

    Raises:
        ConfigError: the configured ones are not.
    """
    config = draft.config
    wanted, pieces = config.train.micro_batch, config.pipeline_parallel.micro_batches
    cap = max(1, _MICRO_TOKENS[draft.kind] // draft.shape.sequence_length)
    sizes = [m for m in range(min(cap, mine), 0, -1) if mine % m == 0]
    if wanted != "auto":
        if mine % wanted:
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


def _too_big(draft: Draft, option: Weighed) -> ConfigError:
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


def _change_that_fits(draft: Draft, ranks: int) -> str | None:
    """The simplest layout of as many ranks that would fit, in the words of a command line."""
    config = draft.config
    offload = config.zero_optimization.offload_ratio
    free = config.model_copy(
        update={
            "data_parallel": DataParallelConfig(),
            "tensor_parallel": TensorParallelConfig(degree="auto"),
            "pipeline_parallel": PipelineParallelConfig(stages="auto", schedule="1f1b"),
            "zero_optimization": ZeroConfig(stage="auto", offload_ratio=offload),
            "memory": config.memory.model_copy(update={"recompute": "auto"}),
        }
    )
    other = replace(draft, config=free, decisions={})

    def changes(layout: Layout) -> list[str]:
        wanted = config.tensor_parallel.split_layers
        words = {
            "tensor_parallel.split_layers": ("all" if layout.tensor > 1 else wanted, wanted),
            "data_parallel.degree": (layout.data, config.data_parallel.degree),
            "tensor_parallel.degree": (layout.tensor, config.tensor_parallel.degree),
            "pipeline_parallel.stages": (layout.pipeline, config.pipeline_parallel.stages),
            "zero_optimization.stage": (layout.zero, config.zero_optimization.stage),
            "memory.recompute": (layout.recompute, config.memory.recompute),
        }
        return [f"{k}={new}" for k, (new, old) in words.items() if old not in (new, "auto")]

    for layout in sorted(open_layouts(other, ranks), key=lambda x: len(changes(x))):
        if other.batch_sequences % (layout.data * least_micro_batches(free, layout)):
            continue
        try:
            option = _best_micro_batch(other, layout)
        except ConfigError:
            continue
        if option.bytes <= other.memory_limit(layout):
            return " ".join(changes(layout)) or None
    return None


def _alternative(draft: Draft, option: Weighed) -> Alternative:
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
    draft: Draft,
    options: Sequence[Weighed],
    unfit: Sequence[Weighed],
    problems: Sequence[ConfigError],
) -> tuple[Decision, ...]:
    """Why the families of layouts that were not chosen were not: memory, waiting, sending."""
    rows: dict[str, Decision] = {}
    best = options[0]
    for option in options[1:]:
        name = _family(option.layout)
        more = option.cost.total / best.cost.total - 1
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
    return tuple(rows.values())


def _left_out(draft: Draft, best: Weighed, rough: Mapping[Layout, float]) -> tuple[Decision, ...]:
    """The families that were not simulated: how much slower the rough formula finds them."""
    told = {row.key for row in draft.rejected} | {_family(best.layout)}
    least: dict[str, float] = {}
    for layout, seconds in rough.items():
        name = _family(layout)
        if name not in told:
            least[name] = min(seconds, least.get(name, seconds))
    quick = _rough_seconds(draft, best.layout)
    return tuple(
        Decision(name, "estimate", f"about {seconds / quick - 1:.0%} slower, not simulated")
        for name, seconds in least.items()
    )


def _family(layout: Layout) -> str:
    return f"TP {layout.tensor}, PP {layout.pipeline}, DP {layout.data}"
