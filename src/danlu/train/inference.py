"""A trained model taken out of its run folder, to be used."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from danlu.base.errors import CheckpointError
from danlu.checkpoint.disk import CheckpointStore
from danlu.data.tokenizer import Tokenizer
from danlu.hardware.comm import Comm
from danlu.hardware.device import open_device, probe
from danlu.kernels.dispatch import torch_ops
from danlu.models.generate import Sampling, generate
from danlu.models.transformer import Transformer
from danlu.planner.plan import Plan
from danlu.precision.formats._base import FORMATS
from danlu.train.folder import RunFolder

__all__ = ["LoadedModel", "continue_text", "load_model"]


class LoadedModel(NamedTuple):
    """A model with its tokenizer, and the step it comes from."""

    model: Transformer
    tokenizer: Tokenizer
    step: int


def load_model(
    path: str | Path, *, device: str = "auto", warn: Callable[[str], None] = warnings.warn
) -> LoadedModel:
    """The newest whole checkpoint of a run, ready to generate.

    Args:
        path: the run's folder.
        device: `cpu`, `cuda` or `auto`.
        warn: told about a newer checkpoint that is broken.

    Raises:
        UserError: no run folder, or no checkpoint in it yet.
    """
    folder = RunFolder.existing(path)
    plan = Plan.load(folder.plan)
    store = CheckpointStore(folder.checkpoints, Comm(), keep=1, warn=warn)
    newest = store.newest()
    if newest is None:
        raise CheckpointError(
            str(path), "there is no whole checkpoint yet.", "One is written at the end of a run."
        )
    facts = probe(device)
    place = open_device(facts.kind, threads=facts.threads or 1)
    number_format = FORMATS.find(plan.format)
    fits = number_format().supported(facts)
    with place.torch:
        dtype = number_format.dtype if fits else torch.float32
        model = Transformer(plan.model, torch_ops(), dtype)
    step = store.load(newest, model, None).step
    return LoadedModel(model.for_inference(), Tokenizer.load(folder.tokenizer), step)


def continue_text(
    loaded: LoadedModel, prompt: str, tokens: int, sampling: Sampling
) -> Iterator[str]:
    """Pieces of text that follow `prompt`, as they are made.

    A character can span several tokens, so a piece is held back until it is whole.
    """
    model, tokenizer, _ = loaded
    ids = [int(i) for i in tokenizer.encode_batch([prompt])[0]]
    made: list[int] = []
    shown = ""
    for token in generate(model, ids, tokens, tokenizer.end, sampling):
        made.append(token)
        text = tokenizer.decode(made)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    if made and (rest := tokenizer.decode(made)[len(shown) :]):
        yield rest
