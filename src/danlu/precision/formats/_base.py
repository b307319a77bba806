"""What a number format promises."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from danlu.base.facts import DeviceFacts
from danlu.base.registry import Registry

__all__ = ["FORMATS", "Format"]


class Format(ABC):
    """The format of activations and matrix products; weights and optimizer state stay fp32."""

    dtype: ClassVar[torch.dtype]
    tolerance: ClassVar[float]
    """Relative L2 error of a matrix product against fp64 that the format may have."""

    @abstractmethod
    def supported(self, device: DeviceFacts) -> bool:
        """Whether the device computes it natively."""


FORMATS: Registry[Format] = Registry("danlu.precision.formats", Format, "precision.format")
