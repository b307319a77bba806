"""Which variant of each operation runs here: chosen once, when a model is built.

The model calls the functions of `Ops` and never asks what is behind them.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from danlu.base.errors import ConfigError
from danlu.base.facts import DeviceFacts
from danlu.kernels.native import BuildError, build
from danlu.kernels.op import Function, Op, verify
from danlu.kernels.ops.add_norm import AddNorm
from danlu.kernels.ops.attention import Attention
from danlu.kernels.ops.cross_entropy import CrossEntropy, chunked_cross_entropy, torch_rows
from danlu.kernels.ops.linear import Linear
from danlu.kernels.ops.swiglu import SwiGLU

__all__ = ["Ops", "choose_ops", "torch_ops"]


def _kept(_value: Tensor, _make: Callable[[], Tensor]) -> AbstractContextManager[Any]:
    return nullcontext()


_OPS: dict[str, type[Op]] = {
    "linear": Linear,
    "add_norm": AddNorm,
    "attention": Attention,
    "swiglu": SwiGLU,
    "cross_entropy": CrossEntropy,
}


@dataclass(frozen=True)
class Ops:
    """The operations a transformer is made of.

    Attributes:
        linear: see `ops.linear.Linear`.
        add_norm: see `ops.add_norm.AddNorm`.
        attention: see `ops.attention.Attention`.
        swiglu: see `ops.swiglu.SwiGLU`.
        cross_entropy: see `ops.cross_entropy.CrossEntropy`.
        embedding: (ids [N], weight [V, d]) -> [N, d].
        recomputed: (value, function that makes it again) -> a context in which `value` need not be
            kept for backward; see `recompute`. Here it is kept.
        variants: op → what runs (`native`, or `torch` with the reason).
    """

    linear: Callable[..., Tensor]
    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    attention: Callable[[Tensor, Tensor, Tensor, Tensor | None, int, int], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    cross_entropy: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    embedding: Callable[[Tensor, Tensor], Tensor] = F.embedding
    recomputed: Callable[[Tensor, Callable[[], Tensor]], AbstractContextManager[Any]] = _kept
    variants: dict[str, str] = field(default_factory=dict)


def torch_ops() -> Ops:
    """PyTorch's own operations: every device, every format, under torch.compile."""
    return Ops(
        linear=Linear().reference,
        add_norm=AddNorm().reference,
        attention=Attention().reference,
        swiglu=SwiGLU().reference,
        cross_entropy=chunked_cross_entropy(torch_rows),
        variants=dict.fromkeys(_OPS, "torch"),
    )


def choose_ops(device: DeviceFacts, note: Callable[[str], None], *, required: bool = False) -> Ops:
    """Builds and verifies the native variants for `device`; where one fails, PyTorch's runs.

    Args:
        device: the CPU that computes.
        note: told, in a sentence, about every variant that is not native and why.
        required: whether the user has asked for native kernels, so that none may fall back.

    Raises:
        ConfigError: a native variant is required and cannot be used.
    """
    fallback = torch_ops()
    ops = {name: kind() for name, kind in _OPS.items() if kind().wanted(device)}
    if required and not ops:
        raise _refusal(f"there are no kernels for {device.name}")
    with ThreadPoolExecutor() as pool:  # compilers are processes of their own
        built = {name: pool.submit(_native, op, device) for name, op in ops.items()}
    chosen: dict[str, Any] = {}
    variants = dict(fallback.variants)
    for name, future in built.items():
        try:
            function = future.result()
            verdict = verify(ops[name], function)
            if not verdict.passed:
                raise BuildError(
                    f"its error is {verdict.worst:.2g} times what is allowed ({verdict.case})"
                )
            chosen[name], variants[name] = function, "native"
        except BuildError as error:
            if required:
                raise _refusal(f"the kernel of {name} cannot be used: {error}") from None
            variants[name] = f"torch ({error})"
            note(f"{name} runs on PyTorch instead of the native kernel: {error}.")
    return replace(fallback, variants=variants, **chosen)


def _refusal(problem: str) -> ConfigError:
    return ConfigError(
        "kernels.backend", f"native is asked for, but {problem}.", "Use auto or torch."
    )


def _native(op: Op, device: DeviceFacts) -> Function:
    missing = [f for f in op.features if f not in device.features]
    if missing:
        raise BuildError(f"this processor has no {', '.join(missing)}")
    return op.native(build(op.source, f"{device.name} {' '.join(device.features)}"))
