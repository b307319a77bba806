"""``python -m benchmarks.peers``: install what is missing, measure, write figures and table."""

from __future__ import annotations

import argparse
import datetime
import fcntl
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from benchmarks.peers import machine, report
from benchmarks.peers.environments import BUILD, ROOT, InstallError, install, is_ready
from benchmarks.peers.figures import summarize
from benchmarks.peers.process import clear_caches, remove_stale_locks
from benchmarks.peers.registry import REFERENCE, choose, discover
from benchmarks.peers.rounds import EntryRecord, Plan, Record, measure
from benchmarks.peers.workload import PRESETS, Workload

PUBLISHED_ROUNDS = 5
FIGURES = ROOT / "build" / "bench" / "peers.json"
PUBLISHED = ROOT / "docs" / "results" / "peers.md"
console = Console(stderr=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 when the reference was measured, whatever became of the others."""
    options = parse(arguments)
    work = workload(options)
    try:
        entries = choose(discover(), options.only)
    except ValueError as error:
        console.print(str(error))
        return 2
    if options.list:
        for entry in entries:
            print(f"{entry.name:22} {entry.peer.settings[entry.setting]}")
        return 0
    plan = Plan(options.rounds, options.steps, options.warm_up, options.group_size)
    record = Record({entry.name: EntryRecord(entry) for entry in entries})
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, _as_interrupt)
    try:
        with only_run():
            return run(options, work, plan, record)
    except KeyboardInterrupt:
        console.print("interrupted; all runners were ended, nothing was written")
        return 130


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. ``--quick`` only checks that everything still runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--model", choices=PRESETS, default="28m", help="model and batch")
    parser.add_argument("--rounds", type=int, default=PUBLISHED_ROUNDS)
    parser.add_argument("--steps", type=int, default=3, help="training steps a turn")
    parser.add_argument("--warm-up", type=int, default=3, help="untimed steps at the start")
    parser.add_argument("--threads", type=int, default=2, help="threads of every peer")
    parser.add_argument("--only", default="", help="comma-separated peers or peer:setting")
    parser.add_argument("--group-size", type=int, help="runners alive at once (default: memory)")
    parser.add_argument("--cold", action="store_true", help="clear the compilers' caches first")
    parser.add_argument("--quick", action="store_true", help="tiny model, one round, one step")
    parser.add_argument("--list", action="store_true", help="show who takes part and stop")
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name]
    if options.quick:
        options.model, options.rounds, options.steps = "tiny", 1, 1
    if min(options.rounds, options.steps, options.warm_up, options.threads) < 1:
        parser.error("--rounds, --steps, --warm-up and --threads must be at least 1")
    return options


def workload(options: argparse.Namespace) -> Workload:
    """The chosen model with the chosen number of threads."""
    return replace(PRESETS[options.model], threads=options.threads)


def run(options: argparse.Namespace, work: Workload, plan: Plan, record: Record) -> int:
    """Install, measure, report."""
    start = time.monotonic()
    install_missing(record)
    remove_stale_locks()
    if options.cold:
        clear_caches()
    with console.status("starting") as status:

        def say(text: str, *, lasting: bool = False) -> None:
            status.update(text)
            if lasting:
                console.print(text, markup=False)

        measure(record, work, plan, say)
    result = summarize(record, work)
    result["details"] |= facts(work, plan, minutes=(time.monotonic() - start) / 60)
    report.write_json(FIGURES, result)
    table = table_path(options, plan)
    report.write_table(table, result)
    print("\n".join(report.page(result)))
    print(f"\n{FIGURES.relative_to(ROOT)}, {table.relative_to(ROOT)}")
    return 0 if record.entries[REFERENCE].error is None else 1


def install_missing(record: Record) -> None:
    """Make the environments the run needs; a peer whose environment fails is a failed peer."""
    needed = {known.entry.peer.environment for known in record.entries.values()}
    for family in sorted(name for name in needed if name and not is_ready(name)):
        console.print(f"installing environment {family}")
        try:
            install(family)
        except InstallError as error:
            for known in record.entries.values():
                if known.entry.peer.environment == family:
                    known.error = f"environment not installed: {error}"


def facts(work: Workload, plan: Plan, *, minutes: float) -> dict[str, Any]:
    """What a reader needs to judge or repeat the run."""
    command = " ".join(["python -m benchmarks.peers", *sys.argv[1:]])
    return {
        "machine": machine.describe(),
        "workload": asdict(work),
        "parameters": work.parameters,
        "flops_per_token": work.flops_per_token,
        "run": {
            "command": command,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "minutes": round(minutes, 1),
            "rounds": plan.rounds,
            "steps": plan.steps,
            "warm_up_steps": plan.warm_up_steps,
        },
    }


def table_path(options: argparse.Namespace, plan: Plan) -> Path:
    """Where the table goes: only a whole run replaces the published one."""
    whole = plan.rounds >= PUBLISHED_ROUNDS and not options.only and not options.quick
    return PUBLISHED if whole else FIGURES.with_suffix(".md")


@contextmanager
def only_run() -> Iterator[None]:
    """Hold a lock: two runs at once would measure each other."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("waiting for another run of this benchmark to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _as_interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
