"""Any layout trains like one process: losses, gradient norms, held-out losses, final weights."""

import pytest
import torch

import layouts
from layouts import TIED

TWO = {
    "data": ["data_parallel.degree=2"],
    "tensor": ["tensor_parallel.degree=2", "tensor_parallel.sequence_parallel=true"],
    "tensor, whole rows": ["tensor_parallel.degree=2", "tensor_parallel.sequence_parallel=false"],
    "tensor in some layers": ["tensor_parallel.degree=2", "tensor_parallel.split_layers=[1, 3]"],
    **{
        f"pipeline, {name}": [
            "pipeline_parallel.stages=2",
            f"pipeline_parallel.schedule={name}",
            "pipeline_parallel.micro_batches=4",
        ]
        for name in ("gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipe_v")
    },
    **{
        f"ZeRO {stage}, offload {share}": [
            "data_parallel.degree=2",
            f"zero_optimization.stage={stage}",
            f"zero_optimization.offload_ratio={share}",
            "train.micro_batch=2",
        ]
        for stage in (1, 2, 3)
        for share in (0, 0.5)
    },
    "tensor, host memory": [
        "tensor_parallel.degree=2",
        "tensor_parallel.sequence_parallel=true",
        "zero_optimization.offload_ratio=1",
    ],
    "ZeRO 3, host memory": [
        "data_parallel.degree=2",
        "zero_optimization.stage=3",
        "zero_optimization.offload_ratio=0.5",
        "train.micro_batch=2",
    ],
    "data, recompute": ["data_parallel.degree=2", "memory.recompute=full"],
    "ZeRO 3, recompute": [
        "data_parallel.degree=2",
        "memory.recompute=full",
        "zero_optimization.stage=3",
    ],
    "pipeline, zero_bubble, recompute": [
        "pipeline_parallel.stages=2",
        "pipeline_parallel.schedule=zero_bubble",
        "memory.recompute=full",
    ],
    "tensor, recompute": [
        "tensor_parallel.degree=2",
        "tensor_parallel.sequence_parallel=true",
        "memory.recompute=full",
    ],
    **{
        f"{name}, selective": ["memory.recompute=selective", *words]
        for name, words in {
            "data": ["data_parallel.degree=2"],
            "ZeRO 3, offload 0": [
                "data_parallel.degree=2",
                "zero_optimization.stage=3",
                "train.micro_batch=2",
            ],
            "pipeline, zero_bubble": [
                "pipeline_parallel.stages=2",
                "pipeline_parallel.schedule=zero_bubble",
                "pipeline_parallel.micro_batches=4",
            ],
            "tensor, whole rows": [
                "tensor_parallel.degree=2",
                "tensor_parallel.sequence_parallel=false",
            ],
        }.items()
    },
    "data, dealt by speed": [
        "data_parallel.degree=2",
        "data_parallel.balance=true",
        "train.micro_batch=2",
    ],
    **{
        f"bf16, {name}": ["precision.format=bf16", *words]
        for name, words in {
            "ZeRO 3": ["data_parallel.degree=2", "zero_optimization.stage=3"],
            "tensor": ["tensor_parallel.degree=2"],
            "pipeline": ["pipeline_parallel.stages=2", "pipeline_parallel.schedule=zero_bubble"],
        }.items()
    },
    "offload alone": ["data_parallel.degree=2", "zero_optimization.offload_ratio=1"],
    **{
        f"tied, pipeline, {name}": [
            TIED,
            "pipeline_parallel.stages=2",
            f"pipeline_parallel.schedule={name}",
        ]
        for name in ("1f1b", "zero_bubble")
    },
}
FOUR = {
    "tensor x pipeline": [
        "tensor_parallel.degree=2",
        "tensor_parallel.sequence_parallel=true",
        "pipeline_parallel.stages=2",
    ],
    "tensor x data": [
        "tensor_parallel.degree=2",
        "data_parallel.degree=2",
        "train.micro_batch=2",
        "communication.bucket=64KiB",
    ],
    "pipeline x data": [
        "pipeline_parallel.stages=2",
        "data_parallel.degree=2",
        "pipeline_parallel.schedule=1f1b",
        "communication.bucket=64KiB",
    ],
    "tied, pipeline x data, zero_bubble": [
        TIED,
        "pipeline_parallel.stages=2",
        "data_parallel.degree=2",
        "pipeline_parallel.schedule=zero_bubble",
        "communication.bucket=64KiB",
    ],
    "pipeline x ZeRO 2, 1f1b": [
        "pipeline_parallel.stages=2",
        "data_parallel.degree=2",
        "zero_optimization.stage=2",
        "pipeline_parallel.schedule=1f1b",
    ],
    "pipeline x ZeRO 3, zero_bubble": [
        "pipeline_parallel.stages=2",
        "data_parallel.degree=2",
        "zero_optimization.stage=3",
        "pipeline_parallel.schedule=zero_bubble",
    ],
    "tensor x ZeRO 3": [
        "tensor_parallel.degree=2",
        "tensor_parallel.sequence_parallel=true",
        "data_parallel.degree=2",
        "zero_optimization.stage=3",
        "train.micro_batch=2",
    ],
    "tensor in some layers x ZeRO 2": [
        "tensor_parallel.degree=2",
        "tensor_parallel.split_layers=[1, 3]",
        "data_parallel.degree=2",
        "zero_optimization.stage=2",
    ],
    "documents kept apart": [
        "pipeline_parallel.stages=2",
        "tensor_parallel.degree=2",
        "data_pipeline.attention_within_documents=true",
    ],
    "tied, tensor x pipeline": [
        TIED,
        "tensor_parallel.degree=2",
        "tensor_parallel.sequence_parallel=true",
        "pipeline_parallel.stages=2",
        "pipeline_parallel.schedule=1f1b",
    ],
    "tied, pipeline x ZeRO 3, dualpipe_v": [
        TIED,
        "pipeline_parallel.stages=2",
        "data_parallel.degree=2",
        "zero_optimization.stage=3",
        "pipeline_parallel.schedule=dualpipe_v",
    ],
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    apart = ["data_pipeline.attention_within_documents=true"]
    trials = {
        "one": [],
        "one, documents kept apart": apart,
        "one, bf16": ["precision.format=bf16"],
        "one, tied": [TIED],
    }
    found = layouts.run(1, trials, folder)
    return found | {"folder": folder}


@pytest.fixture(scope="module")
def two(one, tmp_path_factory):
    names = ("tensor", "pipeline, zero_bubble", "ZeRO 3, offload 0.5")
    tied = [f"tied, pipeline, {name}" for name in ("1f1b", "zero_bubble")]
    host = "ZeRO 3, host memory"
    return layouts.run(
        2, TWO, tmp_path_factory.mktemp("two"),
        reshard=[
            *(("one", name) for name in names), ("tensor", names[1]), (names[1], names[2]),
            (names[1], host), (host, "tensor"),
            ("one, tied", tied[0]), (tied[0], tied[0]), (tied[0], tied[1]),
        ],
        sources={name: one["folder"] / name for name in ("one", "one, tied")},
    )  # fmt: skip


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return layouts.run(4, FOUR, tmp_path_factory.mktemp("four"))


def alone(name):
    """The trial in one process that a layout is compared with."""
    kinds = ("documents kept apart", "tied")
    return next((f"one, {kind}" for kind in kinds if kind in name), "one")


def same(layout, reference):
    for (loss, norm), (wanted, wanted_norm) in zip(
        layout["curve"], reference["curve"], strict=True
    ):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-4)
    assert layout["held_out"] == pytest.approx(reference["held_out"], rel=1e-5)
    assert layout["weights"].keys() == reference["weights"].keys()
    for name, weight in reference["weights"].items():
        torch.testing.assert_close(layout["weights"][name], weight, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", [name for name in TWO if "bf16" not in name])
def test_two_ranks_train_like_one_process(name, one, two):
    same(two[name], one[alone(name)])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_like_one_process(name, one, four):
    same(four[name], one[alone(name)])


@pytest.mark.parametrize("name", [name for name in TWO if "bf16" in name])
def test_in_bf16_they_do_within_its_rounding(name, one, two):
    """The kernels of this machine, native where it has them, in every kind of layout."""
    wanted = one["one, bf16"]["curve"]
    for (loss, _), (other, _) in zip(two[name]["curve"], wanted, strict=True):
        assert loss == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in TWO if name.endswith("selective")])
