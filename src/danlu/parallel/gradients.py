"""Gradients over a mesh: averaged over copies, summed over shards of rows, one global norm.

PyTorch's `clip_grad_norm_` takes gradients of one mesh only. Here each rank adds the squares of
what it holds, divided by how many ranks hold the same, and one sum over all ranks is the norm.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.parallel.mesh import Ranks

__all__ = ["clip_gradients", "combine_gradients"]


def combine_gradients(
    model: nn.Module, ranks: Ranks, bucket: int, *, twice: nn.Parameter | None = None
) -> None:
    """After a step's last backward: what backward itself has not exchanged yet.

    Gradients of copies are averaged where neither plain data parallelism nor ZeRO did it while
    backward ran. With sequence parallelism, weights that every tensor-parallel rank has whole have
    seen its share of the rows only, and their gradients are added up. Last, the first and the last
    pipeline rank add up the gradients of a weight that both hold: a + b = b + a, to the bit.

    Args:
        model: what this rank holds.
        ranks: the mesh.
        bucket: bytes in which gradients travel.
        twice: the weight that the first and the last pipeline rank both hold, on these.
    """
    layout = ranks.layout
    held = [p for p in model.parameters() if p.grad is not None]
    if layout.data > 1 and layout.zero == 0 and not layout.plain:
        _reduce([_local(p.grad) for p in held], ranks.group("data"), bucket, mean=True)
    if layout.sequence_parallel:
        shared = [_local(p.grad) for p in held if not _split(p, "tensor")]
        _reduce(shared, ranks.group("tensor"), bucket, mean=False)
    if twice is not None:
        _add_other_end(_local(twice.grad), ranks)


def clip_gradients(
    model: nn.Module, ranks: Ranks, limit: float | None, *, twice: nn.Parameter | None = None
) -> Tensor:
    """The global L2 norm; gradients are then scaled so that it is at most `limit`.

    `twice`, as for `combine_gradients`, counts once.
    """
    layout = ranks.layout
    squares = torch.zeros((), dtype=torch.float64, device=ranks.comm.device)
    gradients = [(p, _local(p.grad)) for p in model.parameters() if p.grad is not None]
    norms = torch._foreach_norm([g for _, g in gradients]) if gradients else ()
    for (parameter, _), norm in zip(gradients, norms, strict=True):
        holders = 1 if _split(parameter, "tensor") else layout.tensor
        holders *= 1 if _split(parameter, "data") else layout.data
        holders *= 2 if parameter is twice else 1
        squares += norm.double() ** 2 / holders
    norm = ranks.comm.sum(squares).sqrt().float()
    if limit is not None:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([g for _, g in gradients], factor)
    return norm


def _split(parameter: Tensor, axis: str) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    placed = dict(zip(names, parameter.placements, strict=True))
    return axis in placed and not placed[axis].is_replicate()


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _add_other_end(gradient: Tensor, ranks: Ranks) -> None:
    """Adds the gradient that the pipeline's other end has for the same weight."""
    group = ranks.group("pipeline")
    peer = 0 if ranks.stage else group.size() - 1
    other = torch.empty_like(gradient)
    sending = dist.P2POp(dist.isend, gradient, group=group, group_peer=peer)
    receiving = dist.P2POp(dist.irecv, other, group=group, group_peer=peer)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    gradient += other


def _reduce(
    gradients: Sequence[Tensor], group: dist.ProcessGroup, bucket: int, *, mean: bool
) -> None:
    """All pieces travel at once; each is put back as it arrives."""
    underway = []
    for piece in _pieces(gradients, bucket):
        flat = torch.cat([g.reshape(-1) for g in piece])
        underway.append((piece, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for piece, flat, work in underway:
        assert work is not None
        work.wait()
        if mean:
            flat /= group.size()
        for gradient, part in zip(
            piece, torch.split(flat, [g.numel() for g in piece]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))


def _pieces(gradients: Sequence[Tensor], bucket: int) -> Iterator[list[Tensor]]:
    piece: list[Tensor] = []
    size = 0
    for gradient in gradients:
        piece.append(gradient)
        size += gradient.nbytes
        if size >= bucket:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
