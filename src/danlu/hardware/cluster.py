"""Machines on paper: this one as far as it is known without torch, and a table of known devices.

A cluster is written `16x8xh100`: nodes x devices a node x device. Peak rates are dense (no
sparsity), bandwidths those of the vendors' data sheets; what a run reaches is lower and is what the
planner's efficiencies are for.
"""

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import psutil

from danlu.base.errors import ConfigError, closest
from danlu.base.facts import ClusterFacts, DeviceFacts
from danlu.base.files import danlu_home, write_json

__all__ = [
    "DEVICES",
    "cpu_on_paper",
    "device_file",
    "local_cluster",
    "parse_cluster",
    "recall",
    "remember",
]


_PCIE_X16 = MappingProxyType({4: 32e9, 5: 64e9})
"""Between a device and its CPU, one direction, bytes/s, by generation (PCI-SIG: 2 GB/s and 4 GB/s a
lane; data sheets add both directions). Not of devices that share a module with their CPU."""


def _gpu(
    name: str,
    gigabytes: float,
    tflops: Mapping[str, float],
    terabytes: float,
    pcie: int,
    source: str,
) -> DeviceFacts:
    return DeviceFacts(
        kind="cuda",
        name=name,
        memory_bytes=int(gigabytes * 1e9),
        peak_flops=MappingProxyType({k: v * 1e12 for k, v in tflops.items()}),
        bandwidth=terabytes * 1e12,
        source=source,
        host_bandwidth=_PCIE_X16[pcie],
    )


DEVICES: Mapping[str, DeviceFacts] = MappingProxyType(
    {
        "a100": _gpu(
            "NVIDIA A100 SXM 80GB", 80, {"fp32": 19.5, "bf16": 312, "fp16": 312}, 2.039, 4,
            "NVIDIA A100 data sheet, 2021",
        ),
        "h100": _gpu(
            "NVIDIA H100 SXM", 80, {"fp32": 67, "bf16": 989, "fp16": 989, "fp8": 1979}, 3.35, 5,
            "NVIDIA H100 data sheet, 2023",
        ),
        "h200": _gpu(
            "NVIDIA H200 SXM", 141, {"fp32": 67, "bf16": 989, "fp16": 989, "fp8": 1979}, 4.8, 5,
            "NVIDIA H200 data sheet, 2024",
        ),
        "b200": _gpu(
            "NVIDIA B200 SXM", 180, {"fp32": 75, "bf16": 2250, "fp16": 2250, "fp8": 4500}, 7.7, 5,
            "NVIDIA HGX B200 data sheet, 2025",
        ),
        "mi250x": _gpu(
            "AMD Instinct MI250X", 128, {"fp32": 95.7, "bf16": 383, "fp16": 383}, 3.2, 4,
            "AMD Instinct MI250X data sheet, 2021 (both dies)",
        ),
        "mi300x": _gpu(
            "AMD Instinct MI300X", 192, {"fp32": 163.4, "bf16": 1307, "fp16": 1307, "fp8": 2615},
            5.3, 5, "AMD Instinct MI300X data sheet, 2023",
        ),
    }
)  # fmt: skip
"""Known devices by short name."""

_NODE_BANDWIDTH = MappingProxyType(
    {"a100": 300e9, "h100": 450e9, "h200": 450e9, "b200": 900e9, "mi250x": 50e9, "mi300x": 64e9}
)
"""Between devices of a node, one direction, bytes/s (NVLink 3/4/5; Infinity Fabric a link)."""
_NETWORK_BANDWIDTH = 50e9
"""Between nodes, a device: one 400 Gbit/s port each, the usual rail-optimised build."""


