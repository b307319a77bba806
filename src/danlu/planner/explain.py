"""A plan in words: what was decided and why, what it should cost."""

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

from danlu.base.units import format_bytes, format_count, format_duration, format_rate

if TYPE_CHECKING:
    from danlu.planner.plan import Plan

__all__ = ["explain"]

_COLUMNS = 100


def explain(plan: "Plan") -> str:
    """The plan as text, about 100 columns wide."""
    model, device, cluster = plan.model, plan.cluster.device, plan.cluster
    expected = plan.predicted
    total = plan.steps * expected.step_seconds
    lines = [
        f"Plan {plan.hash}",
        "",
        f"  model     {format_count(plan.parameters)} parameters: {model.layers} layers of"
        f" {model.hidden_size}, {model.heads} heads ({model.kv_heads} key/value),"
        f" feed-forward {model.intermediate_size},",
        f"            vocabulary {model.vocab_size}, sequences of {model.sequence_length}",
        f"  machines  {cluster.nodes} x {cluster.devices_per_node} x {device.name},"
        f" {format_bytes(device.memory_bytes)} each",
        "            peak "
        + ", ".join(f"{name} {format_rate(rate)}" for name, rate in device.peak_flops.items()),
        f"            memory {device.bandwidth / 1e9:.3g} GB/s",
        f"            ({device.source})",
        f"  run       {plan.steps} steps of {format_count(plan.batch_tokens)} tokens ="
        f" {format_count(plan.steps * plan.batch_tokens)} tokens, about {format_duration(total)}",
        "",
        "Decided",
        "",
        *_table([(d.key, d.value, d.reason) for d in plan.decisions]),
        "",
        f"Predicted step: {format_duration(expected.step_seconds)},"
        f" {format_count(expected.tokens_per_second)} tokens/s, {expected.mfu:.0%} of the peak"
        + (f"; ranks compute {expected.utilisation:.0%} of it" if expected.utilisation else ""),
        "",
        *_bars({k: v for k, v in expected.seconds.items() if v}, format_duration),
        "",
        f"Predicted memory of a rank: {format_bytes(expected.memory_bytes)}",
        "",
        *_bars({k: float(v) for k, v in expected.memory.items() if v}, format_bytes),
        *_ranks(plan),
        *_others(plan),
    ]
    return "\n".join(lines)


def _ranks(plan: "Plan") -> list[str]:
    """Layers and memory of each pipeline rank."""
    layout, memory = plan.layout, plan.predicted.ranks_memory
    if layout.pipeline == 1:
        return []
    rows = []
    for rank, parts in enumerate(memory):
        stages = [layout.layers_of(s) for s in layout.stage_numbers(rank)]
        layers = ", ".join(_span(stage) for stage in stages)
        held = {"state": 0, "activations": 0}
        for part, size in parts.items():
            held["activations" if part in _PASSING else "state"] += size
        detail = (
            f"{format_bytes(held['state'])} state, {format_bytes(held['activations'])} activations"
        )
        rows.append(
            (f"rank {rank}", f"layers {layers}", f"{format_bytes(sum(parts.values()))}: {detail}")
        )
    return ["", "Memory of each pipeline rank", "", *_table(rows)]


_PASSING = ("activations", "logits and the head's gradient")


def _span(layers: range) -> str:
    return f"{layers.start}-{layers.stop - 1}" if len(layers) > 1 else f"{layers.start}"


def _others(plan: "Plan") -> list[str]:
    """The layouts that came next, and why the other families were not taken."""
    lines: list[str] = []
    if len(plan.alternatives) > 1:
        best = plan.alternatives[0].tokens_per_second
        rows = [
            (
                other.layout.text(),
                f"{other.micro_batches} x {other.micro_batch}",
                f"{other.tokens_per_second / best:.1%} of the speed, bubble {other.bubble:.0%},"
                f" {format_bytes(other.memory_bytes)}",
            )
            for other in plan.alternatives
        ]
        lines += ["", "Fastest layouts (micro-batches x sequences)", "", *_table(rows)]
    if plan.rejected:
        rows = [(r.key, r.value, r.reason) for r in plan.rejected]
        lines += ["", "Not taken", "", *_table(rows)]
    return lines


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    key = max(len(row[0]) for row in rows)
    value = max(len(row[1]) for row in rows)
    start = key + value + 6
    lines = []
    for a, b, reason in rows:
        first, *more = textwrap.wrap(reason, max(_COLUMNS - start, 30)) or [""]
        lines.append(f"  {a:<{key}}  {b:>{value}}  {first}".rstrip())
        lines += [" " * start + line for line in more]
    return lines


def _bars(parts: dict[str, float], show: Callable[[float], str]) -> list[str]:
    total, name = sum(parts.values()), max(len(part) for part in parts)
    lines = []
    for part, amount in parts.items():
        share = amount / total
        bar = "█" * round(30 * share)
        lines.append(f"  {part:<{name}}  {show(amount):>10}  {share:>4.0%}  {bar}".rstrip())
    return lines
