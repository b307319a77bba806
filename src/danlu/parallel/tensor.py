"""Tensor parallelism (arXiv 1909.08053) and sequence parallelism (arXiv 2205.05198) on DTensor.

A model's table of placements says how each weight splits. The weight becomes a `DTensor` of which
this rank holds a slice; the operations compute with the slice; around each split module rows are
gathered and partial sums reduced, which is all that ranks say to one another. The model's own code
does not change.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from danlu.kernels.dispatch import Ops
from danlu.kernels.ops.cross_entropy import chunked_cross_entropy

__all__ = ["split_model", "split_ops"]

_AXIS = {"column": 0, "vocabulary": 0, "row": 1}
"""Axis along which a weight [rows, columns] is cut, by its placement."""


def split_ops(ops: Ops, mesh: DeviceMesh, *, sequence_parallel: bool) -> Ops:
    """The same operations for weights that may be split; whole weights compute as before.

    Args:
        ops: of one device.
        mesh: the tensor-parallel ranks.
        sequence_parallel: whether the rows between split modules are shared among the ranks.
    """
    rows = partial(_split_rows, mesh.get_group(), mesh.get_local_rank())
    split_loss = chunked_cross_entropy(rows)

    def linear(x_nd: Tensor, *weights: Tensor) -> Tensor:
        return ops.linear(x_nd, *(_local(w) for w in weights))

    def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Tensor:
        if not isinstance(weight, DTensor):
            return ops.cross_entropy(hidden, weight, targets, scale)
        hidden = _enter(hidden, mesh, sequence_parallel)
        loss: Tensor = split_loss(hidden, _local(weight), targets, scale)
        return loss

    def embedding(ids: Tensor, weight: Tensor) -> Tensor:
        if not isinstance(weight, DTensor):
            return ops.embedding(ids, weight)
        table = _local(weight)
        own = ids - mesh.get_local_rank() * len(table)
        known = (own >= 0) & (own < len(table))
        found = ops.embedding(own.where(known, 0), table)
        return _leave(found * known[:, None], mesh, sequence_parallel)

    return replace(ops, linear=linear, cross_entropy=cross_entropy, embedding=embedding)


def split_model(
    model: nn.Module,
    mesh: DeviceMesh,
    placements: Mapping[str, str],
    divided: Mapping[str, Sequence[str]],
    *,
    wanted: Callable[[str], bool],
    sequence_parallel: bool,
) -> None:
    """Cuts a model's weights over the ranks of `mesh`, in place; they have no values yet.

    Args:
        model: with operations from `split_ops`.
        mesh: the tensor-parallel ranks.
        placements: end of a module's path → `column`, `row` or `vocabulary`.
        divided: last name of a module → its attributes of which each rank has a share.
        wanted: told a module's path; says whether it is split.
        sequence_parallel: as for `split_ops`.
    """
    chosen = [(path, kind) for path, kind in _placed(model, placements) if wanted(path)]
    cut: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight stays one parameter
    for path, kind in chosen:
        module = model.get_submodule(path)
        whole: nn.Parameter = module.weight  # type: ignore[assignment]
        if whole not in cut:
            cut[whole] = _cut(whole, mesh, _AXIS[kind])
        module.weight = cut[whole]
    for path in sorted({path.rpartition(".")[0] for path, kind in chosen if kind != "vocabulary"}):
        module = model.get_submodule(path)
        for name in divided.get(path.rpartition(".")[2], ()):
            setattr(module, name, getattr(module, name) // mesh.size())
        module.register_forward_pre_hook(partial(_enter_hook, mesh, sequence_parallel))
        module.register_forward_hook(partial(_leave_hook, mesh, sequence_parallel))


def _placed(model: nn.Module, placements: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    for path, _ in model.named_modules(remove_duplicate=False):
        for end, kind in placements.items():
            if path == end or path.endswith(f".{end}"):
                yield path, kind


def _cut(whole: nn.Parameter, mesh: DeviceMesh, axis: int) -> nn.Parameter:
    size = list(whole.shape)
    size[axis] //= mesh.size()
    local = torch.empty(size, dtype=whole.dtype, device=whole.device)
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(axis)], run_check=False))


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _rows(sequence_parallel: bool) -> Placement:  # noqa: FBT001
    return Shard(0) if sequence_parallel else Replicate()


def _enter(x_nd: Tensor, mesh: DeviceMesh, sequence_parallel: bool) -> Tensor:  # noqa: FBT001
    """All rows before a split module; backward adds up what the ranks' slices pass back."""
    rows = DTensor.from_local(x_nd, mesh, [_rows(sequence_parallel)], run_check=False)
    whole: Tensor = rows.redistribute(placements=[Replicate()]).to_local(
        grad_placements=[Partial()]
    )
    return whole


def _leave(part_nd: Tensor, mesh: DeviceMesh, sequence_parallel: bool) -> Tensor:  # noqa: FBT001
    """The sum of the ranks' parts after a split module: all of its rows, or this rank's share."""
    parts = DTensor.from_local(part_nd, mesh, [Partial()], run_check=False)
    rows: Tensor = parts.redistribute(placements=[_rows(sequence_parallel)]).to_local()
    return rows


def _enter_hook(
    mesh: DeviceMesh,
    sequence_parallel: bool,  # noqa: FBT001
    module: nn.Module,
    inputs: tuple[Any, ...],
) -> tuple[Any, ...]:
    return (_enter(inputs[0], mesh, sequence_parallel), *inputs[1:])


def _leave_hook(
    mesh: DeviceMesh,
    sequence_parallel: bool,  # noqa: FBT001
    module: nn.Module,
    inputs: tuple[Any, ...],
    output: Tensor,
) -> Tensor:
    return _leave(output, mesh, sequence_parallel)


def _split_rows(
    group: dist.ProcessGroup,
    shard: int,
    logits: Tensor,
    targets: Tensor,
    scale: float,
    gradient: bool,  # noqa: FBT001
) -> Tensor:
    """Losses of rows whose logits [n, V / ranks] are split; see `kernels.ops.cross_entropy`."""
    wide = logits.float()
    largest = wide.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    wide = wide - largest[:, None]
    own = targets - shard * logits.shape[1]
    known = (own >= 0) & (own < logits.shape[1])
    place = own.where(known, 0)[:, None]
    target = wide.gather(1, place)[:, 0] * known
    sums = torch.stack([wide.exp_().sum(-1), target])
    dist.all_reduce(sums, group=group)
    kept = targets >= 0
    if gradient:
        slope = wide.div_(sums[0][:, None])
        slope.scatter_add_(1, place, -known.float()[:, None])
        slope *= torch.where(kept, scale, 0.0)[:, None]
        logits.copy_(slope)
    return (sums[0].log() - sums[1]).where(kept, 0.0)
