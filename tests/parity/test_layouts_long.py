"""The long set of `make test-layouts`: eight ranks, and checkpoints of every layout into every
other. It takes minutes and is left out of `make test`."""

import os

import pytest
from test_layouts import same

import layouts

pytestmark = pytest.mark.skipif(
    "DANLU_LONG_TESTS" not in os.environ, reason="long; make test-layouts runs it"
)

ZERO = {stage: f"zero_optimization.stage={stage}" for stage in (1, 2, 3)}
ROWS = "tensor_parallel.sequence_parallel=true"
TP, PP, DP = "tensor_parallel.degree=2", "pipeline_parallel.stages=2", "data_parallel.degree=2"
EIGHT = {
    f"tensor x pipeline x data, ZeRO {stage}, {schedule}": [
        TP, ROWS, PP, DP,
        f"zero_optimization.stage={stage}", f"pipeline_parallel.schedule={schedule}",
    ]
    for stage, schedule in [
        (0, "1f1b"), (0, "zero_bubble"), (1, "dualpipe_v"), (2, "interleaved"), (3, "1f1b"),
        (3, "zero_bubble"),
    ]
} | {"pipeline of four x tensor": [TP, "pipeline_parallel.stages=4"]}  # fmt: skip
SIX = {
    "data": ["data_parallel.degree=4"],
    "ZeRO 3": ["data_parallel.degree=4", ZERO[3]],
    "tensor": ["tensor_parallel.degree=4", ROWS],
    "pipeline": ["pipeline_parallel.stages=4", "pipeline_parallel.schedule=1f1b"],
    "tensor x pipeline": [TP, PP, "pipeline_parallel.schedule=zero_bubble"],
    "tensor x ZeRO 2": [TP, DP, ZERO[2]],
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return layouts.run(1, {"one": []}, tmp_path_factory.mktemp("one"))["one"]


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return layouts.run(8, EIGHT, tmp_path_factory.mktemp("eight"))


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    pairs = [(a, b) for a in SIX for b in SIX]
    return layouts.run(4, SIX, tmp_path_factory.mktemp("six"), reshard=pairs)


@pytest.mark.parametrize("name", EIGHT)
def test_eight_ranks_train_like_one_process(name, one, eight):
    same(eight[name], one)


@pytest.mark.parametrize("name", SIX)
def test_four_ranks_train_like_one_process(name, one, six):
    same(six[name], one)


@pytest.mark.parametrize("source", SIX)
@pytest.mark.parametrize("target", SIX)
def test_every_checkpoint_goes_on_in_every_layout(source, target, one, six):
    found = six[f"{source} -> {target}"]["curve"]
    for (loss, _), (wanted, _) in zip(found, one["curve"][10:13], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
