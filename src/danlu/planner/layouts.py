"""Which layouts a config allows: every `auto` opened up, and why a layout is impossible."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from danlu.base.errors import ConfigError
from danlu.base.facts import LayerCost, ModelShape
from danlu.config.parallel import PipelineParallelConfig
from danlu.config.run import RunConfig
from danlu.planner.cost import Setting, layer_seconds
from danlu.planner.layout import Layout
from danlu.planner.schedule import SCHEDULES
from danlu.planner.stages import cut_per_rank, equal

__all__ = ["Degrees", "degrees", "impossible", "split_layers", "variants"]


@dataclass(frozen=True)
class Degrees:
    """Sizes of the three axes."""

    data: int
    tensor: int
    pipeline: int

    @property
    def ranks(self) -> int:
        """Their product."""
        return self.data * self.tensor * self.pipeline


def degrees(
    config: RunConfig,
    devices: int,
    node: int,
    layers: int,
    world: int | None,
    sequences: int | None = None,
) -> list[Degrees]:
    """The sizes of the axes that a config leaves open, on `devices` devices.

    Args:
        config: what the user wants.
        devices: that there are.
        node: of them in a machine; tensor parallelism is not proposed beyond that.
        layers: of the model; no more pipeline stages are proposed.
        world: ranks that a launcher has started; then exactly so many are used.
        sequences: of a configured batch; devices that it does not split over are left idle.

    Raises:
        ConfigError: numbers that do not go together.
    """
    tensor, pipeline = config.tensor_parallel.degree, config.pipeline_parallel.stages
    data = config.data_parallel.degree
    total = world or devices
    found = []
    for t in _sizes(tensor, total, node):
        for p in _sizes(pipeline, total // t or 1, layers):
            copies = max(1, total // (t * p)) if data == "auto" else data
            if data == "auto" and world is None and sequences:
                copies = next(d for d in range(copies, 0, -1) if sequences % d == 0)
            one = Degrees(copies, t, p)
            if world is not None and one.ranks != world:
                continue
            if world is None and one.ranks > devices:
                continue
            found.append(one)
    if found:
        return found
    fixed = {
        "tensor_parallel.degree": tensor,
        "pipeline_parallel.stages": pipeline,
        "data_parallel.degree": data,
    }
    words = " x ".join(f"{key} {size}" for key, size in fixed.items() if size not in ("auto", 1))
    numbers = [size for size in fixed.values() if size != "auto"]
    product = 1
    for size in numbers:
        product *= size
    if world is None:
        raise ConfigError(
            "data_parallel.degree",
            f"{words} does not fit on {devices} devices.",
            f"Use a product of {devices} or less.",
        )
    usable = world % product == 0 and data != "auto"
    raise ConfigError(
        "data_parallel.degree",
        f"{words or 'one copy'} makes {product} ranks, but {world} were started.",
        f"Use data_parallel.degree={world // product * data}."
        if usable and isinstance(data, int)
        else f"Start {product} ranks, or a multiple with data_parallel.degree=auto.",
    )


def _sizes(wanted: int | str, total: int, most: int) -> list[int]:
    """The divisors of `total` up to `most`, or what is configured."""
    if wanted == "auto":
        return [n for n in range(1, min(most, total) + 1) if total % n == 0]
    return [int(wanted)]


def impossible(config: RunConfig, shape: ModelShape, one: Degrees) -> ConfigError | None:
    """Why a model cannot be laid out over these degrees, or None."""
    t, p = one.tensor, one.pipeline
    parts = {
        "heads": shape.heads,
        "key/value heads": shape.kv_heads,
        "feed-forward": shape.intermediate_size,
    }
    if config.tensor_parallel.split_layers == "all":
        parts["vocabulary"] = shape.vocab_size
    uneven = [f"{size} {name}" for name, size in parts.items() if size % t]
    if uneven:
        fits = [str(n) for n in range(1, shape.kv_heads + 1)
                if all(size % n == 0 for size in parts.values())]  # fmt: skip
        return ConfigError(
            "tensor_parallel.degree",
            f"{t} does not divide {' and '.join(uneven)}.",
            f"Use {' or '.join(fits)}.",
        )
    if p > shape.layers:
        return ConfigError(
            "pipeline_parallel.stages",
            f"{p} stages are more than the {shape.layers} layers.",
            f"Use {shape.layers} or less.",
        )
    return None


def split_layers(config: RunConfig, layers: int) -> tuple[int, ...]:
    """The numbers of the layers that tensor parallelism splits.

    Raises:
        ConfigError: a layer that is not there, or a pattern that is not understood.
    """
    key, wanted = "tensor_parallel.split_layers", config.tensor_parallel.split_layers
    if wanted == "all":
        return tuple(range(layers))
    chosen = set(wanted) if not isinstance(wanted, str) else _pattern(key, wanted, layers)
    beyond = sorted(n for n in chosen if not 0 <= n < layers)
    if beyond:
        raise ConfigError(
            key, f"there is no layer {beyond[0]}.", f"Use numbers from 0 to {layers - 1}."
        )
    return tuple(sorted(chosen))


def _pattern(key: str, text: str, layers: int) -> set[int]:
    """`4`, `0-7`, `::2` (a Python slice), and lists of these with commas."""
    chosen: set[int] = set()
    for piece in text.replace(" ", "").split(","):
        if re.fullmatch(r"\d+", piece):
            chosen.add(int(piece))
        elif (match := re.fullmatch(r"(\d+)-(\d+)", piece)) and int(match[1]) <= int(match[2]):
            chosen.update(range(int(match[1]), min(int(match[2]), layers) + 1))
        elif re.fullmatch(r"(\d*):(\d*)(:[1-9]\d*)?", piece):
            ends = [int(n) if n else None for n in piece.split(":")]
            chosen.update(range(layers)[slice(*ends)])
        else:
            raise ConfigError(
                key, f"{piece!r} is not understood.", "Write all, 4, 0-7, ::2, or a list [17, 23]."
            )
    return chosen


def variants(
    config: RunConfig,
    shape: ModelShape,
    layers: Sequence[LayerCost],
    one: Degrees,
    setting: Setting,
) -> Iterator[Layout | ConfigError]:
    """All layouts of these degrees that the config allows: schedules, chunks, cuts, ZeRO stages.

    A variant that is not possible is its error.

    Raises:
        ConfigError: layers to split that are not there.
    """
    split = split_layers(config, shape.layers)
    split = split if one.tensor > 1 else ()
    everything = one.tensor > 1 and config.tensor_parallel.split_layers == "all"
    sequence = config.tensor_parallel.sequence_parallel
    even = shape.sequence_length % one.tensor == 0
    if sequence is True and one.tensor > 1 and not (everything and even):
        yield ConfigError(
            "tensor_parallel.sequence_parallel",
            "rows can only be shared where all layers are split and the degree divides"
            " model.sequence_length.",
            "Use split_layers: all, or leave it out.",
        )
        return
    rows = (False, True) if everything and even else (False,)
    for shared in rows if sequence == "auto" else (sequence and rows[-1],):
        base = Layout(
            data=one.data,
            tensor=one.tensor,
            pipeline=one.pipeline,
            split_layers=split,
            split_ends=everything,
            sequence_parallel=shared,
        )
        for scheduled in _scheduled(config.pipeline_parallel, shape, layers, base, setting):
            if isinstance(scheduled, ConfigError):
                yield scheduled
                continue
            for zero, offload, recompute in _savings(config, one.data):
                yield replace(scheduled, zero=zero, offload=offload, recompute=recompute)


def _savings(config: RunConfig, copies: int) -> Iterator[tuple[int, float, str]]:
    """ZeRO stages, offloaded shares, and recomputing, as far as the config leaves them open."""
    stage, share = config.zero_optimization.stage, config.zero_optimization.offload_ratio
    again = config.memory.recompute
    stages = {z if copies > 1 else 0 for z in ((0, 1, 2, 3) if stage == "auto" else (stage,))}
    shares = (0.0, 0.5, 1.0) if share == "auto" else (share,)
    choices = ("none", "selective", "full") if again == "auto" else (again,)
    yield from itertools.product(sorted(stages), shares, choices)


def _scheduled(
    config: PipelineParallelConfig,
    shape: ModelShape,
    layers: Sequence[LayerCost],
    base: Layout,
    setting: Setting,
) -> Iterator[Layout | ConfigError]:
    if base.pipeline == 1:
        if isinstance(config.layers, tuple) and config.stages == 1:
            yield ConfigError(
                "pipeline_parallel.layers",
                "there is one stage, which has all layers.",
                "Set pipeline_parallel.stages.",
            )
            return
        yield base
        return
    names = tuple(SCHEDULES) if config.schedule == "auto" else (config.schedule,)
    for name in names:
        its = SCHEDULES[name]
        chunks = its.chunks
        if isinstance(config.layers, tuple):
            if error := _wrong_cut(config.layers, shape.layers, base.pipeline, name):
                yield error
            else:
                yield replace(base, schedule=name, stages=config.layers)
            continue
        count = chunks * base.pipeline
        if count > shape.layers:
            yield ConfigError(
                "pipeline_parallel.schedule",
                f"{name} holds {chunks} stages a rank, {count} in all, of {shape.layers} layers.",
                "Use 1f1b, or fewer pipeline_parallel.stages.",
            )
            continue
        more = [2 * chunks] if its.more_chunks and 2 * count <= shape.layers else []
        for wanted in (chunks, *more):
            sizes = _cut(config, shape, layers, base, setting, its.owners(base.pipeline, wanted))
            yield replace(base, schedule=name, stages=sizes)


def _cut(
    config: PipelineParallelConfig,
    shape: ModelShape,
    layers: Sequence[LayerCost],
    base: Layout,
    setting: Setting,
    owners: Sequence[int],
) -> tuple[int, ...]:
    """The layers of each stage: equally many, or by their predicted seconds."""
    if config.layers == "equal":
        return equal(shape.layers, len(owners))
    seconds = [
        sum(
            layer_seconds(
                cost, base, setting, shape.sequence_length, split=_is_split(i, base)
            ).values()
        )
        for i, cost in enumerate(layers)
    ]
    return _balanced(tuple(seconds), tuple(owners))


@lru_cache(maxsize=1024)
def _balanced(seconds: tuple[float, ...], owners: tuple[int, ...]) -> tuple[int, ...]:
    return cut_per_rank(seconds[1:-1], owners, first=seconds[0], last=seconds[-1])


def _is_split(index: int, layout: Layout) -> bool:
    return index - 1 in layout.split_layers


def _wrong_cut(sizes: Sequence[int], layers: int, ranks: int, name: str) -> ConfigError | None:
    """Why a configured cut does not go with a schedule, or None."""
    key, its = "pipeline_parallel.layers", SCHEDULES[name]
    if sum(sizes) != layers:
        return ConfigError(
            key, f"{list(sizes)} are {sum(sizes)} layers, the model has {layers}.", "Use them all."
        )
    chunks = len(sizes) // ranks
    if len(sizes) % ranks or chunks < its.chunks or (chunks > its.chunks and not its.more_chunks):
        return ConfigError(
            key,
            f"{len(sizes)} stages do not go on {ranks} ranks with {name}.",
            f"Use {its.chunks * ranks} numbers.",
        )
    return None
