"""From turns to figures: medians over rounds, and ratios only between neighbours.

A *round figure* of an entry is its mean step time over its turns in that round. Throughput is
tokens a step over the median round figure. A ratio is made inside each round first, from what was
measured side by side, and the median is taken last.
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
    peaks = peak_by_round(record)
    entries = {
        name: entry_details(record, known, work, peaks)
        for name, known in record.entries.items()
        if name != PEAK
    }
    rates = {name: details.get("tokens_per_second", {}) for name, details in entries.items()}
    ours = next((name for name in entries if record.entries[name].entry.is_ours), None)
    rivals = {
        name: details["danlu_ratio"]["median"]
        for name, details in entries.items()
        if details.get("danlu_ratio")
    }
    closest = min(rivals, key=rivals.__getitem__, default=None)
    return {
        "tokens_per_second": tokens_per_second(record, rates),
        "mfu": entries[ours].get("mfu") if ours else None,
        "ratio_to_plain_fp32": rivals.get(REFERENCE),
        "ratio_to_best_peer": rivals[closest] if closest else None,
        "best_peer": closest or fastest(record, rates),
        "details": {
            "entries": entries,
            "peak_tflops": peak_details(record, peaks),
            "rounds": [as_plain(facts) for facts in record.rounds],
            "groups": record.groups,
        },
    }


def tokens_per_second(record: Record, rates: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``{"danlu": n, "plain_fp32": n, PEER: {"default": n, "best": n}}``; null where none.

    A peer that has only one setting is reported under both names.
    """
    found: dict[str, Any] = {OURS: None, "plain_fp32": rates.get(REFERENCE, {}).get("median")}
    for name, known in record.entries.items():
        if name == PEAK:
            continue
        median = rates[name].get("median")
        if known.entry.is_ours:
            found[OURS] = median
            continue
        peer = found.setdefault(known.entry.peer.name, {})
        only = len(known.entry.peer.settings) == 1
        for setting in ("default", "best") if only else (known.entry.setting,):
            peer[setting] = median
    return found


def fastest(record: Record, rates: dict[str, dict[str, Any]]) -> str | None:
    """The rival with the highest median, for a run without danlu."""
    known = {
        name: rate["median"]
        for name, rate in rates.items()
        if rate and record.entries[name].entry.is_rival
    }
    return max(known, key=known.__getitem__, default=None)


def entry_details(
    record: Record, known: EntryRecord, work: Workload, peaks: dict[RoundKey, float]
) -> dict[str, Any]:
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
    if known.error or known.warm_up is None or not turns:
        return details
    steps = round_figures(turns)
    rates = {key: work.tokens_per_step / seconds for key, seconds in steps.items()}
    cpu = {key: work.tokens_per_step / s for key, s in round_figures(turns, cpu=True).items()}
    mfus = [
        rate * work.flops_per_token / (peaks[key] * 1e12)
        for key, rate in rates.items()
        if key in peaks
    ]
    losses = [loss for timed in turns for loss in timed.turn.losses]
    return details | {
        "tokens_per_second": spread(rates.values(), digits=1)
        | {"best_step": round(work.tokens_per_step / min(walls(turns)), 1)},
        "tokens_per_cpu_second": spread(cpu.values(), digits=1),
        "first_step_seconds": rounded(known.warm_up.wall_seconds[0]),
        "warm_up_step_seconds": [rounded(seconds) for seconds in known.warm_up.wall_seconds],
        "compile_cache": known.compile_cache,
        "peak_rss_mib": max(timed.turn.peak_rss_mib for timed in turns),
        "idle_cpu_seconds": rounded(sum(timed.turn.idle_cpu_seconds for timed in turns)),
        "first_loss": rounded(next(iter(known.warm_up.losses), None), 4),
        "last_loss": rounded(next(reversed(losses), None), 4),
        "steps_trained": len(known.warm_up.wall_seconds) + len(walls(turns)),
        "mfu": rounded(statistics.median(mfus), 4) if mfus else None,
        "mfu_of_best_product": mfu_of_best_product(record, work, rates.values()),
        "ratio_to_plain_fp32": ratio_to_plain(record, known, steps),
        "danlu_ratio": danlu_ratio(record, turns),
    }


