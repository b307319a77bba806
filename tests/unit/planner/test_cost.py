import pytest

from danlu.base.facts import ClusterFacts, DeviceFacts, LayerCost
from danlu.hardware.cluster import parse_cluster
from danlu.planner.cost import layer_seconds, overlapped, setting_of
from danlu.planner.layout import Layout

CPU = DeviceFacts("cpu", "a CPU", 24 * 2**30, {"fp32": 0.2e12}, 55e9, 2, ())
ALONE = Layout()
BLOCK = LayerCost("layer", 12 * 1024**2, 24.0 * 1024**2, 2.0 * 1024**2, 0, 70.0 * 1024)


def setting(cluster, number_format):
    return setting_of(
        cluster, ALONE, width=1024, number_format=number_format, backend="torch", compiled=False
    )


def of_a_gpu(tokens, layout=ALONE):
    return layer_seconds(
        BLOCK, layout, setting(parse_cluster("1x8xa100"), "bf16"), tokens, split=layout.tensor > 1
    )


def test_a_gpu_layer_takes_the_longer_of_dispatch_and_work_and_a_little_more():
    assert overlapped(3.0, 0.0) == overlapped(0.0, 3.0) == pytest.approx(3.0)
    for dispatch, work in ((1.0, 1.0), (1.0, 2.0), (5.0, 1.0)):
        longer = max(dispatch, work)
        assert longer < overlapped(dispatch, work) <= 1.26 * longer


def test_much_work_hides_the_dispatch_of_a_gpu_layer_and_little_does_not():
    dispatch = setting(parse_cluster("1x8xa100"), "bf16").reached.overhead_seconds
    parts = of_a_gpu(131072.0)
    assert parts["overhead"] < 0.02 * sum(parts.values())
    assert sum(of_a_gpu(128.0).values()) == pytest.approx(dispatch, rel=0.01)


def test_a_tensor_split_does_not_speed_up_a_gpu_layer_that_dispatch_limits():
    split = Layout(tensor=4, split_layers=(0,), split_ends=True)
    assert sum(of_a_gpu(128.0, split).values()) > 0.95 * sum(of_a_gpu(128.0).values())
    assert sum(of_a_gpu(131072.0, split).values()) < 0.7 * sum(of_a_gpu(131072.0).values())


def test_a_cpu_layer_waits_for_its_dispatch():
    laptop = setting(ClusterFacts(1, 1, CPU, 10e9, 10e9), "fp32")
    for tokens in (0.0, 100.0, 10000.0):
        parts = layer_seconds(BLOCK, ALONE, laptop, tokens, split=False)
        assert parts["overhead"] == pytest.approx(laptop.reached.overhead_seconds)
