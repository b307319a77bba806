"""The token stream and the start of every runner: same seed, same batches, same order."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import torch

from benchmarks.peers.workload import Workload


def prepare(work: Workload) -> None:
    """Fix the thread count and the seed of the weights."""
    torch.set_num_threads(work.threads)
    torch.manual_seed(work.weight_seed)


def batches(work: Workload) -> Iterator[torch.Tensor]:
    """Endless (batch, sequence + 1) int64 token blocks, identical for every peer.

    Tokens follow a Zipf law, so that the loss can fall below ln(vocab): a peer that does not
    really train shows.
    """
    generator = torch.Generator().manual_seed(work.data_seed)
    weights = 1.0 / torch.arange(1, work.vocab + 1).float()
    count = work.batch * (work.sequence + 1)
    while True:
        tokens = torch.multinomial(weights, count, replacement=True, generator=generator)
        yield tokens.view(work.batch, work.sequence + 1)


def rows(work: Workload) -> Iterator[torch.Tensor]:
    """The same stream one sequence at a time, for tools that batch by themselves."""
    for block in batches(work):
        yield from block


def inputs_and_targets(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a block into what the model sees and what comes next, each (batch, sequence)."""
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def single_rank() -> None:
    """Describe a group of one process, as a launcher would, for tools that insist on a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        WORLD_SIZE="1",
        RANK="0",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
