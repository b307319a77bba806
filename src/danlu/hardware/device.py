"""The device of this process: what it is, how fast, and how it is set up for a run.

Peak rates are measured on the machine itself, because nothing else is an honest denominator for
"model FLOP utilisation": a shared CPU, a power-capped GPU and a data sheet differ by a factor of
two.
"""

import contextlib
import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import psutil
import torch

from danlu.base.errors import ConfigError
from danlu.base.facts import DeviceFacts
from danlu.hardware.cluster import cpu_on_paper, device_file, recall, remember

__all__ = ["Device", "device_count", "device_kind", "measure", "open_device", "probe"]

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SECONDS_PER_RATE = 0.25
_DISTURBED = 1.15
"""A rate this many times higher than the remembered one says that others disturbed the latter."""


class Device:
    """What a run computes on. `kind` is `cpu` or `cuda` (NVIDIA, and AMD through ROCm)."""

    def __init__(self, kind: str, index: int = 0) -> None:
        self.kind = kind
        self.torch = torch.device("cpu") if kind == "cpu" else torch.device(kind, index)
        self._process = psutil.Process()

    def memory_bytes(self) -> int:
        """Memory in use: resident (CPU), or the peak of allocated memory (GPU)."""
        if self.kind == "cpu":
            return int(self._process.memory_info().rss)
        return int(torch.cuda.max_memory_allocated(self.torch))

    def synchronize(self) -> None:
        """Waits until the device has done everything it was given."""
        if self.kind != "cpu":
            torch.cuda.synchronize(self.torch)


def open_device(kind: str, *, threads: int, index: int = 0) -> Device:
    """Sets this process up for computing on a device.

    Args:
        kind: `cpu` or `cuda`.
        threads: CPU threads of this process.
        index: which device of its kind on this machine.
    """
    torch.set_num_threads(threads)
    if kind == "cpu":
        _keep_freed_memory()
        torch.set_flush_denormal(True)
    else:
        torch.cuda.set_device(index)
        torch.set_float32_matmul_precision("high")
    return Device(kind, index)


def _keep_freed_memory() -> None:
    """Lets glibc's malloc keep what is freed instead of giving it back to the system.

    A training step frees and allocates the same sizes again and again; giving pages back costs
    about 80,000 page faults and 17-20 % of a step. Elsewhere than on glibc nothing is done.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        libc.mallopt(m_top_pad, 64 * 2**20)


def device_kind(wanted: str) -> str:
    """`cpu` or `cuda`, where `wanted` may be `auto`: a GPU where there is one.

    Raises:
        ConfigError: a device that this machine does not have.
    """
    has_gpu = torch.cuda.is_available()
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            "train.device", f"there is no device {wanted!r}.", "Use auto, cpu or cuda."
        )
    if wanted == "cuda" and not has_gpu:
        raise ConfigError("train.device", "PyTorch finds no GPU here.", "Use cpu or auto.")
    return ("cuda" if has_gpu else "cpu") if wanted == "auto" else wanted


def device_count(kind: str) -> int:
    """Ranks that this machine takes when nothing is configured: one a GPU, or one for the CPU."""
    return 1 if device_kind(kind) == "cpu" else torch.cuda.device_count()


def probe(kind: str = "auto", *, fresh: bool = False) -> DeviceFacts:
    """The device a run would use, with its measured rates, remembered from one run to the next.

    Where they cannot be written down, a line on the error stream says so, and the run goes on.

    Args:
        kind: `cpu`, `cuda`, or `auto`: a GPU where there is one.
        fresh: measures again.

    Raises:
        ConfigError: a device that this machine does not have.
    """
    kind = device_kind(kind)
    known = None if fresh else recall()
    fits = known is not None and known[0].kind == kind
    facts = _keep_best(known[0]) if known is not None and fits else measure(kind)
    if problem := remember(facts, device_count(kind)):
        folder = device_file().parent
        print(f"note: {folder} cannot keep the measured rates ({problem}).", file=sys.stderr)
    return facts


def _keep_best(known: DeviceFacts) -> DeviceFacts:
    """Measures the fastest format once more and keeps the higher rate.

    A peak is a maximum: what was measured while others used the machine must not stand for ever.
    Where the fastest format was far too slow, the other rates were too: all are measured again.
    """
    fastest = max(known.peak_flops, key=lambda name: known.peak_flops[name])
    before = torch.get_num_threads()
    if known.kind == "cpu":
        torch.set_num_threads(known.threads)
    rate = _matrix_rate(fastest, torch.device(known.kind))
    torch.set_num_threads(before)
    if rate <= known.peak_flops[fastest]:
        return known
    now = {fastest: rate}
    bandwidth = known.bandwidth
    if rate > _DISTURBED * known.peak_flops[fastest]:
        again = measure(known.kind)
        now = {**again.peak_flops, fastest: max(rate, again.peak_flops[fastest])}
        bandwidth = max(bandwidth, again.bandwidth)
    peaks = {name: max(old, now.get(name, 0.0)) for name, old in known.peak_flops.items()}
    return replace(known, peak_flops=peaks, bandwidth=bandwidth)


def measure(kind: str) -> DeviceFacts:
    """Measures peak matrix rates by format and the copy bandwidth; takes one to two seconds."""
    paper = cpu_on_paper()
    if kind == "cpu":
        before = torch.get_num_threads()
        torch.set_num_threads(paper.threads)
        peaks = {name: _matrix_rate(name, torch.device("cpu")) for name in paper.peak_flops}
        bandwidth = _copy_rate(torch.device("cpu"))
        torch.set_num_threads(before)
        name, memory = paper.name, paper.memory_bytes
        threads, features = paper.threads, paper.features
    else:
        device = torch.device("cuda", 0)
        properties = torch.cuda.get_device_properties(device)
        peaks = {name: _matrix_rate(name, device) for name in _FORMATS}
        bandwidth = _copy_rate(device)
        name, memory = properties.name, int(properties.total_memory)
        threads = 0
        features = (f"sm_{properties.major}{properties.minor}",)
    facts = DeviceFacts(kind, name, memory, peaks, bandwidth, threads, features, "measured")
    return facts if kind == "cpu" else replace(facts, host_bandwidth=_host_rate())


def _matrix_rate(format_name: str, device: torch.device) -> float:
    """Best FLOP/s of a large square product, over a quarter of a second."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(_FORMATS[format_name])
    out = torch.empty_like(a)
    return 2.0 * size**3 / _best_seconds(lambda: torch.mm(a, a, out=out), device)


def _copy_rate(device: torch.device) -> float:
    """Bytes/s, read plus written, of copying 128 MiB."""
    source = torch.ones(2**25, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / _best_seconds(lambda: target.copy_(source), device)


def _host_rate() -> float:
    """Bytes/s of bringing 128 MiB from pinned CPU memory to the GPU."""
    source = torch.ones(2**25, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    return source.nbytes / _best_seconds(lambda: target.copy_(source), target.device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    best, end = once(), time.perf_counter() + _SECONDS_PER_RATE
    while time.perf_counter() < end:
        best = min(best, once())
    return best
