"""Where figures go, and the line that says where they come from."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from danlu.base.files import atomic_write, write_json
from danlu.base.units import format_bytes, format_rate
from danlu.hardware.device import probe

ROOT = Path(__file__).parent.parent
BUILD, PAGES = ROOT / "build" / "bench", ROOT / "docs" / "results"


def origin(name: str, repeats: str) -> list[str]:
    """Markdown lines that say how the figures were made."""
    device = probe("cpu")
    rates = ", ".join(f"{k} {format_rate(v)}" for k, v in device.peak_flops.items())
    words = " ".join("PATH" if "/" in word else word for word in sys.argv[1:])
    return [
        f"Command: `make bench-{name}{f' ARGS={words!r}' if words else ''}`.",
        f"Machine: {device.name}, {device.threads} CPUs, {format_bytes(device.memory_bytes)},"
        f" {', '.join(device.features)}; measured peaks {rates}, {device.bandwidth / 1e9:.3g} GB/s;"
        f" torch {torch.__version__}.",
        f"Repeats: {repeats}. Date: {datetime.now(UTC):%Y-%m-%d}.",
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; all columns but the first are right-aligned."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def write(name: str, figures: Mapping[str, Any], page: Sequence[str]) -> None:
    """Writes both files, each whole or not at all, and shows the page."""
    write_json(BUILD / f"{name}.json", figures)
    text = "\n".join(page) + "\n"
    with atomic_write(PAGES / f"{name}.md") as file:
        file.write(text)
    print(text)
