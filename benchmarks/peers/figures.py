"""From turns to figures: medians over rounds, and ratios only between neighbours.

A *round figure* of an entry is its mean step time over its turns in that round; throughput is
tokens a step over it. A ratio is made inside a round first. When danlu takes part, a turn is
measured in units of the two turns of danlu around it, so that two rivals of the same round are
compared through neighbours too, and not across the minute between them. Medians come last.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.peers.registry import OURS, PEAK, REFERENCE
from benchmarks.peers.rounds import EntryRecord, Record, TimedTurn, as_plain
from benchmarks.peers.workload import Workload

RoundKey = tuple[int, int]
SIZES = (1024, 2048)


def summarize(record: Record, work: Workload) -> dict[str, Any]:
    """The benchmark's figures and, under ``details``, all they were made from."""
    entries = {
        name: entry_details(record, known, work)
        for name, known in record.entries.items()
        if name != PEAK
    }
    ours = next((name for name in entries if record.entries[name].entry.is_ours), None)
    behind = medians(entries, "danlu_ratio")
    closest = min(behind, key=behind.__getitem__, default=None)
    return {
        "tokens_per_second": tokens_per_second(record, medians(entries, "tokens_per_second")),
        "mfu": entries[ours].get("mfu") if ours else None,
        "ratio_to_plain_fp32": behind.get(REFERENCE),
        "ratio_to_best_peer": behind[closest] if closest else None,
        "best_peer": closest or fastest(record, medians(entries, "ratio_to_plain_fp32")),
        "details": {
            "entries": entries,
            "peak_tflops": peak_details(record),
            "rounds": [as_plain(facts) for facts in record.rounds],
            "groups": record.groups,
        },
    }


def medians(entries: dict[str, Any], figure: str) -> dict[str, float]:
    """The median of one figure by entry, for the entries that have it."""
    return {name: e[figure]["median"] for name, e in entries.items() if e.get(figure)}


def tokens_per_second(record: Record, rates: dict[str, float]) -> dict[str, Any]:
    """``{"danlu": n, "plain_fp32": n, PEER: {"default": n, "best": n}}``; null where none.

    A peer that has only one setting is reported under both names.
    """
    found: dict[str, Any] = {OURS: None, "plain_fp32": rates.get(REFERENCE)}
    for name, known in record.entries.items():
        if known.entry.is_ours:
            found[OURS] = rates.get(name)
        elif known.entry.is_rival:
            peer = found.setdefault(known.entry.peer.name, {})
            only = len(known.entry.peer.settings) == 1
            for setting in ("default", "best") if only else (known.entry.setting,):
                peer[setting] = rates.get(name)
    return found


def fastest(record: Record, ratios: dict[str, float]) -> str | None:
    """The rival furthest ahead of the plain loop, for a run without danlu."""
    rivals = {name: r for name, r in ratios.items() if record.entries[name].entry.is_rival}
    return max(rivals, key=rivals.__getitem__, default=None)


def entry_details(record: Record, known: EntryRecord, work: Workload) -> dict[str, Any]:
    """All that is known of one entry. A failed one keeps its facts and has no figures."""
    peer = known.entry.peer
    details: dict[str, Any] = {
        "setting": peer.settings[known.entry.setting],
        "status": "failed" if known.error else "ok",
        "error": known.error,
        "notes": peer.notes,
        "versions": known.versions,
        "parameters": known.parameters,
        "build_seconds": rounded(known.build_seconds),
    }
    turns = turns_of(record, known.entry.name)
    if turns and known.warm_up is not None:
        details |= start_details(known) | turn_details(turns, work)
        details |= {
            "mfu": mfu(record, turns, work),
            "mfu_of_best_product": mfu_of_best_product(record, turns, work),
            "ratio_to_plain_fp32": ratio_to_plain(record, turns),
            "danlu_ratio": danlu_ratio(record, known, turns),
        }
    return details


def start_details(known: EntryRecord) -> dict[str, Any]:
    """What the first, untimed steps cost."""
    assert known.warm_up is not None
    return {
        "first_step_seconds": rounded(known.warm_up.wall_seconds[0]),
        "warm_up_step_seconds": [rounded(seconds) for seconds in known.warm_up.wall_seconds],
        "compile_cache": known.compile_cache,
        "first_loss": rounded(next(iter(known.warm_up.losses), None), 4),
    }


def turn_details(turns: list[TimedTurn], work: Workload) -> dict[str, Any]:
    """An entry's own figures, compared with nothing."""
    rates = [work.tokens_per_step / seconds for seconds in round_figures(turns).values()]
    cpu_rates = [work.tokens_per_step / s for s in round_figures(turns, cpu=True).values()]
    steps = [seconds for timed in turns for seconds in timed.turn.wall_seconds]
    losses = [loss for timed in turns for loss in timed.turn.losses]
    best_step = {"best_step": round(work.tokens_per_step / min(steps), 1)}
    return {
        "tokens_per_second": spread(rates, digits=1) | best_step,
        "tokens_per_cpu_second": spread(cpu_rates, digits=1),
        "steps_timed": len(steps),
        "last_loss": rounded(next(reversed(losses), None), 4),
        "peak_rss_mib": max(timed.turn.peak_rss_mib for timed in turns),
        "idle_cpu_seconds": rounded(sum(timed.turn.idle_cpu_seconds for timed in turns)),
    }


