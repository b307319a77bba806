"""`precision` and `memory`: number formats, and what is kept or computed again."""

from typing import Literal

from danlu.config._block import Auto, Block, Bytes, planned

__all__ = ["KernelConfig", "MemoryConfig", "PrecisionConfig"]


class PrecisionConfig(Block):
    """Number formats. Master weights, reductions and optimizer state are fp32 in all of them."""

    format: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = planned("auto", values=("fp16", "fp8"))
    """Format of matrix products and activations; `auto` is the fastest one the device computes
    natively."""
    policy: str = planned("fixed")
    """Selector that changes the format of single layers between steps."""
    sensitivity_map: str | None = planned(None)
    """A measured map of how much each layer suffers in each format."""
    loss_scale: float | Auto = planned("auto")
    """Factor on the loss in fp16."""


class MemoryConfig(Block):
    """What is kept for backward and what is computed again."""

    limit: Bytes | Auto = "auto"
    """Memory a rank may use; `auto` is 90 % of the device, of a CPU machine its share."""
    recompute: Literal["none", "selective", "full"] | Auto = "none"
    """Activations computed again in backward instead of kept: `selective`: the outputs of norms and
    SwiGLU, large and cheap to compute; `full`: whole layers, which keep their inputs only; `auto`:
    what is fastest of what fits, together with the layout."""
    adaptive_batch: bool = planned(False)
    """Whether the micro-batch grows to the memory there is."""


class KernelConfig(Block):
    """Which implementation of an operation runs."""

    backend: Literal["auto", "native", "torch"] = "auto"
    """`native`: danlu's own CPU kernels, built and verified at the first run; `torch`: PyTorch's;
    `auto`: the faster."""
    compile: bool | Auto = "auto"
    """Whether torch.compile is used; `auto` where it pays back within the run."""
