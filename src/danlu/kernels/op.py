"""What an operation is: a reference everyone can read, and a native variant that must equal it.

A file of `kernels/ops` holds one `Op`. Its `reference` is plain PyTorch: it runs on every device,
in every format, under autograd and torch.compile. Its `native` variant, where there is one, calls
C++ that is built on the machine it runs on; it is used only after `verify` has compared its values
and gradients with the reference on every one of the op's `cases`.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from danlu.base.facts import DeviceFacts

__all__ = ["Case", "Op", "Verdict", "pointer", "verify"]

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One shape that an op is verified on; its arguments are drawn from a generator."""

    name: str
    arguments: Callable[[torch.Generator], tuple[Any, ...]]


@dataclass(frozen=True)
class Verdict:
    """The worst error over all cases of a verification, relative to what is allowed."""

    passed: bool
    worst: float
    case: str


class Op(ABC):
    """An operation of the model with its variants."""

    source: ClassVar[str] = ""
    """File of the native variant, beside this class's module; empty where there is none."""
    features: ClassVar[tuple[str, ...]] = ("avx512_bf16",)
    """Instruction sets that the native variant needs."""

    def wanted(self, device: DeviceFacts) -> bool:
        """Whether the native variant is meant for `device`."""
        return device.kind == "cpu"

    @abstractmethod
    def reference(self, *arguments: Any) -> Any:
        """The operation in plain PyTorch, differentiable."""

    @abstractmethod
    def native(self, library: ctypes.CDLL) -> Function:
        """The same function on `library`, differentiable; it takes bf16 tensors on the CPU."""

    @abstractmethod
    def cases(self) -> Iterable[Case]:
        """Shapes, odd ones included, that a variant must be right on."""


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """The address of a tensor's data for a C function; null for None."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def verify(op: Op, function: Function) -> Verdict:
    """Compares `function` with the op's reference in fp64: every output and every gradient.

    What is allowed is what the reference itself loses in bf16: an error (relative L2) up to 1.5
    times that of the bf16 reference, or 1e-3 where that one happens to be nearly exact.
    """
    worst, where = 0.0, ""
    for case in op.cases():
        arguments = case.arguments(torch.Generator().manual_seed(0))
        exact = _results(op.reference, arguments, torch.float64)
        usual = _results(op.reference, arguments, torch.bfloat16)
        got = _results(function, arguments, torch.bfloat16)
        for name, value in exact.items():
            allowed = max(1.5 * _error(usual[name], value), 1e-3)
            share = _error(got[name], value) / allowed
            if not share <= worst:  # also catches NaN
                worst, where = share, f"{case.name}, {name}"
    return Verdict(worst <= 1.0, worst, where)


def _results(
    function: Function, arguments: tuple[Any, ...], dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """Outputs and gradients of `function`, with bf16 arguments brought to `dtype`."""
    wide = dtype == torch.float64
    inputs: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.is_floating_point():
            kind = dtype if argument.dtype == torch.bfloat16 else argument.dtype
            leaf = argument.to(torch.float64 if wide else kind).detach()
            inputs.append(leaf.requires_grad_(argument.requires_grad))
        else:
            inputs.append(argument)
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = torch.zeros((), dtype=torch.float64)
    for index, output in enumerate(outputs):
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(index))
        loss = loss + (output.double() * weights.bfloat16().double()).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    found = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    for index, leaf in enumerate(inputs):
        if isinstance(leaf, Tensor) and leaf.grad is not None:
            found[f"gradient of argument {index}"] = leaf.grad
    return found


def _error(value: Tensor, exact: Tensor) -> float:
    norm = float(exact.double().norm())
    difference = float((value.double() - exact.double()).norm())
    return difference / norm if norm > 1e-6 else difference
