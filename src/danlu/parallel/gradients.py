"""Gradients over a mesh: averaged over copies, summed over shards of rows, one global norm.

Copies of a model that is itself shared among ranks are averaged piece by piece while the last
backward still runs, as PyTorch's DistributedDataParallel does where each rank has a whole model.

PyTorch's `clip_grad_norm_` takes gradients of one mesh only. Here each rank adds the squares of
what it holds, divided by how many ranks hold the same, and one sum over all ranks is the norm.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.parallel.mesh import Ranks

__all__ = ["CopyAverage", "clip_gradients", "combine_gradients"]


class CopyAverage:
    """Averages gradients over copies, each piece as soon as the last backward has filled it.

    The pieces travel in one order on every rank: from the last weights to the first, which is how
    backward comes by them.

    Args:
        parts: what backward runs through, one after another: the model, or pipeline stages. A
            weight may be in two of them.
        group: the copies.
        bucket: bytes in which gradients travel.
    """

    def __init__(self, parts: Iterable[nn.Module], group: dist.ProcessGroup, bucket: int) -> None:
        self._uses: Counter[Tensor] = Counter(
            weight for part in parts for weight in part.parameters()
        )
        weights = list(self._uses)
        self._group = group
        self._pieces = list(_pieces(weights[::-1], bucket))
        self._added: Counter[Tensor] = Counter()
        self._micro_batches = 0
        self._underway: list[_Travelling] = []
        for weight in weights:
            weight.register_post_accumulate_grad_hook(self._on_added)  # type: ignore[no-untyped-call]

    def begin(self, micro_batches: int) -> None:
        """Before the first backward of a step of so many."""
        self._micro_batches = micro_batches
        self._added.clear()

    def finish(self) -> None:
        """After the last backward: sends what is left, and waits for all of it."""
        while len(self._underway) < len(self._pieces):
            self._send()
        for piece in self._underway:
            piece.arrive(mean=True)
        self._underway.clear()

    def _on_added(self, weight: Tensor) -> None:
        """A backward that is split into two adds without telling; `finish` sends what is left."""
        self._added[weight] += 1
        while len(self._underway) < len(self._pieces) and all(
            self._added[w] == self._uses[w] * self._micro_batches
            for w in self._pieces[len(self._underway)]
        ):
            self._send()

    def _send(self) -> None:
        piece = self._pieces[len(self._underway)]
        gradients = [_local(w.grad) for w in piece if w.grad is not None]
        self._underway.append(_Travelling(gradients, self._group))


def combine_gradients(
    model: nn.Module, ranks: Ranks, bucket: int, *, twice: nn.Parameter | None = None
) -> None:
    """After a step's last backward, and after copies are averaged: what remains to be added up.

    With sequence parallelism, weights that every tensor-parallel rank has whole have seen its share
    of the rows only, and their gradients are added up. Last, the first and the last pipeline rank
    add up the gradients of a weight that both hold: a + b = b + a, to the bit.

    Args:
        model: what this rank holds.
        ranks: the mesh.
        bucket: bytes in which gradients travel.
        twice: the weight that the first and the last pipeline rank both hold, on these.
    """
    if ranks.layout.sequence_parallel:
        held = [p for p in model.parameters() if p.grad is not None]
        shared = [_local(p.grad) for p in held if not _split(p, "tensor")]
        pieces = [_Travelling(p, ranks.group("tensor")) for p in _pieces(shared, bucket)]
        for piece in pieces:
            piece.arrive(mean=False)
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


class _Travelling:
    """Gradients on their way through a sum over ranks."""

    def __init__(self, gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._gradients, self._ranks = gradients, group.size()
        self._flat = torch.cat([g.reshape(-1) for g in gradients])
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def arrive(self, *, mean: bool) -> None:
        """Waits, and puts the sums or means back where the gradients were."""
        assert self._work is not None
        self._work.wait()
        if mean:
            self._flat /= self._ranks
        parts = torch.split(self._flat, [g.numel() for g in self._gradients])
        for gradient, part in zip(self._gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _pieces(tensors: Sequence[Tensor], bucket: int) -> Iterator[list[Tensor]]:
    piece: list[Tensor] = []
    size = 0
    for tensor in tensors:
        piece.append(tensor)
        size += _local(tensor).nbytes
        if size >= bucket:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