def danlu_ratio(
    record: Record, known: EntryRecord, turns: list[TimedTurn]
) -> dict[str, Any] | None:
    """How many times faster than this entry danlu was, round by round, from neighbours."""
    if not known.entry.is_rival or not our_turns(record):
        return None
    return spread(relative_steps(record, turns).values(), digits=3)


def ratio_to_plain(record: Record, turns: list[TimedTurn]) -> dict[str, Any] | None:
    """How many times faster than the plain fp32 loop, round by round."""
    plain = relative_steps(record, turns_of(record, REFERENCE))
    steps = relative_steps(record, turns)
    ratios = [plain[key] / relative for key, relative in steps.items() if key in plain]
    return spread(ratios, digits=3) if ratios else None


def relative_steps(record: Record, turns: list[TimedTurn]) -> dict[RoundKey, float]:
    """Step times by round in units of danlu's neighbouring turns; in seconds without danlu."""
    ours = our_turns(record)
    found: dict[RoundKey, list[float]] = {}
    for timed in turns:
        near = neighbours(timed, ours)
        unit = statistics.mean(n.step_seconds for n in near) if near else 1.0
        found.setdefault((timed.group, timed.round), []).append(timed.step_seconds / unit)
    return {key: statistics.mean(values) for key, values in found.items()}


def neighbours(timed: TimedTurn, others: Iterable[TimedTurn]) -> list[TimedTurn]:
    """The nearest of ``others`` on either side in the same round; itself if it is one of them."""
    same = [o for o in others if (o.group, o.round) == (timed.group, timed.round)]
    if timed in same:
        return [timed]
    before = [o for o in same if o.position < timed.position]
    after = [o for o in same if o.position > timed.position]
    return [*before[-1:], *after[:1]]


def mfu(record: Record, turns: list[TimedTurn], work: Workload) -> float | None:
    """Median over turns of useful flops against the bf16 peaks measured just before and after."""
    peaks = turns_of(record, PEAK)
    shares = []
    for timed in turns:
        near = [peak_tflops([peak]) for peak in neighbours(timed, peaks)]
        if near:
            useful = work.tokens_per_step * work.flops_per_token / timed.step_seconds
            shares.append(useful / (statistics.mean(near) * 1e12))
    return rounded(statistics.median(shares), 4) if shares else None


def mfu_of_best_product(record: Record, turns: list[TimedTurn], work: Workload) -> float | None:
    """The median throughput against the single fastest bf16 product of the run: a lower bound."""
    peaks = turns_of(record, PEAK)
    if not peaks:
        return None
    best = max(max(samples(peaks, f"bf16_{size}_best")) for size in SIZES)
    useful = work.tokens_per_step * work.flops_per_token
    return rounded(useful / statistics.median(round_figures(turns).values()) / (best * 1e12), 4)


def peak_tflops(peaks: list[TimedTurn], kind: str = "bf16") -> float:
    """A peak in TFLOP/s: the faster size's median.

    Median against median: a step's time is a mean over a second or so, and a lucky product of
    20 ms is not what that second could have had. The best product is reported beside it.
    """
    return max(statistics.median(samples(peaks, f"{kind}_{size}_median")) for size in SIZES)


def peak_details(record: Record) -> dict[str, Any]:
    """Rates of the square products by type and size over the whole run, in TFLOP/s."""
    turns = turns_of(record, PEAK)
    if not turns:
        return {}
    sizes = {
        f"{kind}_{size}": {
            "median": round(statistics.median(samples(turns, f"{kind}_{size}_median")), 4),
            "best": round(max(samples(turns, f"{kind}_{size}_best")), 4),
        }
        for kind in ("bf16", "fp32")
        for size in SIZES
    }
    return {kind: round(peak_tflops(turns, kind), 4) for kind in ("bf16", "fp32")} | sizes


def turns_of(record: Record, name: str) -> list[TimedTurn]:
    """An entry's turns in the order measured; none when it failed, even late."""
    if name not in record.entries or record.entries[name].error:
        return []
    return [timed for timed in record.turns if timed.entry == name]


def our_turns(record: Record) -> list[TimedTurn]:
    """Danlu's turns; none when it did not take part or failed."""
    ours = [name for name, known in record.entries.items() if known.entry.is_ours]
    return [timed for name in ours for timed in turns_of(record, name)]


def round_figures(turns: list[TimedTurn], *, cpu: bool = False) -> dict[RoundKey, float]:
    """Mean step seconds by round, over an entry's turns."""
    found: dict[RoundKey, list[float]] = {}
    for timed in turns:
        seconds = timed.step_cpu_seconds if cpu else timed.step_seconds
        found.setdefault((timed.group, timed.round), []).append(seconds)
    return {key: statistics.mean(values) for key, values in found.items()}


def samples(turns: list[TimedTurn], figure: str) -> list[float]:
    """All values of one of the figures that runners attach to their steps."""
    return [value for timed in turns for value in timed.turn.figures[figure]]


def spread(values: Iterable[float], *, digits: int) -> dict[str, Any]:
    """Median, best and all values of one figure, in the order measured."""
    found = [round(value, digits) for value in values]
    median = round(statistics.median(found), digits)
    return {"median": median, "best": max(found), "by_round": found}


def rounded(value: float | None, digits: int = 3) -> float | None:
    """Rounded for the file; None stays None."""
    return None if value is None else round(value, digits)