def test_selective_recompute_changes_no_bit(name, two):
    kept = two[name.removesuffix(", selective")]
    assert two[name]["layout"]["recompute"] == "selective"
    assert two[name]["curve"] == kept["curve"]
    for key, weight in kept["weights"].items():
        assert torch.equal(two[name]["weights"][key], weight), key


@pytest.mark.parametrize(
    ("name", "kept"),
    [("tensor, host memory", "tensor"), ("ZeRO 3, host memory", "ZeRO 3, offload 0")],
)
def test_moments_in_host_memory_change_no_bit(name, kept, two):
    assert two[name]["curve"] == two[kept]["curve"]
    for key, weight in two[kept]["weights"].items():
        assert torch.equal(two[name]["weights"][key], weight), key


def test_a_slow_rank_is_dealt_less(two):
    assert two["data"]["shares"][0] == two["data"]["shares"][1]
    assert two["data, dealt by speed"]["shares"] == [6, 2]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_halves_the_optimizers_state_on_two_ranks(stage, two):
    whole, share = two["data"]["optimizer_bytes"], two[f"ZeRO {stage}, offload 0"]
    assert share["optimizer_bytes"] == pytest.approx(whole / 2, rel=0.02)


def test_checkpoints_go_on_in_any_other_layout(one, two):
    found = {name: r for name, r in two.items() if "->" in name}
    assert len(found) == 10
    for name, result in found.items():
        wanted_curve = one[alone(name)]["curve"][10:13]
        for (loss, _), (wanted, _) in zip(result["curve"], wanted_curve, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5), name


def test_a_checkpoint_goes_on_to_the_bit_in_its_own_layout(two):
    name = "tied, pipeline, 1f1b"
    assert two[f"{name} -> {name}"]["curve"] == two[name]["curve"][10:13]
