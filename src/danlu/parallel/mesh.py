"""The ranks of a run as a mesh: pipeline x data x tensor."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from danlu.base.errors import ConfigError
from danlu.hardware.comm import Comm
from danlu.planner.layout import Layout

__all__ = ["Ranks", "arrange", "fill"]


@dataclass(frozen=True)
class Ranks:
    """This rank's place in a layout, and its groups.

    Attributes:
        layout: the degrees.
        comm: all ranks.
        copy, shard, stage: its data-, tensor- and pipeline-parallel numbers.
        mesh: axes `pipeline`, `data`, `tensor`; None where there is one rank.
    """

    layout: Layout
    comm: Comm
    copy: int = 0
    shard: int = 0
    stage: int = 0
    mesh: DeviceMesh | None = None

    def axis(self, name: str) -> DeviceMesh:
        """This rank's line of the mesh along an axis."""
        assert self.mesh is not None, "one rank has no mesh"
        return self.mesh[name]

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group of `axis`."""
        return self.axis(name).get_group()


def arrange(layout: Layout, comm: Comm) -> Ranks:
    """The mesh of a layout over all ranks of a run.

    Raises:
        ConfigError: a layout for another number of ranks.
    """
    if layout.ranks != comm.world:
        raise ConfigError(
            "data_parallel.degree",
            f"the layout ({layout.text()}) is for {layout.ranks} ranks, {comm.world} were started.",
            f"Start {layout.ranks} ranks.",
        )
    rest, shard = divmod(comm.rank, layout.tensor)
    stage, copy = divmod(rest, layout.data)
    if comm.world == 1:
        return Ranks(layout, comm)
    mesh = init_device_mesh(
        comm.device.type,
        (layout.pipeline, layout.data, layout.tensor),
        mesh_dim_names=("pipeline", "data", "tensor"),
    )
    return Ranks(layout, comm, copy, shard, stage, mesh)


def fill(weight: Tensor, values: Tensor) -> None:
    """Copies all of a weight's values into what this rank holds of it."""
    if not isinstance(weight, DTensor):
        weight.copy_(values)
        return
    size, offset = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    own = tuple(slice(first, first + n) for first, n in zip(offset, size, strict=True))
    weight.to_local().copy_(values[own])