def parse_cluster(text: str, key: str = "--cluster") -> ClusterFacts:
    """A cluster from `16x8xh100` (nodes x devices a node x device), `8xh100` or `h100`.

    Raises:
        ConfigError: a form or a device that is not known.
    """
    match = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?([A-Za-z][\w-]*)", text.strip())
    if not match:
        raise ConfigError(key, f"{text!r} is not understood.", "Write for example 16x8xh100.")
    nodes, devices, name = int(match[1] or 1), int(match[2] or 1), match[3].lower()
    if nodes < 1 or devices < 1:
        raise ConfigError(key, f"{text!r} has no devices.", "Write for example 16x8xh100.")
    if name == "cpu":
        return replace(local_cluster(), nodes=nodes, devices_per_node=devices)
    if name not in DEVICES:
        raise ConfigError(
            key, f"there is no device {match[3]!r} in the table.", closest(name, [*DEVICES, "cpu"])
        )
    return ClusterFacts(nodes, devices, DEVICES[name], _NODE_BANDWIDTH[name], _NETWORK_BANDWIDTH)


def local_cluster(nodes: int = 1) -> ClusterFacts:
    """Machines like this one: measured and remembered, else what its processor lets expect."""
    known = recall()
    device, count = known if known is not None else (cpu_on_paper(), 1)
    return ClusterFacts(nodes, count, device, device.bandwidth / 4, _NETWORK_BANDWIDTH)


def cpu_on_paper() -> DeviceFacts:
    """This CPU from its identification alone; rates are rough until they are measured."""
    features = cpu_features()
    threads = usable_cpus()
    per_core = {"fp32": 32e9}
    if "avx512f" in features:
        per_core["fp32"] = 100e9
    elif "avx2" in features:
        per_core["fp32"] = 60e9
    if "avx512_bf16" in features:
        per_core["bf16"] = 2 * per_core["fp32"]
    if "amx_bf16" in features:
        per_core["bf16"] = 1000e9
    return DeviceFacts(
        kind="cpu",
        name=cpu_name(),
        memory_bytes=usable_memory(),
        peak_flops=MappingProxyType({k: v * threads for k, v in per_core.items()}),
        bandwidth=min(10e9 * threads, 200e9),
        threads=threads,
        features=features,
        source="estimated from the processor's features",
    )


_INTERESTING = ("avx2", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")


def cpu_features() -> tuple[str, ...]:
    """The instruction sets that choices depend on, as Linux names them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ("neon",) if platform.machine() in ("arm64", "aarch64") else ()
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    found = set(flags.split(":", 1)[-1].split())
    return tuple(name for name in _INTERESTING if name in found)


def cpu_name() -> str:
    """The processor's own name, with the family and model that tell equal names apart."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in pairs}
    name = values.get("model name", platform.machine())
    if "cpu family" not in values:
        return name
    return f"{name} (family {values['cpu family']} model {values.get('model', '?')})"


def usable_cpus() -> int:
    """CPUs this process may use: its affinity, and the share that a container grants."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, round(int(quota) / int(period))))


def usable_memory() -> int:
    """Bytes of memory this process may use: the machine's, or less where a container limits it."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def device_file() -> Path:
    """Where the measured facts of this machine are remembered."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{platform.node()} {cpu_name()} {usable_cpus()}".lower())
    return danlu_home() / "devices" / f"{name.strip('-')}.json"


_UNWRITTEN: dict[Path, tuple[DeviceFacts, int]] = {}
"""What `remember` could not write. The one thing a process remembers by itself: what this machine
is must not depend on whether a folder can be written."""


def remember(device: DeviceFacts, count: int) -> str | None:
    """Keeps what was measured, and how many such devices there are, for later runs and plans.

    Returns None, or why it is kept for this process only.
    """
    path = device_file()
    try:
        write_json(path, {"count": count, **device.to_dict()})
    except OSError as error:
        _UNWRITTEN[path] = (device, count)
        return error.strerror or str(error)
    _UNWRITTEN.pop(path, None)
    return None


def recall() -> tuple[DeviceFacts, int] | None:
    """What `remember` kept, or None."""
    path = device_file()
    if path in _UNWRITTEN:
        return _UNWRITTEN[path]
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return DeviceFacts.from_dict(values), int(values["count"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
