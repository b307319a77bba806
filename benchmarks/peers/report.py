"""Writes ``peers.json`` and the table people read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.registry import OURS

COLUMNS = (
    "tool",
    "setting",
    "tok/s median",
    "best round",
    "x plain fp32",
    "danlu ÷ it",
    "MFU",
    "tok/CPU-s",
    "first step s",
    "RSS MiB",
    "loss",
)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write the figures; the file is replaced whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".json.part")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    draft.replace(path)


def write_table(path: Path, result: Mapping[str, Any]) -> None:
    """Write the results page in Markdown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(page(result)) + "\n")


def page(result: Mapping[str, Any]) -> list[str]:
    """All lines of the results page."""
    details = result["details"]
    return [
        "# Peers, side by side",
        "",
        *setup(details),
        "",
        *headline(result),
        "",
        row(COLUMNS),
        row(["---", "---", *["---:"] * (len(COLUMNS) - 2)]),
        *(row(cells(name, entry)) for name, entry in ordered(details["entries"])),
        "",
        *failures(details["entries"]),
        "Settings:",
        "",
        *settings(details["entries"]),
        "",
        *notes(details),
    ]


def setup(details: Mapping[str, Any]) -> list[str]:
    work, machine, run = details["workload"], details["machine"], details["run"]
    flags = ", ".join(name for name, has in machine["flags"].items() if has)
    return [
        f"Command: `{run['command']}`, {run['date']}, {run['minutes']} minutes.  ",
        f"Machine: {machine['cpu']} (family {machine['cpu_family']} model "
        f"{machine['cpu_model']}; {flags}), {machine['cores']} cores shared with others, "
        f"{machine['memory_gib']} GiB.  ",
        f"Repeats: {run['rounds']} rounds of {run['steps']} steps a turn after "
        f"{run['warm_up_steps']} steps of warm-up, {len(details['groups'])} group(s), "
        f"{work['threads']} threads.  ",
        f"Work: {details['parameters'] / 1e6:.2f} M parameters (vocabulary {work['vocab']}, width "
        f"{work['dim']}, {work['layers']} layers), {work['batch']} x {work['sequence']} tokens a "
        "step: batch, forward, backward, clipping, AdamW. Same tokens in the same order for all.",
    ]


def headline(result: Mapping[str, Any]) -> list[str]:
    peak = result["details"]["peak_tflops"]
    lines = []
    if peak:
        best = max(peak["bf16_1024"]["best"], peak["bf16_2048"]["best"])
        lines.append(
            f"Matrix peak in the same minutes: {peak['bf16']:.2f} TFLOP/s bf16 (best product "
            f"{best:.2f}), {peak['fp32']:.2f} fp32."
        )
    if result["ratio_to_best_peer"] is None:
        return [*lines, "danlu did not take part or failed; no ratios to it."]
    return [
        *lines,
        f"**danlu: {result['tokens_per_second'][OURS]:,.0f} tokens/s, "
        f"MFU {percent(result['mfu'])}, "
        f"{number(result['ratio_to_plain_fp32'])} x the plain fp32 loop, "
        f"{number(result['ratio_to_best_peer'])} x the closest rival "
        f"({result['best_peer']}).**",
    ]


def ordered(entries: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Entries that ran, fastest first."""
    ran = [(name, entry) for name, entry in entries.items() if "tokens_per_second" in entry]
    return sorted(ran, key=lambda pair: -pair[1]["tokens_per_second"]["median"])


def cells(name: str, entry: Mapping[str, Any]) -> list[str]:
    tool, _, setting = name.partition(":")
    rate, plain, ours = (
        entry["tokens_per_second"],
        entry["ratio_to_plain_fp32"],
        entry["danlu_ratio"],
    )
    return [
        tool,
        setting,
        f"{rate['median']:,.0f}",
        f"{rate['best']:,.0f}",
        number(plain["median"] if plain else None),
        number(ours["median"] if ours else None),
        percent(entry["mfu"]),
        f"{entry['tokens_per_cpu_second']['median']:,.0f}",
        first_step(entry),
        f"{entry['peak_rss_mib']:,}",
        f"{number(entry['first_loss'])} → {number(entry['last_loss'])}",
    ]


def first_step(entry: Mapping[str, Any]) -> str:
    cache = f" ({entry['compile_cache']})" if entry["compile_cache"] else ""
    return f"{entry['first_step_seconds']:.1f}{cache}"


def failures(entries: Mapping[str, Any]) -> list[str]:
    failed = [f"- {n}: {e['error']}" for n, e in entries.items() if e["status"] == "failed"]
    return ["Failed:", "", *failed, ""] if failed else []


def settings(entries: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, entry in entries.items():
        versions = ", ".join(f"{package} {v}" for package, v in entry["versions"].items())
        notes = f". Note: {entry['notes']}" if entry["notes"] else ""
        lines.append(f"- {name} ({versions or 'did not start'}): {entry['setting']}{notes}")
    return lines


def notes(details: Mapping[str, Any]) -> list[str]:
    rounds = details["rounds"]
    others = sorted(facts["others_cpu_share"] for facts in rounds) or [0.0]
    load = sorted(facts["load_1min"] for facts in rounds) or [0.0]
    return [
        "How to read it:",
        "",
        f"- Others used {percent(others[0])} to {percent(others[-1])} of the CPUs during a round "
        f"(load {load[0]:.1f} to {load[-1]:.1f}). Absolute figures hold for these minutes only; "
        "ratios are made inside a round, from turns seconds apart, and then the median is taken.",
        "- `danlu ÷ it` compares a tool's turn with danlu's turns just before and after. "
        "The closest rival is the tool and setting for which that is lowest.",
        "- MFU = tokens/s x flops a token ÷ the bf16 matrix peak measured just before and after "
        "(faster of two sizes, medians); "
        f"{details['flops_per_token'] / 1e6:.1f} MFLOP a token: 6 a matmul weight, with the head "
        "and without the look-up, plus causal attention. Also for fp32 settings.",
        "- CPU time includes threads that spin while they wait.",
        "- `first step` includes compilation, from the compiler's cold or warm disk cache. The "
        "steps measured come after the warm-up.",
        "- `default` is what a tool does when one follows its quick start; `best` is its best "
        "documented setting on this machine, in mixed precision with fp32 weights and optimizer "
        "states. No allocator is preloaded for anyone.",
        "- Losses differ where a tool initialises weights itself or scores other positions.",
    ]


def row(texts: Any) -> str:
    return f"| {' | '.join(texts)} |"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
