"""What this machine has, and what danlu will use of it."""

import platform
import shutil
from dataclasses import dataclass
from typing import Any

import torch

from danlu import __version__
from danlu.base.facts import DeviceFacts
from danlu.base.files import danlu_home
from danlu.base.units import format_bytes, format_rate
from danlu.config.run import RunConfig
from danlu.hardware.cluster import usable_memory
from danlu.hardware.device import probe
from danlu.kernels.dispatch import choose_ops
from danlu.kernels.native import BuildError, compiler
from danlu.planner.plan import Plan
from danlu.train.planning import plan_run

__all__ = ["Examination", "examine"]


@dataclass(frozen=True)
class Examination:
    """The findings; `problems` are sentences about what is missing or slow."""

    device: DeviceFacts
    compiler: str
    kernels: dict[str, str]
    plan: Plan
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The findings as JSON-ready values."""
        return {
            "device": self.device.to_dict(),
            "compiler": self.compiler,
            "kernels": self.kernels,
            "versions": _versions(),
            "problems": list(self.problems),
        }

    def text(self) -> str:
        """The findings as text."""
        device, plan = self.device, self.plan
        disk = shutil.disk_usage(danlu_home() if danlu_home().exists() else "/")
        rows = {
            "device": f"{device.kind}: {device.name}",
            "threads": str(device.threads or "-"),
            "features": ", ".join(device.features) or "-",
            "memory": format_bytes(device.memory_bytes),
            "peak rates": ", ".join(f"{k} {format_rate(v)}" for k, v in device.peak_flops.items())
            + f" ({device.source})",
            "bandwidth": f"{device.bandwidth / 1e9:.3g} GB/s read and written ({device.source})",
            "disk": f"{format_bytes(disk.free)} free at {danlu_home()}",
            "compiler": self.compiler,
            "versions": ", ".join(f"{k} {v}" for k, v in _versions().items()),
        }
        uses = {
            "format": plan.format,
            "threads": str(plan.threads),
            "kernels": ", ".join(f"{k}: {v}" for k, v in self.kernels.items()),
            "torch.compile": "yes" if plan.compile else "no",
        }
        lines = ["This machine", "", *_rows(rows), "", "danlu will use", "", *_rows(uses)]
        if self.problems:
            lines += ["", "Worth knowing", "", *(f"  - {p}" for p in self.problems)]
        return "\n".join(lines)


def examine(*, fresh: bool = False) -> Examination:
    """Measures this machine (or recalls what was measured) and builds the kernels.

    Args:
        fresh: measures the rates again, which takes two seconds.
    """
    device = probe(fresh=fresh)
    plan = plan_run(RunConfig())
    problems: list[str] = []
    kernels = {"all": "torch"}
    if plan.backend == "native":
        kernels = choose_ops(device, problems.append).variants
    try:
        found = compiler()[1]
    except BuildError as error:
        found = "none"
        problems.append(f"{error}; native kernels are not used. Install g++.")
    if usable_memory() < 4 * 2**30:
        problems.append("Less than 4 GiB of memory: use model.preset=tiny or small.")
    return Examination(device, found, kernels, plan, tuple(problems))


def _versions() -> dict[str, str]:
    return {
        "danlu": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _rows(values: dict[str, str]) -> list[str]:
    width = max(map(len, values))
    return [f"  {key:<{width}}  {value}" for key, value in values.items()]
