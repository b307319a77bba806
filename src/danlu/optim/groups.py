"""Which parameters decay: matrices do, norms do not."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["parameter_groups"]


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Optimizer groups: parameters of two axes or more with decay, the rest without.

    Parameters on different device meshes are in different groups, because PyTorch's optimizers
    update a group with operations that take tensors of one mesh.
    """
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for _, parameter in named:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.dim() < 2, mesh), []).append(parameter)
    return [
        {"params": members, "weight_decay": 0.0 if plain else weight_decay}
        for (plain, _), members in sorted(groups.items(), key=lambda item: item[0][0])
    ]
