"""Any number of ranks trains like one process."""

import pytest

from running import TINY, danlu, losses, records

FP32 = (*TINY, "precision.format=fp32", "train.steps=20", "train.evaluate_every=10")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    danlu("train", *FP32, "name=one", cwd=folder)
    return folder


@pytest.mark.parametrize("words", [("data_parallel.degree=2",), ("train.micro_batch=2",)])
def test_ranks_and_micro_batches_change_no_loss(alone, words):
    name = words[0].split(".")[-1].replace("=", "-")
    danlu("train", *FP32, *words, f"name={name}", cwd=alone)
    one, other = losses(alone / "runs" / "one"), losses(alone / "runs" / name)
    assert list(other) == list(one) == list(range(1, 21))
    for step, loss in one.items():
        assert other[step] == pytest.approx(loss, rel=1e-5), step
    norms = [{s: r["gradient_norm"] for s, r in records(alone / "runs" / n).items()}
             for n in ("one", name)]  # fmt: skip
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    held_out = [records(alone / "runs" / n, "evaluation") for n in ("one", name)]
    for step, record in held_out[0].items():
        assert held_out[1][step]["loss"] == pytest.approx(record["loss"], rel=1e-5)
        assert held_out[1][step]["tokens"] == record["tokens"]


def test_three_ranks_take_over_from_one_and_one_from_three(alone):
    """Stopped by a fault, gone on with another number of ranks: the same samples, the same
    curve."""
    words = (*FP32, "train.batch_tokens=384", "checkpoint.every=5")
    danlu("train", *words, "name=whole", cwd=alone)
    danlu("train", *words, "name=parts", "train.steps=7", cwd=alone)
    danlu("train", *words, "name=parts", "train.steps=13", "data_parallel.degree=3", cwd=alone)
    danlu("train", *words, "name=parts", "train.steps=20", cwd=alone)
    whole, parts = records(alone / "runs" / "whole"), records(alone / "runs" / "parts")
    assert list(parts) == list(whole)
    # The learning rate of a shorter plan differs at its end, so the curve is not compared here;
    # the sequence of samples is: see test_resume.py.
    assert sum(r["tokens"] for r in parts.values()) == sum(r["tokens"] for r in whole.values())
