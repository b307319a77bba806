"""Held-out text: loss in nats a token, and bits a byte, comparable across tokenizers."""

import math
import time

import torch

from danlu.base.facts import Evaluation
from danlu.data.corpus import Corpus
from danlu.data.loader import evaluation_windows
from danlu.train.build import Learner

__all__ = ["evaluate"]


@torch.no_grad()
def evaluate(
    learner: Learner, corpus: Corpus, step: int, tokens: int, *, document_end: int | None
) -> Evaluation | None:
    """The model's loss on the first `tokens` held-out tokens, over all ranks.

    Bits a byte = sum of losses / ln 2 / UTF-8 bytes of the predicted tokens. None where nothing is
    held out.
    """
    began = time.perf_counter()
    device = learner.device.torch
    lengths = torch.from_numpy(corpus.tokenizer.byte_lengths())
    sums = torch.zeros(3, dtype=torch.float64)
    windows = evaluation_windows(
        corpus.stream("validation"),
        sequence_length=learner.plan.model.sequence_length,
        micro_batch=learner.plan.micro_batch,
        tokens=tokens,
        rank=learner.comm.rank,
        world=learner.comm.world,
        document_starts=document_end,
    )
    for batch in windows:
        starts = None if batch.starts_bt is None else batch.starts_bt.to(device)
        loss = learner.model(batch.ids_bt.to(device), batch.targets_bt.to(device), starts, 1.0)
        seen = lengths[batch.targets_bt].sum()
        sums += torch.tensor([float(loss), float(batch.targets_bt.numel()), float(seen)])
    nats, count, text_bytes = learner.comm.sum(sums).tolist()
    if not count:
        return None
    return Evaluation(
        step=step,
        loss=nats / count,
        bits_per_byte=nats / math.log(2) / max(text_bytes, 1.0),
        tokens=int(count),
        seconds=time.perf_counter() - began,
    )
