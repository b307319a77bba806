"""AdamW (arXiv 1711.05101), PyTorch's fused kernel: one pass over memory a step."""

from collections.abc import Iterable

import torch
from torch import nn

from danlu.config.optim import OptimizerConfig
from danlu.optim.groups import parameter_groups

__all__ = ["build_adamw"]


def build_adamw(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, learning_rate: float
) -> torch.optim.AdamW:
    """The optimizer over fp32 parameters; its state is two fp32 moments a parameter."""
    return torch.optim.AdamW(
        parameter_groups(named, config.weight_decay),
        lr=learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )
