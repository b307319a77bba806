"""IEEE single precision: the reference, on every device."""

import torch

from danlu.base.facts import DeviceFacts
from danlu.precision.formats._base import Format

__all__ = ["Fp32"]


class Fp32(Format):
    """32 bits: 8 of exponent, 23 of fraction."""

    dtype = torch.float32
    tolerance = 1e-5

    def supported(self, device: DeviceFacts) -> bool:
        """Everywhere."""
        return True
