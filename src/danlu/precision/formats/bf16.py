"""bfloat16: the range of fp32 with 8 significant bits; needs no loss scaling (arXiv 1905.12322)."""

import torch

from danlu.base.facts import DeviceFacts
from danlu.precision.formats._base import Format

__all__ = ["Bf16"]


class Bf16(Format):
    """16 bits: 8 of exponent, 7 of fraction; products are summed in fp32."""

    dtype = torch.bfloat16
    tolerance = 1e-2

    def supported(self, device: DeviceFacts) -> bool:
        """Where the device has bf16 products (AMX or AVX512-BF16 on CPUs)."""
        return "bf16" in device.peak_flops
