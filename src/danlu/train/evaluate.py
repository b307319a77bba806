"""Held-out text: loss in nats a token, and bits a byte, comparable across tokenizers."""

import math
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from danlu.base.facts import Evaluation
from danlu.data.corpus import Corpus
from danlu.data.loader import Batch, evaluation_windows
from danlu.parallel.zero import gathered
from danlu.train.build import Learner
from danlu.train.loop import on_device

__all__ = ["evaluate"]


@torch.no_grad()
def evaluate(
    learner: Learner, corpus: Corpus, step: int, tokens: int, *, document_end: int | None
) -> Evaluation | None:
    """The model's loss on `tokens` held-out tokens, over all ranks.

    Bits a byte = sum of losses / ln 2 / UTF-8 bytes of the predicted tokens. None where nothing is
    held out.
    """
    began = time.perf_counter()
    layout = learner.plan.layout
    lengths = torch.from_numpy(corpus.tokenizer.byte_lengths())
    windows = evaluation_windows(
        corpus.stream("validation"),
        sequence_length=learner.plan.model.sequence_length,
        micro_batch=learner.plan.micro_batch,
        tokens=tokens,
        rank=learner.ranks.copy,
        world=layout.data,
        document_starts=document_end,
    )
    own = torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64)
    for batch in windows:
        own[1] += batch.targets_bt.numel()
        own[2] += float(lengths[batch.targets_bt].sum())
    own[1:] /= layout.tensor * layout.pipeline  # ranks that read the same samples
    own[0] = _losses(learner, windows) / layout.tensor
    nats, count, text_bytes = learner.ranks.comm.sum(own).tolist()
    if not count:
        return None
    return Evaluation(
        step=step,
        loss=nats / count,
        bits_per_byte=nats / math.log(2) / max(text_bytes, 1.0),
        tokens=round(count),
        seconds=time.perf_counter() - began,
    )


def _losses(learner: Learner, windows: Sequence[Batch]) -> float:
    """The sum of losses of this rank's copy of the model; 0 where it is not the one to know.

    Ranks of a layout compute together, so all copies run the same number of batches: those that
    lack one run an empty one, whose targets are all left out.
    """
    layout, device = learner.plan.layout, learner.device.torch
    if layout.plain:
        return sum(float(learner.model(*on_device(b, device), 1.0)) for b in windows)
    counts = torch.zeros(layout.data, dtype=torch.float64)
    counts[learner.ranks.copy] = len(windows) / (layout.tensor * layout.pipeline)
    wanted = round(float(learner.ranks.comm.sum(counts).max()))
    pieces = 1 if learner.pipeline is None else learner.pipeline.micro_batches
    wanted = -(-wanted // pieces) * pieces
    rows, length = learner.plan.micro_batch, learner.plan.model.sequence_length
    batches = [on_device(_padded(b, rows, length), device) for b in windows]
    if batches:
        ids, targets, starts = batches[0]
    else:
        ids = targets = torch.zeros(rows, length, dtype=torch.int64, device=device)
        starts = None
    batches += [(ids, torch.full_like(targets, -1), starts)] * (wanted - len(batches))
    with gathered(learner.sharded):
        if learner.pipeline is None:
            return sum(float(learner.model(*batch, 1.0)) for batch in batches)
        run = learner.pipeline.evaluate
        return sum(float(run(batches[i : i + pieces], 1.0)) for i in range(0, len(batches), pieces))


def _padded(batch: Batch, rows: int, length: int) -> Batch:
    """The batch with `rows` sequences of `length`; what is added has no targets."""
    more = (0, length - batch.ids_bt.shape[1], 0, rows - batch.ids_bt.shape[0])
    starts = None if batch.starts_bt is None else F.pad(batch.starts_bt, more)
    return Batch(F.pad(batch.ids_bt, more), F.pad(batch.targets_bt, more, value=-1), starts)
