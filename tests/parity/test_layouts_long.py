"""The long set of `make test-layouts`: eight ranks, and checkpoints of every layout into every
other. It takes minutes and is left out of `make test`."""

import os

import pytest
from test_layouts import alone, same

import layouts
from layouts import TIED

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
EIGHT |= {
    f"tied, tensor x pipeline x data, ZeRO {stage}, {schedule}": [
        TIED, TP, ROWS, PP, DP,
        f"zero_optimization.stage={stage}", f"pipeline_parallel.schedule={schedule}",
    ]
    for stage, schedule in [(0, "gpipe"), (1, "interleaved"), (2, "zero_bubble"), (3, "dualpipe_v")]
}  # fmt: skip
EIGHT["tied, tensor in some layers x pipeline of four"] = [
    TIED, TP, "tensor_parallel.split_layers=[1, 3]", "pipeline_parallel.stages=4",
    "pipeline_parallel.schedule=1f1b",
]  # fmt: skip
SIX = {
    "data": ["data_parallel.degree=4"],
    "ZeRO 3": ["data_parallel.degree=4", ZERO[3]],
    "tensor": ["tensor_parallel.degree=4", ROWS],
    "pipeline": ["pipeline_parallel.stages=4", "pipeline_parallel.schedule=1f1b"],
    "tensor x pipeline": [TP, PP, "pipeline_parallel.schedule=zero_bubble"],
    "tensor x ZeRO 2": [TP, DP, ZERO[2]],
}
TIED_FOUR = {
    "tied, ZeRO 3": [TIED, "data_parallel.degree=4", ZERO[3]],
    "tied, pipeline": [TIED, "pipeline_parallel.stages=4", "pipeline_parallel.schedule=1f1b"],
    "tied, tensor x pipeline": [TIED, TP, PP, "pipeline_parallel.schedule=zero_bubble"],
    "tied, pipeline x ZeRO 1": [TIED, PP, DP, ZERO[1], "pipeline_parallel.schedule=zero_bubble"],
    "tied, pipeline x ZeRO 3, offload": [
        TIED, PP, DP, ZERO[3], "pipeline_parallel.schedule=interleaved",
        "zero_optimization.offload_ratio=0.5",
    ],
}  # fmt: skip
UNEVEN = {
    f"tied, pipeline x three copies, ZeRO {stage}, {schedule}": [
        TIED, PP, "data_parallel.degree=3", "train.batch_tokens=384",
        f"zero_optimization.stage={stage}", f"pipeline_parallel.schedule={schedule}",
    ]
    for stage, schedule in [(1, "dualpipe_v"), (2, "1f1b"), (3, "zero_bubble")]
}  # fmt: skip
"""Copies that do not divide the vocabulary: shards are padded."""


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    trials = {"one": [], "one, tied": [TIED], "uneven": [TIED, "train.batch_tokens=384"]}
    folder = tmp_path_factory.mktemp("one")
    return layouts.run(1, trials, folder) | {"folder": folder}


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return layouts.run(8, EIGHT, tmp_path_factory.mktemp("eight"))


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    pairs = [(a, b) for a in SIX for b in SIX]
    return layouts.run(4, SIX, tmp_path_factory.mktemp("six"), reshard=pairs)


@pytest.fixture(scope="module")
def tied_four(one, tmp_path_factory):
    pairs = [(a, b) for a in ("one, tied", *TIED_FOUR) for b in TIED_FOUR]
    folder, sources = tmp_path_factory.mktemp("tied"), {"one, tied": one["folder"] / "one, tied"}
    return layouts.run(4, TIED_FOUR, folder, reshard=pairs, sources=sources) | {"folder": folder}


@pytest.fixture(scope="module")
def back(tied_four, tmp_path_factory):
    folder = tmp_path_factory.mktemp("back")
    sources = {name: tied_four["folder"] / name for name in TIED_FOUR}
    pairs = [(name, "one, tied") for name in TIED_FOUR]
    return layouts.run(1, {}, folder, reshard=pairs, targets={"one, tied": [TIED]}, sources=sources)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    return layouts.run(6, UNEVEN, tmp_path_factory.mktemp("uneven"))


@pytest.mark.parametrize("name", EIGHT)
def test_eight_ranks_train_like_one_process(name, one, eight):
    same(eight[name], one[alone(name)])


@pytest.mark.parametrize("name", SIX)
def test_four_ranks_train_like_one_process(name, one, six):
    same(six[name], one["one"])


@pytest.mark.parametrize("name", TIED_FOUR)
def test_four_ranks_with_one_matrix_train_like_one_process(name, one, tied_four):
    same(tied_four[name], one["one, tied"])


@pytest.mark.parametrize("name", UNEVEN)
def test_padded_shards_train_like_one_process(name, one, uneven):
    same(uneven[name], one["uneven"])


@pytest.mark.parametrize("source", SIX)
@pytest.mark.parametrize("target", SIX)
def test_every_checkpoint_goes_on_in_every_layout(source, target, one, six):
    goes_on(six[f"{source} -> {target}"], one["one"])


@pytest.mark.parametrize("source", ["one, tied", *TIED_FOUR])
@pytest.mark.parametrize("target", TIED_FOUR)
def test_so_does_every_one_with_one_matrix(source, target, one, tied_four):
    goes_on(tied_four[f"{source} -> {target}"], one["one, tied"])


@pytest.mark.parametrize("source", TIED_FOUR)
def test_it_goes_on_in_one_process(source, one, back):
    goes_on(back[f"{source} -> one, tied"], one["one, tied"])


def goes_on(found, reference):
    for (loss, _), (wanted, _) in zip(found["curve"], reference["curve"][10:13], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
