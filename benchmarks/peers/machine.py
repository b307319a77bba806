"""What the machine is, and how much of it others use while we measure."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


def describe() -> dict[str, Any]:
    """Processor, instruction sets that matter for matrix products, cores, memory. No names."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    flags = set(facts.get("flags", "").split())
    return {
        "cpu": facts.get("model name", platform.processor()),
        "cpu_family": facts.get("cpu family"),
        "cpu_model": facts.get("model"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(meminfo_mib("MemTotal") / 1024, 1),
        "flags": {name: name in flags for name in INSTRUCTION_SETS},
        "python": platform.python_version(),
    }


def meminfo_mib(key: str) -> int:
    """One line of ``/proc/meminfo``, in MiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) // 1024
    raise KeyError(key)


@dataclass(frozen=True)
class CpuClock:
    """CPU seconds of the whole machine since it started."""

    total: float
    busy: float
    stolen: float

    @classmethod
    def now(cls) -> CpuClock:
        """Read ``/proc/stat``: user, nice, system, idle, iowait, irq, softirq, steal."""
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        second = os.sysconf("SC_CLK_TCK")
        idle, stolen = ticks[3] + ticks[4], ticks[7]
        busy = sum(ticks) - idle - stolen
        return cls(sum(ticks) / second, busy / second, stolen / second)

    def shares_since(self, before: CpuClock, *, ours: float) -> tuple[float, float]:
        """Shares of the machine used by others, and taken by the hypervisor, since ``before``."""
        total = max(self.total - before.total, 1e-9)
        others = max(self.busy - before.busy - ours, 0.0)
        return others / total, (self.stolen - before.stolen) / total


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
