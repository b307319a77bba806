import dataclasses
import json

import pytest

from danlu.base.errors import CheckpointError, ConfigError
from danlu.base.facts import ClusterFacts, DeviceFacts
from danlu.config.load import load
from danlu.hardware.cluster import DEVICES, parse_cluster
from danlu.models.describe import describe
from danlu.planner.plan import Plan
from danlu.planner.search import make_plan, pin

CPU = DeviceFacts(
    "cpu", "a CPU", 24 * 2**30, {"fp32": 0.2e12, "bf16": 0.43e12}, 55e9, 2, ("avx512_bf16",)
)
LAPTOP = ClusterFacts(1, 1, CPU, 10e9, 10e9)


def plan(*words, cluster=LAPTOP, world=None, before=None):
    config = load(None, *words)
    config = pin(config, before) if before else config
    shape = config.model.shape(8192)
    return make_plan(config, shape, describe(shape), cluster, world=world)


def test_every_auto_becomes_a_number_with_a_reason():
    made = plan()
    assert made.batch_tokens == made.batch_sequences * made.model.sequence_length
    assert (made.layout.ranks, made.threads, made.format, made.backend) == (1, 2, "bf16", "native")
    assert {d.key for d in made.decisions} >= {
        "train.steps", "train.batch_tokens", "train.micro_batch", "optimizer.learning_rate",
        "data_parallel.degree", "launch.threads", "precision.format", "kernels.compile",
    }  # fmt: skip
    assert all(d.reason for d in made.decisions)
    assert made.steps * made.predicted.step_seconds == pytest.approx(240, rel=0.02)


def test_a_plan_comes_back_from_its_file_with_its_hash(tmp_path):
    made = plan()
    made.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == made
    assert json.loads((tmp_path / "plan.json").read_text())["hash"] == again.hash
    assert plan("train.seed=1").hash == made.hash  # the seed is not the planner's
    assert plan("train.steps=7").hash != made.hash


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 3}'])
def test_a_broken_plan_file_is_one_clear_line(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(CheckpointError, match="the plan cannot be read"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(("name", "value"), [("learning_rate", None), ("batch_tokens", "many")])
def test_a_plan_file_whose_numbers_are_none_is_one_clear_line(tmp_path, name, value):
    values = plan().to_dict() | {name: value}
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=rf"the plan cannot be read \({name} is {value!r}\)"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("device", DEVICES)
def test_a_cluster_is_planned_without_having_it(device):
    made = plan("model.preset=1b", "train.steps=1000", cluster=parse_cluster(f"2x8x{device}"))
    assert made.layout.data == 16
    assert made.backend == "torch"
    assert made.predicted.memory_bytes < made.cluster.device.memory_bytes
    assert 0 < made.predicted.mfu < 1
    assert made.explain().startswith(f"Plan {made.hash}")


def test_the_batch_is_the_same_on_any_number_of_ranks():
    alone = plan("train.steps=100", "train.batch_tokens=4096")
    shared = plan("train.steps=100", "train.batch_tokens=4096", "data_parallel.degree=4")
    assert alone.batch_sequences == shared.batch_sequences
    assert shared.micro_batch * shared.accumulation * 4 == shared.batch_sequences


def test_a_resumed_run_keeps_what_decides_learning_on_any_machine():
    before = plan()
    slow = dataclasses.replace(CPU, peak_flops={"fp32": 1e10, "bf16": 2e10}, threads=1)
    after = plan(
        "data_parallel.degree=2", cluster=ClusterFacts(1, 1, slow, 1e9, 1e9), before=before
    )
    for name in ("steps", "batch_tokens", "learning_rate", "warmup_steps", "format"):
        assert getattr(after, name) == getattr(before, name)
    assert after.layout.data == 2
    longer = plan("train.steps=5000", before=before)
    assert (longer.steps, longer.learning_rate) == (5000, before.learning_rate)


def test_fewer_micro_batches_fit_into_less_memory():
    roomy = plan("train.batch_tokens=8192", "train.steps=1")
    tight = plan("train.batch_tokens=8192", "train.steps=1", "memory.limit=720MiB")
    assert tight.micro_batch < roomy.micro_batch
    assert tight.micro_batch * tight.accumulation == roomy.micro_batch * roomy.accumulation


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (["memory.limit=100MiB"], None, r"model: a rank needs .* of memory, 100 MiB are allowed"),
        (["train.micro_batch=3", "train.batch_tokens=2048"], None, r"3 does not divide the 8 seq"),
        (["data_parallel.degree=2"], 4, r"degree 2 makes 2 ranks, but 4 were started"),
        (["precision.format=fp32", "kernels.backend=native"], None, r"native kernels compute bf16"),
        (["kernels.compile=true"], None, r"kernels.compile: native kernels are not compiled"),
    ],
)
def test_what_cannot_be_is_one_clear_line(words, world, message):
    with pytest.raises(ConfigError, match=message):
        plan(*words, world=world)


def test_a_gpu_model_that_does_not_fit_says_what_would():
    with pytest.raises(ConfigError, match="allowed. Use a smaller model.preset"):
        plan("model.preset=70b", cluster=parse_cluster("8xh100"))
    with pytest.raises(ConfigError, match="It fits with zero_optimization.stage=2; or use"):
        plan("model.preset=7b", cluster=parse_cluster("8xh100"))
    with pytest.raises(ConfigError, match=r"data_parallel.degree 9 does not fit on 8 devices"):
        plan("data_parallel.degree=9", cluster=parse_cluster("8xh100"))


def test_a_format_that_the_device_lacks_is_refused():
    old = dataclasses.replace(CPU, peak_flops={"fp32": 1e11}, features=("avx2",))
    cluster = ClusterFacts(1, 1, old, 1e9, 1e9)
    assert plan(cluster=cluster).format == "fp32"
    assert plan(cluster=cluster).backend == "torch"
    with pytest.raises(ConfigError, match=r"a CPU does not compute bf16. Use fp32."):
        plan("precision.format=bf16", cluster=cluster)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16x8xh1000", "Did you mean h100"),
        ("x", "there is no device 'x'"),
        ("8 x h100", "is not understood"),
        ("0x8xh100", "has no devices"),
    ],
)
def test_a_cluster_that_is_not_understood_is_one_clear_line(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_cluster(text)


def test_ten_thousand_devices_are_planned_at_once():
    made = plan("model.preset=1b", "train.steps=10", cluster=parse_cluster("1250x8xh100"))
    assert made.layout.data == 10_000
