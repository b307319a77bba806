"""The numbers of a step: kept on the device, added up over ranks once an interval."""

import contextlib
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from danlu.base.facts import StepReport
from danlu.hardware.comm import Comm
from danlu.hardware.device import Device

__all__ = ["Meter"]


class Meter:
    """Measures steps and turns them into reports.

    Args:
        comm: all ranks; `collect` is called by all of them together.
        device: where the numbers are.
        flops_per_token: of training.
        peak_flops: of all devices of the run, FLOP/s; what "MFU" is a share of. 0: not known.

    Attributes:
        peak_flops: as given; whoever finds a higher one sets it.
    """

    def __init__(
        self, comm: Comm, device: Device, *, flops_per_token: float, peak_flops: float
    ) -> None:
        self._comm, self._device = comm, device
        self._flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.restart()

    def restart(self) -> None:
        """Begins a new interval: what `collect` gives is of the steps since then."""
        self._losses: list[Tensor] = []
        self._tokens = 0
        self._data_seconds = 0.0
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside is nobody's step (evaluations, checkpoints)."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._began += time.perf_counter() - began

    def add(self, loss: Tensor, *, tokens: int, data_seconds: float) -> None:
        """One step's loss (this rank's share of the mean), its tokens, and its wait for data."""
        self._losses.append(loss)
        self._tokens += tokens
        self._data_seconds += data_seconds

    def collect(
        self, step: int, gradient_norm: Tensor, learning_rate: float, *, stop: bool
    ) -> tuple[StepReport, bool]:
        """The report of the interval's steps so far, and whether any rank wants to stop.

        The loss is the newest step's, the same number on every rank.
        """
        numbers = torch.stack([self._losses[-1].float(), gradient_norm.float()]).double()
        values = torch.tensor([float(numbers[0]), float(stop)], dtype=torch.float64)
        values = self._comm.sum(values)
        self._device.synchronize()
        seconds = time.perf_counter() - self._began
        rate = self._tokens / seconds
        report = StepReport(
            step=step,
            tokens=self._tokens,
            loss=float(values[0]),
            gradient_norm=float(numbers[1]),
            learning_rate=learning_rate,
            seconds=seconds / len(self._losses),
            tokens_per_second=rate,
            mfu=self.utilisation(rate),
            memory_bytes=round(self._comm.largest(self._device.memory_bytes())),
            data_seconds=self._data_seconds / len(self._losses),
        )
        return report, bool(values[1] > 0)

    def utilisation(self, tokens_per_second: float) -> float | None:
        """Model FLOP/s at a throughput over the peak; None where no peak is known."""
        achieved = tokens_per_second * self._flops_per_token
        return achieved / self.peak_flops if self.peak_flops else None

    @staticmethod
    def finite(report: StepReport) -> bool:
        """Whether loss and gradient are numbers."""
        return math.isfinite(report.loss) and math.isfinite(report.gradient_norm)
