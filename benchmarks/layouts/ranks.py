"""Groups of ranks on this machine, and what each of them does in a measurement.

`run` starts the processes, as `python -m benchmarks.layouts.ranks MODULE FUNCTION FOLDER` with a
launcher's environment variables; each calls FUNCTION(comm, arguments) of MODULE.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

import danlu
from benchmarks.results import ROOT
from danlu.base.facts import ClusterFacts
from danlu.base.output import leave
from danlu.data.loader import Batch
from danlu.hardware.cluster import local_cluster
from danlu.hardware.comm import Comm, join_ranks
from danlu.planner.plan import Plan
from danlu.train.build import Learner, build
from danlu.train.loop import clip, forward_backward, update
from danlu.train.planning import plan_run

TIMEOUT_SECONDS = 900


def model(layers: int, width: int, heads: int, feed_forward: int, vocabulary: int, length: int,
          *more: str) -> list[str]:  # fmt: skip
    """Overrides that make a model of this size, on CPU ranks of one thread."""
    sizes = {
        "layers": layers,
        "hidden_size": width,
        "heads": heads,
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
        "sequence_length": length,
        "tied_embeddings": "false",
    }
    words = [f"model.{name}={size}" for name, size in sizes.items()]
    return [
        *words,
        "model.preset=tiny",
        "train.steps=100",
        "train.device=cpu",
        "launch.threads=1",
        "data_pipeline.tokenizer.type=bytes",
        *more,
    ]


def run(ranks: int, work: Callable[[Comm, Any], Any], arguments: object) -> list[Any]:
    """What `work(comm, arguments)` returns on each rank of a new group; both JSON-ready."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        Path(folder, "arguments.json").write_text(json.dumps(arguments))
        command = [sys.executable, "-m", __name__, work.__module__, work.__name__, folder]
        shared = {
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
            "GOMP_SPINCOUNT": 1000,
        }
        processes = []
        for rank in range(ranks):
            own = {k: str(v) for k, v in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            with open(Path(folder, f"log-{rank}"), "w") as log:
                processes.append(subprocess.Popen(
                    command, env=os.environ | own, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
                ))  # fmt: skip
        try:
            _wait(processes)
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            logs = [Path(folder, f"log-{rank}").read_text()[-3000:] for rank in range(ranks)]
            raise RuntimeError("\n".join(logs))
        return [json.loads(Path(folder, f"result-{r}.json").read_text()) for r in range(ranks)]


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Returns when all have ended, or one has failed."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while any(p.poll() is None for p in processes):
        if any(p.returncode for p in processes) or time.monotonic() > end:
            time.sleep(1.0)  # the others say what they have seen
            return
        time.sleep(0.05)


class Trial:
    """A layout in training, on random tokens."""

    def __init__(
        self, words: Sequence[str], comm: Comm, *, cluster: ClusterFacts | None = None
    ) -> None:
        self.config = danlu.load(None, *words)
        self.plan: Plan = plan_run(self.config, cluster or local_cluster(), world=comm.world)
        self.comm = comm
        scratch = Path(tempfile.gettempdir())
        self.learner: Learner = build(self.config, self.plan, comm, scratch=scratch, note=print)
        plan, copy = self.plan, self.learner.ranks.copy
        draw = torch.Generator().manual_seed(copy)
        size = (plan.accumulation, plan.micro_batch, plan.model.sequence_length)
        ids = torch.randint(0, plan.model.vocab_size, size, generator=draw)
        self.batches = [Batch(part, part, None) for part in ids]

    def update(self) -> None:
        """Clips and updates; the gradients are gone."""
        clip(self.learner)
        update(self.learner, 1e-4)

    def step(self) -> Sample:
        """One step, update and all."""

        def work() -> None:
            forward_backward(self.learner, self.batches)
            self.update()

        return timed(self.comm, work)


class Sample(NamedTuple):
    """Seconds of some work, and the CPUs that other processes used meanwhile (1.0: one CPU)."""

    seconds: float
    others: float


def timed(comm: Comm, work: Callable[[], object]) -> Sample:
    """`work`, begun by all ranks together; the seconds are those of the slowest."""
    comm.wait()
    used, own, began = _used_seconds(), _own_seconds(), time.perf_counter()
    work()
    taken = comm.largest(time.perf_counter() - began)
    used, own = _used_seconds() - used, _own_seconds() - own
    ours = float(comm.sum(torch.tensor([own], dtype=torch.float64)))
    return Sample(taken, max(0.0, comm.share(used) - ours) / taken)


def calm(samples: Sequence[Sample]) -> list[int]:
    """Numbers of the samples that others disturbed least: all below a tenth of a CPU, or a third.

    A machine that others use is slower for seconds at a time; what a layout costs is what it costs
    in between.
    """
    ranked = sorted(range(len(samples)), key=lambda i: samples[i].others)
    least = max(1, -(-len(samples) // 3))
    return [i for n, i in enumerate(ranked) if n < least or samples[i].others < 0.1]


def median_seconds(samples: Sequence[Sample]) -> float:
    """Of the calm ones."""
    return statistics.median(samples[i].seconds for i in calm(samples))


def median_ratio(above: Sequence[Sample], below: Sequence[Sample]) -> float:
    """Median of the ratios of samples that were taken in turn, of pairs that were calm."""
    worse = [max(a, b, key=lambda sample: sample[1]) for a, b in zip(above, below, strict=True)]
    return statistics.median(above[i][0] / below[i][0] for i in calm([Sample(*w) for w in worse]))


def _used_seconds() -> float:
    """Seconds of all CPUs that were not idle since the machine started."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, first[:8])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """CPU seconds of this process, of all its threads."""
    return time.process_time()


def machine_now(comm: Comm, seconds_each: float = 0.15) -> ClusterFacts:
    """This machine's facts with the rates that all ranks together reach at the moment.

    A shared machine's speed changes from minute to minute; a prediction is held against what was
    measured in the same minute. Each rank multiplies and copies on one thread, all at once.
    """
    known = local_cluster()
    a = torch.randn(1024, 1024)
    rates = {}
    for name in known.device.peak_flops:
        one = a.to({"fp32": torch.float32, "bf16": torch.bfloat16}[name])
        out = torch.empty_like(one)
        work = lambda one=one, out=out: torch.mm(one, one, out=out)  # noqa: E731
        rates[name] = 2.0 * 1024**3 * _times_a_second(comm, work, seconds_each)
    source, target = torch.ones(2**24), torch.ones(2**24)
    copies = _times_a_second(comm, lambda: target.copy_(source), seconds_each)
    bandwidth = 2.0 * source.nbytes * copies
    device = replace(known.device, peak_flops=rates, bandwidth=bandwidth)
    return replace(known, device=device, node_bandwidth=bandwidth / 4)


def _times_a_second(comm: Comm, work: Callable[[], object], least: float) -> float:
    """How often a second all ranks together do `work`."""
    work()
    comm.wait()
    began, times = time.perf_counter(), 0
    while time.perf_counter() - began < least:
        work()
        times += 1
    own = torch.tensor([times / (time.perf_counter() - began)], dtype=torch.float64)
    return float(comm.sum(own))


def resident_bytes() -> int:
    """This process's resident memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most resident memory that this process has had."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(module: str, function: str, folder: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    comm = join_ranks("cpu", timeout_seconds=300)
    arguments = json.loads(Path(folder, "arguments.json").read_text())
    found = getattr(importlib.import_module(module), function)(comm, arguments)
    Path(folder, f"result-{comm.rank}.json").write_text(json.dumps(found))
    comm.wait()
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
