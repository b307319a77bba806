"""Batches of token windows, read ahead, the same for any number of ranks.

Shapes: b sequences of a micro-batch, t positions of a sequence.

The one global order of samples is `order.Order`; step k of a run takes the next `batch_sequences`
positions of it, and rank r of R the r-th contiguous slice of those (all equal, unless `deal` says
otherwise). So the state is one position,
no rank waits for another, and a run resumes, exactly, on more or fewer ranks or with other
micro-batches.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from danlu.base.errors import ConfigError, DataError
from danlu.data.corpus import TokenStream
from danlu.data.order import Order, windows

__all__ = ["Batch", "Loader", "evaluation_windows", "training_order"]


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch of one rank, on the CPU.

    Attributes:
        ids_bt: input tokens, int64, shape (b, t).
        targets_bt: the token that follows each, int64, shape (b, t).
        starts_bt: for each position, where in its window its document begins (0 for one that began
            earlier), int32, shape (b, t); None when attention crosses documents. Position i may
            attend to j when starts[i] <= j <= i.
    """

    ids_bt: torch.Tensor
    targets_bt: torch.Tensor
    starts_bt: torch.Tensor | None

    @property
    def tokens(self) -> int:
        """Number of targets."""
        return self.targets_bt.numel()


class Loader:
    """This rank's micro-batches, step by step, from any position on.

    Args:
        stream: the tokens; sample i is tokens i*t … i*t + t, so that windows share no target.
        order: which sample is read at which position; from `training_order`.
        sequence_length: t.
        batch_sequences: sequences of an optimizer step, over all ranks.
        micro_batch: b.
        rank: of this process, from 0.
        world: number of ranks that share a step.
        position: samples that the run has already read, over all ranks.
        prefetch: steps read ahead by a thread.
        document_starts: id of the end-of-document token, to give `Batch.starts_bt`; None for none.

    Raises:
        ConfigError: `batch_sequences` does not split evenly into micro-batches of all ranks.
    """

    def __init__(
        self,
        stream: TokenStream,
        order: Order,
        *,
        sequence_length: int,
        batch_sequences: int,
        micro_batch: int,
        rank: int,
        world: int,
        position: int = 0,
        prefetch: int = 4,
        document_starts: int | None = None,
    ) -> None:
        _check_sizes(batch_sequences, micro_batch, world)
        assert 0 <= rank < world, f"rank {rank} of {world}"
        assert order.samples == windows(len(stream), sequence_length), "an order of other samples"
        self._stream, self._order = stream, order
        self._sequence_length, self._micro_batch = sequence_length, micro_batch
        self._batch_sequences, self._rank = batch_sequences, rank
        self._shares = (batch_sequences // world // micro_batch,) * world
        self._end = document_starts
        self._position = self._ahead = position
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="danlu-loader")
        self._steps: deque[Future[tuple[Batch, ...]]] = deque()
        self._prefetch = max(1, prefetch)
        for _ in range(self._prefetch):
            self._read_ahead()

    @property
    def position(self) -> int:
        """Samples read so far, over all ranks: the first one of the next step."""
        return self._position

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps: `position`, and what it counts (`samples`, `seed`)."""
        return {
            "position": self._position,
            "samples": self._order.samples,
            "seed": self._order.seed,
            "sequence_length": self._sequence_length,
        }

    def next_step(self) -> tuple[Batch, ...]:
        """This rank's micro-batches of the next optimizer step.

        Raises:
            Exception: what the reading thread met; the position stays, and asking again tells
                the same.
        """
        batches = self._steps[0].result()
        self._steps.popleft()
        self._position += self._batch_sequences
        self._read_ahead()
        return batches

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of each rank in a step."""
        return self._shares

    def deal(self, shares: tuple[int, ...]) -> None:
        """Gives the ranks other numbers of micro-batches, from the next step on; all ranks call it.

        The step's samples stay the same ones.
        """
        assert sum(shares) == sum(self._shares), "a step keeps its samples"
        for step in self._steps:
            step.cancel()
        self._steps.clear()
        self._shares, self._ahead = shares, self._position
        for _ in range(self._prefetch):
            self._read_ahead()

    def close(self) -> None:
        """Ends the reading thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(self) -> None:
        first = sum(self._shares[: self._rank]) * self._micro_batch
        count = self._shares[self._rank] * self._micro_batch
        self._steps.append(self._reader.submit(self._read_step, self._ahead + first, count))
        self._ahead += self._batch_sequences

    def _read_step(self, position: int, count: int) -> tuple[Batch, ...]:
        samples = self._order.at(position, count)
        b = self._micro_batch
        return tuple(
            _batch(self._stream, samples[i : i + b], self._sequence_length, self._end)
            for i in range(0, count, b)
        )


def training_order(stream: TokenStream, *, sequence_length: int, seed: int) -> Order:
    """The order in which a stream's windows are read.

    Raises:
        DataError: the stream is shorter than one window.
    """
    samples = windows(len(stream), sequence_length)
    if samples < 1:
        raise DataError(
            "data_pipeline.sources",
            f"the training split has {len(stream)} tokens, fewer than the {sequence_length + 1} "
            "of one window.",
            "Add text, or use a shorter model.sequence_length.",
        )
    return Order(samples, seed)


def evaluation_windows(
    stream: TokenStream,
    *,
    sequence_length: int,
    micro_batch: int,
    tokens: int,
    rank: int = 0,
    world: int = 1,
    document_starts: int | None = None,
) -> tuple[Batch, ...]:
    """This rank's share of windows spread evenly over a stream, the same ones every time.

    Windows are dealt one by one to the ranks, so their numbers differ by at most one, and the last
    batch of a rank may be smaller, or a rank may have none: weight losses by `Batch.tokens`. A
    stream shorter than one window is one short window; one of fewer than two tokens has none.

    Args:
        stream: usually the validation split.
        sequence_length: t.
        micro_batch: the most sequences in a batch.
        tokens: how many targets are wanted, over all ranks; rounded up to whole windows.
        rank: of this process, from 0.
        world: number of ranks.
        document_starts: as for `Loader`.
    """
    length = min(sequence_length, len(stream) - 1)
    if length < 1:
        return ()
    available = windows(len(stream), length)
    count = min(available, -(-tokens // length))
    own = np.arange(rank, count, world) * available // count
    return tuple(
        _batch(stream, own[i : i + micro_batch], length, document_starts)
        for i in range(0, len(own), micro_batch)
    )


def _batch(
    stream: TokenStream, samples: npt.NDArray[np.int64], length: int, end: int | None
) -> Batch:
    window_bt = np.empty((len(samples), length + 1), dtype=np.int64)
    for row, sample in enumerate(samples.tolist()):
        window_bt[row] = stream.read(sample * length, length + 1)
    ids_bt, targets_bt = window_bt[:, :-1], window_bt[:, 1:]
    starts_bt = None if end is None else torch.from_numpy(_document_starts(ids_bt, end))
    return Batch(
        torch.from_numpy(np.ascontiguousarray(ids_bt)),
        torch.from_numpy(np.ascontiguousarray(targets_bt)),
        starts_bt,
    )


def _document_starts(ids_bt: npt.NDArray[np.int64], end: int) -> npt.NDArray[np.int32]:
    """For each position the one after the nearest end token before it, or 0; shape (b, t)."""
    starts_bt = np.zeros(ids_bt.shape, dtype=np.int32)
    positions_t = np.arange(1, ids_bt.shape[1], dtype=np.int32)
    starts_bt[:, 1:] = np.where(ids_bt[:, :-1] == end, positions_t, 0)
    np.maximum.accumulate(starts_bt, axis=1, out=starts_bt)
    return starts_bt


def _check_sizes(batch_sequences: int, micro_batch: int, world: int) -> None:
    if batch_sequences < 1 or batch_sequences % (world * micro_batch):
        raise ConfigError(
            "train.batch_tokens",
            f"{batch_sequences} sequences a step do not split into micro-batches of "
            f"{micro_batch} on {world} ranks.",
            f"Use a multiple of {world * micro_batch} sequences, or train.micro_batch: auto.",
        )
