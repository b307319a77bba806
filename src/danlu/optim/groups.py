"""Which parameters decay: matrices do, norms do not."""

from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["parameter_groups"]


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Two optimizer groups: parameters of two axes or more with decay, the rest without."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for _, parameter in named:
        (matrices if parameter.dim() >= 2 else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