def ratio_to_plain(
    record: Record, known: EntryRecord, steps: dict[RoundKey, float]
) -> dict[str, Any] | None:
    """How many times faster than the plain fp32 loop, round by round.

    For danlu, whose turns stand around the plain loop's, the two neighbours count.
    """
    reference = turns_of(record, REFERENCE)
    if known.entry.is_ours:
        return danlu_ratio(record, reference)
    plain = round_figures(reference)
    ratios = [plain[key] / seconds for key, seconds in steps.items() if key in plain]
    return spread(ratios, digits=3) if ratios else None


def danlu_ratio(record: Record, turns: list[TimedTurn]) -> dict[str, Any] | None:
    """How many times faster danlu was than this entry, from its neighbouring turns."""
    ours = our_turns(record)
    pairs = []
    for timed in turns:
        near = neighbours(timed, ours)
        if near and record.entries[timed.entry].entry.is_rival:
            pairs.append(timed.step_seconds / statistics.mean(n.step_seconds for n in near))
    return spread(pairs, digits=3) if pairs else None


def neighbours(timed: TimedTurn, ours: Iterable[TimedTurn]) -> list[TimedTurn]:
    """The nearest turn of danlu on either side, in the same round."""
    same = [o for o in ours if (o.group, o.round) == (timed.group, timed.round)]
    before = [o for o in same if o.position < timed.position]
    after = [o for o in same if o.position > timed.position]
    return [*before[-1:], *after[:1]]


def peak_by_round(record: Record) -> dict[RoundKey, float]:
    """A round's bf16 peak in TFLOP/s: the faster size's median over the round's samples.

    Median against median: a step's time is a mean over a second or more, and a lucky product of
    20 ms is not what that second could have had. The best product is reported beside it.
    """
    turns = turns_of(record, PEAK)
    peaks = {}
    for key in {(timed.group, timed.round) for timed in turns}:
        here = [timed for timed in turns if (timed.group, timed.round) == key]
        peaks[key] = max(statistics.median(samples(here, f"bf16_{size}_median")) for size in SIZES)
    return peaks


def peak_details(record: Record, peaks: dict[RoundKey, float]) -> dict[str, Any]:
    """Rates of the square products by type and size, in TFLOP/s."""
    turns = turns_of(record, PEAK)
    if not turns:
        return {}
    rates = {
        f"{kind}_{size}": {
            "median": round(statistics.median(samples(turns, f"{kind}_{size}_median")), 4),
            "best": round(max(samples(turns, f"{kind}_{size}_best")), 4),
        }
        for kind in ("bf16", "fp32")
        for size in SIZES
    }
    return rates | {"bf16_by_round": [round(peak, 4) for _, peak in sorted(peaks.items())]}


def mfu_of_best_product(record: Record, work: Workload, rates: Iterable[float]) -> float | None:
    """The median throughput against the single fastest bf16 product of the run: a lower bound."""
    turns = turns_of(record, PEAK)
    if not turns:
        return None
    best = max(max(samples(turns, f"bf16_{size}_best")) for size in SIZES)
    return rounded(statistics.median(rates) * work.flops_per_token / (best * 1e12), 4)


def turns_of(record: Record, name: str) -> list[TimedTurn]:
    """An entry's turns in the order measured; none when it failed, even late."""
    if name not in record.entries or record.entries[name].error:
        return []
    return [timed for timed in record.turns if timed.entry == name]


def our_turns(record: Record) -> list[TimedTurn]:
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
    return [value for timed in turns for value in timed.turn.figures[figure]]


def walls(turns: list[TimedTurn]) -> list[float]:
    return [seconds for timed in turns for seconds in timed.turn.wall_seconds]


def spread(values: Iterable[float], *, digits: int) -> dict[str, Any]:
    """Median, best and all values of one figure, in the order measured."""
    found = [round(value, digits) for value in values]
    median = round(statistics.median(found), digits)
    return {"median": median, "best": max(found), "by_round": found}


def rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
