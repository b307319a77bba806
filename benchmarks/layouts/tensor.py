"""Tensor parallelism of one wide layer, against two halves of it that never communicate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.layouts.ranks import Sample, median_ratio, median_seconds, run, timed
from benchmarks.results import table
from danlu.base.facts import ModelShape
from danlu.base.units import format_duration
from danlu.hardware.cluster import local_cluster
from danlu.hardware.comm import Comm
from danlu.kernels.dispatch import Ops, choose_ops, torch_ops
from danlu.models.transformer import DIVIDED, PLACEMENTS, Block, Positions, rotary_tables
from danlu.parallel.mesh import arrange
from danlu.parallel.tensor import split_model, split_ops
from danlu.planner.layout import Layout

WIDTH, HEADS, FEED_FORWARD, LENGTH = 4096, 32, 11008, 512


def measure(*, rounds: int) -> dict[str, Any]:
    """Seconds of forward and backward by way, and the efficiency they make."""
    print("tensor: one layer of width 4096", flush=True)
    times = run(2, race, {"rounds": rounds})[0]
    samples = {name: [Sample(*one) for one in all_] for name, all_ in times["pairs"].items()}
    medians = {name: median_seconds(all_) for name, all_ in samples.items()}
    found: dict[str, Any] = {"seconds": medians, "format": times["format"]}
    for name, way in (("efficiency", "rows shared"), ("efficiency_whole_rows", "whole rows")):
        found[name] = median_ratio(samples["ceiling"], samples[way])
        found[name.replace("efficiency", "speed_up")] = medians["one rank"] / medians[way]
    return found


def race(comm: Comm, task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of all ways, in turn: split with rows shared, with whole rows, halves, one rank."""
    device = local_cluster().device
    bf16 = "avx512_bf16" in device.features
    ops, dtype = (choose_ops(device, print), torch.bfloat16) if bf16 else (torch_ops(), torch.float)
    mesh = arrange(Layout(tensor=2, split_layers=(0,)), comm).axis("tensor")
    ways = {}
    for name, shared in (("rows shared", True), ("whole rows", False)):
        holder = _holder(split_ops(ops, mesh, sequence_parallel=shared), 1)
        split_model(holder, mesh, PLACEMENTS, DIVIDED, wanted=lambda _: True,
                    sequence_parallel=shared)  # fmt: skip
        ways[name] = (_fill(holder), LENGTH // 2 if shared else LENGTH)
    ways["ceiling"] = (_fill(_holder(ops, 2)), LENGTH)
    whole = _fill(_holder(ops, 1)) if comm.first else None
    times: dict[str, list[Sample]] = {name: [] for name in [*ways, "one rank"]}
    for turn in range(task["rounds"] + 1):
        for name, (layer, rows) in ways.items():
            taken = timed(comm, lambda layer=layer, rows=rows: _pass(layer, rows, dtype))
            _forget(layer)
            if turn:
                times[name].append(taken)
        if turn % 3 == 0 or turn == 1:  # slow: a third of the turns will do
            alone = timed(comm, lambda: whole and _pass(whole, LENGTH, dtype))
            _forget(whole)
            if turn:
                times["one rank"].append(alone)
    return {"pairs": times, "format": "bf16" if bf16 else "fp32"}


def _holder(ops: Ops, parts: int) -> nn.Module:
    """A layer, or one of `parts` slices of it, at the path that the placements speak of."""
    shape = ModelShape(
        64, WIDTH, 1, HEADS // parts, HEADS // parts, WIDTH // HEADS, FEED_FORWARD // parts,
        LENGTH, False, 10000.0, 1e-5,
    )  # fmt: skip
    holder = nn.Module()
    holder.layers = nn.ModuleDict({"0": Block(shape, ops, 0)})
    return holder


@torch.no_grad()
def _fill(holder: nn.Module) -> nn.Module:
    for weight in holder.parameters():
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        if local.dim() > 1:
            local.normal_(0.0, 0.02)
    return holder


def _pass(holder: nn.Module, rows: int, dtype: torch.dtype) -> None:
    """Forward and backward of the layer for one sequence."""
    block = holder.layers["0"]  # type: ignore[index]
    x_nd: Tensor = torch.ones(rows, WIDTH, dtype=dtype, requires_grad=True)
    positions = Positions(1, *rotary_tables(LENGTH, WIDTH // HEADS, 10000.0), None)
    x_nd, branch_nd = block(x_nd, None, positions)
    (x_nd + branch_nd).backward(torch.ones(rows, WIDTH, dtype=dtype))


def _forget(holder: nn.Module | None) -> None:
    for weight in holder.parameters() if holder is not None else ():
        weight.grad = None


def page(found: dict[str, Any]) -> list[str]:
    """The results in Markdown."""
    times = found["seconds"]
    rows = [
        ["two halves that never communicate", format_duration(times["ceiling"]), "", ""],
        *(
            [f"tensor parallel, {way}", format_duration(times[way]), f"{found[e]:.1%}",
             f"{found[s]:.2f}"]
            for way, e, s in (
                ("rows shared", "efficiency", "speed_up"),
                ("whole rows", "efficiency_whole_rows", "speed_up_whole_rows"),
            )
        ),
        ["one rank, whole layer", format_duration(times["one rank"]), "", "1.00"],
    ]  # fmt: skip
    return [
        "## Tensor parallel",
        "",
        f"Forward and backward of one layer: width {WIDTH}, {HEADS} heads, feed-forward"
        f" {FEED_FORWARD}, one sequence of {LENGTH}, {found['format']}, 2 ranks of one thread, all"
        " ways taken in turn; efficiency is the median of the pairs' ratios (goal 90 %).",
        "",
        *table(["", "seconds", "efficiency", "speed-up over one rank"], rows),
        "",
    ]
