"""A share of AdamW's moments that lives off the device (arXiv 2101.06840, 2104.07857).

Where the device is the CPU, in a file mapped into memory: the optimizer updates it like any tensor,
the operating system brings pages in and writes them back. Where it is a GPU, in CPU memory: the
update stays on the GPU and walks over pieces of the state, which are copied there ahead of it and
back behind it.
"""

import itertools
import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from danlu.base.errors import ConfigError
from danlu.base.facts import OFFLOAD_PIECE_BYTES, OFFLOAD_PIECES
from danlu.base.units import format_bytes

__all__ = ["FileOffload", "HostOffload", "Offload"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Offload(Protocol):
    """The part of an AdamW optimizer's moments that is elsewhere.

    Attributes:
        bytes: of the state that is there.
    """

    bytes: int

    def fetch(self) -> None:
        """Asks for what the next update needs first; returns at once."""

    def step(self) -> None:
        """The optimizer's update, of all parameters."""


class FileOffload:
    """Moments in a file.

    Pages are asked for before an update, so that reading overlaps with the end of backward; after
    it they are let go, so that they do not count as the process's memory.

    Args:
        optimizer: new, without state; afterwards it has all of its state, zero.
        share: of the state's bytes that goes to the file, in whole tensors.
        path: the file; it has no name any more once it is open, so that nothing is left behind.
    """

    def __init__(self, optimizer: Optimizer, share: float, path: Path) -> None:
        self._optimizer = optimizer
        chosen = _share_of(optimizer, share)
        self.bytes = sum(map(_state_bytes, chosen))
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w+b") as file:
            file.truncate(max(self.bytes, mmap.PAGESIZE))
            self._map = mmap.mmap(file.fileno(), 0)
        path.unlink()
        used = 0

        def place(like: Tensor) -> Tensor:
            nonlocal used
            if not like.numel():
                return torch.zeros_like(like)
            flat = torch.frombuffer(self._map, dtype=like.dtype, count=like.numel(), offset=used)
            used += flat.nbytes
            return flat.view(like.shape)

        _fill_state(optimizer, chosen, place)

    def fetch(self) -> None:
        """Asks for the state's pages; returns at once."""
        self._map.madvise(mmap.MADV_WILLNEED)

    def step(self) -> None:
        """Updates, and lets the pages go; they are written to the file in the background."""
        self._optimizer.step()
        self._map.madvise(mmap.MADV_DONTNEED)


class _Piece(NamedTuple):
    """Elements `part` of a parameter's shard, flat; `group` is the number of its group."""

    parameter: Tensor
    group: int
    part: slice


class _Stream:
    """A stream of a GPU; on a CPU nothing, where work is done in the order it is asked for."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @classmethod
    def beside(cls, device: torch.device) -> Self:
        """A new one."""
        if device.type != "cuda":
            return cls(None)
        return cls(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    @classmethod
    def current(cls, device: torch.device) -> Self:
        """The one that this thread's operations run on."""
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def after(self, other: "_Stream") -> AbstractContextManager[Any]:
        """Work inside runs on this stream, after all that `other` has been given so far."""
        if self._stream is None or other._stream is None:
            return nullcontext()
        self._stream.wait_stream(other._stream)
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """The point that this stream's work has to reach, for `wait`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """What follows on this stream waits for a mark of another."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def finish(self) -> None:
        """Returns when all of its work is done."""
        if self._stream is not None:
            self._stream.synchronize()


class HostOffload:
    """Moments in the pinned memory of the CPU that a GPU belongs to.

    An update walks over pieces of the state. While one is updated, the next ones are copied to the
    GPU on one stream and the last one back on another. On a CPU the same walk copies and updates in
    turn, which is how it is tested.

    A checkpoint reads and fills the host's tensors themselves.

    Args:
        optimizer: AdamW, new, without state; afterwards it has all of its state, zero.
        share: of the state's bytes that goes to the host, in whole tensors.
        device: of the parameters.
        room: bytes of the host's memory that this rank may use.
        piece_bytes: of one moment in a piece; a multiple of 1024, so that vectors are whole and
            the bits those of an update that is not cut.

    Raises:
        ConfigError: the host has no room for the share.
    """

    def __init__(
        self,
        optimizer: torch.optim.AdamW,
        share: float,
        device: torch.device,
        *,
        room: int,
        piece_bytes: int = OFFLOAD_PIECE_BYTES,
    ) -> None:
        self._optimizer, self._device = optimizer, device
        chosen, gpu = _share_of(optimizer, share), device.type == "cuda"
        self.bytes = sum(map(_state_bytes, chosen))
        if self.bytes > room:
            raise ConfigError(
                "zero_optimization.offload_ratio",
                f"a rank would keep {format_bytes(self.bytes)} of moments in CPU memory, which has"
                f" {format_bytes(room)} for each.",
                "Use a smaller share, or a zero_optimization.stage over more devices.",
            )
        _fill_state(
            optimizer, chosen, lambda like: torch.zeros(like.shape, device="cpu", pin_memory=gpu)
        )
        self._state = {p: {name: optimizer.state[p][name] for name in _MOMENTS} for p in chosen}
        elements = piece_bytes // torch.float32.itemsize
        self._pieces = list(_pieces(optimizer, chosen, elements))
        most = min(elements, max((p.part.stop - p.part.start for p in self._pieces), default=0))
        slots = min(OFFLOAD_PIECES, len(self._pieces))
        self._slots = [[torch.empty(most, device=device) for _ in _MOMENTS] for _ in range(slots)]
        self._in, self._out = _Stream.beside(device), _Stream.beside(device)
        self._arrived: list[torch.cuda.Event | None] = []
        if gpu:  # the slots' memory may still be in use by what had it before
            torch.cuda.synchronize(device)
        optimizer.register_state_dict_pre_hook(lambda _: self._out.finish())
        optimizer.register_load_state_dict_pre_hook(self._load)
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def fetch(self) -> None:
        """Copies the first pieces to the device; returns at once."""
        while len(self._arrived) < min(OFFLOAD_PIECES - 1, len(self._pieces)):
            self._fetch_next()

    @torch.no_grad()
    def step(self) -> None:
        """Updates all parameters, those of the host's moments piece by piece."""
        self.fetch()
        self._step_others()
        computing = _Stream.current(self._device)
        for number, piece in enumerate(self._pieces):
            if len(self._arrived) < len(self._pieces):
                self._fetch_next()
            moments = self._slot(number)
            computing.wait(self._arrived[number])
            self._update(piece, moments)
            with self._out.after(computing):
                for host, here in zip(self._host(piece), moments, strict=True):
                    host.copy_(here, non_blocking=True)
        self._arrived.clear()
        for parameter in self._state:
            if parameter.grad is not None:
                self._optimizer.state[parameter]["step"] += 1

    def _fetch_next(self) -> None:
        """Copies one more piece to the device, once the piece before it in its slot is back."""
        number = len(self._arrived)
        with self._in.after(self._out):
            for host, here in zip(
                self._host(self._pieces[number]), self._slot(number), strict=True
            ):
                here.copy_(host, non_blocking=True)
        self._arrived.append(self._in.mark())

    def _slot(self, number: int) -> list[Tensor]:
        """Where the moments of a piece are on the device."""
        part = self._pieces[number].part
        return [room[: part.stop - part.start] for room in self._slots[number % len(self._slots)]]

    def _host(self, piece: _Piece) -> list[Tensor]:
        moments = self._state[piece.parameter].values()
        return [_local(moment).view(-1)[piece.part] for moment in moments]

    def _step_others(self) -> None:
        """The optimizer's own step, of the parameters whose moments are on the device."""
        gradients = {parameter: parameter.grad for parameter in self._state}
        for parameter in gradients:
            parameter.grad = None  # which the optimizer passes over
        self._optimizer.step()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def _update(self, piece: _Piece, moments: list[Tensor]) -> None:
        parameter, number, part = piece
        if parameter.grad is None:
            return
        group = self._optimizer.param_groups[number]
        adamw(
            [_local(parameter).view(-1)[part]],
            [_local(parameter.grad).view(-1)[part]],
            [moments[0]],
            [moments[1]],
            [],
            [self._optimizer.state[parameter]["step"].clone()],  # it is counted up inside
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Takes the host's share of what is loaded, which PyTorch would bring to the GPU."""
        self._out.finish()
        names = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        state = dict(state_dict["state"])
        for name, parameter in zip(names, _parameters(optimizer), strict=True):
            if parameter in self._state:
                for moment, mine in self._state[parameter].items():
                    _local(mine).copy_(_local(state[name][moment]))
                state[name] = state[name] | dict.fromkeys(_MOMENTS)
        self._arrived.clear()
        return state_dict | {"state": state}

    def _loaded(self, optimizer: Optimizer) -> None:
        for parameter, moments in self._state.items():
            optimizer.state[parameter].update(moments)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _pieces(optimizer: Optimizer, chosen: set[Tensor], elements: int) -> Iterator[_Piece]:
    """The chosen parameters' shards in pieces of at most so many elements."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            size = _local(parameter).numel() if parameter in chosen else 0
            for first in range(0, size, elements):
                yield _Piece(parameter, number, slice(first, min(first + elements, size)))


def _share_of(optimizer: Optimizer, share: float) -> set[Tensor]:
    """Parameters, largest first, whose moments come closest to a share without a search."""
    sizes = {p: _state_bytes(p) for p in _parameters(optimizer)}
    chosen: set[Tensor] = set()
    left = share * sum(sizes.values())
    for parameter, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size <= 2 * left:  # adding it comes closer than leaving it
            chosen.add(parameter)
            left -= size
    return chosen


def _fill_state(
    optimizer: Optimizer, chosen: set[Tensor], place: Callable[[Tensor], Tensor]
) -> None:
    """Gives the optimizer its state, zero; `place` makes the moments of the chosen parameters."""
    for parameter in _parameters(optimizer):
        local = _local(parameter)
        make = place if parameter in chosen else torch.zeros_like
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=local.device),
            **{name: _like(parameter, make(local)) for name in _MOMENTS},
        }


def _state_bytes(parameter: Tensor) -> int:
    return len(_MOMENTS) * _local(parameter).nbytes


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """`local` as the shard of a tensor that lies over ranks like `parameter`, wherever it is."""
    if not isinstance(parameter, DTensor):
        return local
    # Not `DTensor.from_local`, which would bring it to the mesh's device.
    return DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
