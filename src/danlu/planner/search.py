"""From a config and a cluster to a Plan: every `auto` becomes a number, with its reason.

Pure arithmetic; no torch, no files, no clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from danlu.base.errors import ConfigError
from danlu.base.facts import ClusterFacts, LayerCost, ModelShape
from danlu.base.units import format_bytes, format_count, format_duration, format_rate
from danlu.config.run import RunConfig
from danlu.planner.cost import efficiency, step_seconds
from danlu.planner.memory import memory_bytes
from danlu.planner.plan import Decision, Plan, Prediction

__all__ = ["make_plan", "pin"]

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
    _choose_ranks(draft, world)
    _choose_arithmetic(draft)
    _choose_length(draft)
    _choose_compile(draft)
    _choose_length(draft)  # once more, at the speed that compiling gives
    _choose_micro_batch(draft)
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


@dataclass
class _Draft:
    """A plan in the making: the inputs, and the numbers decided so far."""

    config: RunConfig
    shape: ModelShape
    layers: Sequence[LayerCost]
    cluster: ClusterFacts
    ranks: int = 1
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

    def predict(self, sequences_per_rank: float, micro_batches: int) -> dict[str, float]:
        per_node = -(-self.ranks // self.cluster.nodes)
        return step_seconds(
            self.layers,
            self.cluster,
            width=self.shape.hidden_size,
            number_format=self.format,
            reached=efficiency(self.cluster.device, self.backend, compiled=self.compiled),
            tokens_per_rank=round(sequences_per_rank * self.shape.sequence_length),
            micro_batches=micro_batches,
            ranks=self.ranks,
            device_share=1 / per_node if self.kind == "cpu" else 1.0,
        )

    def memory(self, micro_batch: int) -> dict[str, int]:
        return memory_bytes(
            self.layers,
            self.shape,
            kind=self.kind,
            number_format=self.format,
            micro_tokens=micro_batch * self.shape.sequence_length,
            backend=self.backend,
        )

    def memory_limit(self) -> int:
        limit = self.config.memory.limit
        if limit != "auto":
            return limit
        sharing = -(-self.ranks // self.cluster.nodes) if self.kind == "cpu" else 1
        return int(_MEMORY_SHARE * self.cluster.device.memory_bytes / sharing)


def _choose_ranks(draft: _Draft, world: int | None) -> None:
    wanted = draft.config.data_parallel.degree
    usable = draft.cluster.devices if draft.kind != "cpu" else draft.cluster.nodes
    if world is not None and wanted not in ("auto", world):
        raise ConfigError(
            "data_parallel.degree",
            f"{wanted} copies, but {world} ranks were started.",
            f"Use auto or {world}, or start {wanted} ranks.",
        )
    if world is not None:
        draft.ranks, reason = world, "ranks that the launcher started"
    elif wanted != "auto":
        draft.ranks, reason = wanted, "configured"
    else:
        one = "one process a CPU machine" if draft.kind == "cpu" else "one a device"
        draft.ranks, reason = usable, one
    if draft.kind != "cpu" and draft.ranks > usable:
        raise ConfigError(
            "data_parallel.degree",
            f"{draft.ranks} copies need {draft.ranks} devices, there are {usable}.",
            f"Use {usable} or less.",
        )
    draft.decide("data_parallel.degree", draft.ranks, reason)
    cores, here = draft.cluster.device.threads or 8, -(-draft.ranks // draft.cluster.nodes)
    threads = draft.config.launch.threads
    draft.threads = max(1, cores // here) if threads == "auto" else threads
    why = f"{cores} CPUs among {here} ranks a machine" if threads == "auto" else "configured"
    draft.decide("launch.threads", draft.threads, why)


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
    sequence_seconds = sum(draft.predict(1.0 / draft.ranks, 1).values())
    fixed = draft.predict(0.0, 1)
    per_token = (sequence_seconds - sum(fixed.values())) / length
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
    share = draft.ranks * length
    sequences = max(1, round(tokens / share)) * draft.ranks
    if train.batch_tokens != "auto" and sequences * length != train.batch_tokens:
        if train.batch_tokens % share == 0:
            sequences = train.batch_tokens // length
        else:
            reason = f"{train.batch_tokens} rounded to whole sequences on every rank"
    draft.batch_sequences = sequences
    draft.decide("train.batch_tokens", sequences * length, reason)
    if train.steps != "auto":
        draft.steps, reason = train.steps, "configured"
    else:
        step = sum(draft.predict(sequences / draft.ranks, 1).values())
        draft.steps = max(1, int(train.duration / step))
        reason = f"what fits into {format_duration(train.duration)} at the predicted speed"
    draft.decide("train.steps", draft.steps, reason)


def _choose_micro_batch(draft: _Draft) -> None:
    mine, length = draft.batch_sequences // draft.ranks, draft.shape.sequence_length
    wanted, limit = draft.config.train.micro_batch, draft.memory_limit()
    if wanted != "auto":
        if mine % wanted:
            fits = [str(m) for m in range(1, mine + 1) if mine % m == 0]
            raise ConfigError(
                "train.micro_batch",
                f"{wanted} does not divide the {mine} sequences of a rank's step.",
                f"Use {', '.join(fits[:12])}.",
            )
        draft.micro_batch, reason = wanted, "configured"
    else:
        cap = max(1, _MICRO_TOKENS[draft.kind] // length)
        sizes = [m for m in range(min(cap, mine), 0, -1) if mine % m == 0]
        fitting = [m for m in sizes if sum(draft.memory(m).values()) <= limit]
        draft.micro_batch = (fitting or sizes[-1:])[0]
        reason = f"divides {mine} sequences, fits {format_bytes(limit)}, fills the device"
    needed = sum(draft.memory(draft.micro_batch).values())
    if needed > limit:
        raise ConfigError(
            "model",
            f"a rank needs {format_bytes(needed)} of memory, {format_bytes(limit)} are allowed.",
            "Use a smaller model.preset, model.sequence_length or train.micro_batch, or raise "
            "memory.limit.",
        )
    draft.decide("train.micro_batch", draft.micro_batch, reason)
    draft.decide("accumulation", mine // draft.micro_batch, "micro-batches of a rank in a step")


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
    seconds = draft.steps * sum(draft.predict(draft.batch_sequences / draft.ranks, 1).values())
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
    mine = draft.batch_sequences // draft.ranks
    return sum(draft.predict(mine, mine // draft.micro_batch).values())


def _finish(draft: _Draft) -> Plan:
    mine, length = draft.batch_sequences // draft.ranks, draft.shape.sequence_length
    seconds = draft.predict(mine, mine // draft.micro_batch)
    step, tokens = sum(seconds.values()), draft.batch_sequences * length
    peak = draft.cluster.device.peak_flops[draft.format]
    peak *= draft.cluster.nodes if draft.kind == "cpu" else draft.ranks
    return Plan(
        model=draft.shape,
        parameters=draft.parameters,
        flops_per_token=draft.flops_per_token,
        cluster=draft.cluster,
        data_parallel=draft.ranks,
        threads=draft.threads,
        format=draft.format,
        backend=draft.backend,
        compile=draft.compiled,
        batch_tokens=tokens,
        micro_batch=draft.micro_batch,
        accumulation=mine // draft.micro_batch,
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
            seconds=seconds,
            memory=draft.memory(draft.micro_batch),
        ),
        decisions=tuple(draft.decisions.values()),
    )
