"""What a checkpoint holds, and what it says about itself."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

__all__ = ["CheckpointFacts", "read_state", "write_state"]

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
"""Optimizer state by parameter name: the form that loads into any layout."""


@dataclass(frozen=True)
class CheckpointFacts:
    """What must fit before a checkpoint is loaded, and where the run goes on.

    Attributes:
        step: optimizer steps done.
        data: the loader's state (a few integers).
        model: the `ModelShape` as a mapping.
        corpus: fingerprint of the tokens.
        run: fingerprint of the run's identity.
    """

    step: int
    data: Mapping[str, int]
    model: Mapping[str, Any]
    corpus: str
    run: str

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})


def read_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """The model's and the optimizer's tensors by name; they share memory with the live ones."""
    if optimizer is None:
        weights, _ = get_state_dict(model, (), options=_OPTIONS)
        return {"model": weights}
    weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": weights, "optimizer": moments}


def write_state(model: nn.Module, optimizer: Optimizer | None, state: dict[str, Any]) -> None:
    """Puts what `read_state` gave (and a checkpoint filled) back into model and optimizer."""
    set_state_dict(
        model,
        () if optimizer is None else optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state.get("optimizer", {}),
        options=_OPTIONS,
    )
