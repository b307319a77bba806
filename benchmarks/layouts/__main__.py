"""`python -m benchmarks.layouts`: every part, or some; figures and the page of results."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.layouts import parity, pipeline, planner, tensor, vtrain, zero
from benchmarks.results import BUILD, origin, write
from danlu.hardware.device import probe

REPEATS = "medians of 9 turns after one that does not count, unless a part says otherwise"
PARTS = ("parity", "zero", "pipeline", "balance", "tensor", "planner", "vtrain")


def main() -> None:
    """Measures the wanted parts; the others keep their figures from before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--short", action="store_true", help="few repeats, to see that it works")
    parser.add_argument("--vtrain", type=Path, default=_published(), help="folder of its CSVs")
    options = parser.parse_args()
    probe("cpu", fresh=True)
    works = _works(options.vtrain, short=options.short)
    file = BUILD / "layouts-parts.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for part in options.parts:
        if part in works:
            began = time.perf_counter()
            found[part] = works[part]()
            print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found))
    write("layouts", _figures(found), _page(found, "few" if options.short else REPEATS))


def _published() -> Path | None:
    folder = Path(os.environ.get("DANLU_DATA", "")) / "vtrain"
    return folder if "DANLU_DATA" in os.environ and folder.is_dir() else None


def _works(published: Path | None, *, short: bool) -> dict[str, Callable[[], Any]]:
    ranks, steps = ((1, 2), 4) if short else ((1, 2, 4, 8), 20)
    rounds = 2 if short else 9
    works: dict[str, Callable[[], Any]] = {
        "parity": lambda: parity.measure(steps),
        "zero": lambda: zero.measure(ranks=ranks, rounds=rounds),
        "pipeline": lambda: pipeline.measure(rounds=rounds),
        "balance": lambda: pipeline.balance(rounds=rounds),
        "tensor": lambda: tensor.measure(rounds=rounds),
        "planner": lambda: planner.measure(rounds=min(rounds, 5), memory=not short),
    }
    if published is not None:
        works["vtrain"] = lambda: vtrain.measure(published)
    return works


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    """What other tools read, under the names that they expect."""
    figures = dict(found)
    if "parity" in found:
        figures["parity"] = {name: v["loss"] for name, v in found["parity"].items()}
    if "zero" in found:
        held = found["zero"]["held"]
        figures["zero"] = {
            stage: {ranks: v["bytes"] for ranks, v in row.items()} for stage, row in held.items()
        }
        figures["zero_price"] = {key: v for key, v in found["zero"].items() if key != "held"}
    if "planner" in found:
        figures["planner"] = planner.compare(found["planner"])
    if "pipeline" in found:
        figures["pipeline"] = found["pipeline"]["two_ranks"]
        figures["pipeline_five_ranks"] = found["pipeline"]["five_ranks"]
    return figures


def _page(found: dict[str, Any], repeats: str) -> list[str]:
    pages: dict[str, Callable[[Any], list[str]]] = {
        "parity": parity.page,
        "zero": zero.page,
        "pipeline": pipeline.page,
        "balance": pipeline.balance_page,
        "tensor": tensor.page,
        "planner": planner.page,
        "vtrain": vtrain.page,
    }
    head = [
        "# Layouts over ranks",
        "",
        *origin("layouts", repeats),
        "",
        "Ranks are processes of this machine with one thread each and speak over Gloo. Where ways"
        " are compared they are taken in turn; medians leave out steps during which other processes"
        " used more than a tenth of a CPU (of a disturbed machine the calmest third is taken).",
        "",
    ]
    return head + [line for part in PARTS if part in found for line in pages[part](found[part])]


if __name__ == "__main__":
    main()
