"""The layout over devices: `*_parallel`, `zero_optimization`, `communication`, `launch`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from danlu.config._block import Auto, Block, Bytes, Count, Positive, Seconds, planned

__all__ = [
    "CommunicationConfig",
    "DataParallelConfig",
    "LaunchConfig",
    "PipelineParallelConfig",
    "TensorParallelConfig",
    "ZeroConfig",
]


def _one_layer(value: Any) -> Any:
    return (value,) if type(value) is int else value


class TensorParallelConfig(Block):
    """A layer's matrices split over devices."""

    degree: Positive | Auto = 1
    """Devices that share a layer; `auto`: the planner chooses."""
    split_layers: Annotated[tuple[int, ...] | str, BeforeValidator(_one_layer)] = "all"
    """Layers that are split: numbers (`[17, 23]`), a pattern (`0-7`, `::2`, `4,8-15`), or `all`,
    which also splits embedding and head; the others run whole on every device."""
    sequence_parallel: bool | Auto = "auto"
    """Whether the rows between split layers are shared too (needs all layers split); `auto`: where
    that is predicted to be faster, or is what fits."""


class PipelineParallelConfig(Block):
    """Layers cut into stages; micro-batches flow through them."""

    stages: Positive | Auto = 1
    """Devices that the layers are cut over; `auto`: the planner chooses."""
    micro_batches: Positive | Auto = "auto"
    """Micro-batches a step is cut into."""
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipe_v"] = "auto"
    """Order of forward and backward passes; `auto`: the fastest in simulation."""
    layers: tuple[Positive, ...] | Literal["auto", "measured", "equal"] = "auto"
    """Layers of each stage, in order; `auto` balances their predicted cost, `equal` their number.
    `measured` balances the time that they take on the machine when a run starts, and cuts again
    where the ranks' speeds drift while it runs."""


class ZeroConfig(Block):
    """Optimizer state (1), gradients (2), weights (3) sharded over the data-parallel ranks."""

    stage: Literal[0, 1, 2, 3] | Auto = 0
    """How much is sharded; `auto`: what is fastest of what fits into memory."""
    offload_ratio: Annotated[float, Field(ge=0, le=1)] | Auto = 0.0
    """Share of the optimizer's moments that lives off the device: in a file where the device is the
    CPU, of a GPU in CPU memory (not measured there yet); `auto`: as much as is needed to fit."""


class DataParallelConfig(Block):
    """Whole copies of the model, each on its share of every batch."""

    degree: Positive | Auto = "auto"
    """Copies; `auto`: what the devices leave beside the other degrees, one on a CPU machine."""
    balance: bool = False
    """Whether micro-batches are dealt to the copies by their speed; the batch stays the same, the
    last bits of a loss then depend on the dealing. Needs two micro-batches a copy, no pipeline, no
    ZeRO."""


class CommunicationConfig(Block):
    """What travels between ranks, and how."""

    bucket: Bytes = Field(25 * 2**20, ge=2**16)
    """Gradients are averaged in pieces of this size, while backward still runs."""
    compression: str = planned("none")
    """Form in which gradients travel."""


class LaunchConfig(Block):
    """Processes and threads on this machine."""

    threads: Annotated[Count, Field(ge=1, le=1024)] | Auto = "auto"
    """CPU threads a rank uses; `auto` shares the cores among the ranks."""
    measure_layouts: int = Field(3, ge=0, le=16)
    """Of the layouts that are predicted to be fastest, so many are tried for a few steps and the
    fastest is kept, where the config leaves the layout open; 0 trusts the prediction."""
    timeout: Seconds = Field(600.0, gt=0, le=30 * 86400)
    """How long a rank waits for the others before the run ends with an error."""
