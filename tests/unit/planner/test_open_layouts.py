import pytest
from test_plan import LAPTOP, plan

from danlu.base.errors import ConfigError
from danlu.base.facts import OFFLOAD_PIECE_BYTES, OFFLOAD_PIECES
from danlu.config.load import load
from danlu.hardware.cluster import DEVICES, parse_cluster
from danlu.models.describe import describe
from danlu.planner.layout import Layout
from danlu.planner.layouts import degrees, split_layers
from danlu.planner.plan import Plan
from danlu.planner.schedule import SCHEDULES
from danlu.planner.search import make_plan, pin_layout

ARTICLES = {
    "tensor_parallel": {"degree": 8, "split_layers": [17, 23, 29]},
    "pipeline_parallel": {"stages": 5, "micro_batches": 16},
    "zero_optimization": {"stage": 3, "offload_ratio": 0.3},
}
AUTO = ("tensor_parallel.degree=auto", "pipeline_parallel.stages=auto",
        "zero_optimization.stage=auto")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [("all", range(8)), ("3", [3]), ("0-2", [0, 1, 2]), ("::3", [0, 3, 6]), ("1,4-5", [1, 4, 5]),
     ("[2, 7]", [2, 7]), ("'6:'", [6, 7])],
)  # fmt: skip
def test_layers_to_split_are_numbers_or_a_pattern(text, expected):
    config = load(None, f"tensor_parallel.split_layers={text}")
    assert split_layers(config, 8) == tuple(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [("8", "there is no layer 8. Use numbers from 0 to 7"), ("a-b", "'a-b' is not understood")],
)
def test_layers_that_are_not_there_are_one_clear_line(text, message):
    with pytest.raises(ConfigError, match=message):
        split_layers(load(None, f"tensor_parallel.split_layers={text}"), 8)


def test_open_axes_divide_the_devices_and_stay_in_a_machine():
    found = degrees(load(None, *AUTO), 16, 8, 6, None)
    assert {d.ranks for d in found} == {16}
    assert {d.tensor for d in found} == {1, 2, 4, 8}
    assert {d.pipeline for d in found} == {1, 2, 4}
    assert len(set(found)) == len(found)


def test_ranks_that_were_started_are_all_used():
    config = load(None, "tensor_parallel.degree=2")
    assert [d.data for d in degrees(config, 8, 8, 6, 6)] == [3]
    with pytest.raises(ConfigError, match="makes 2 ranks, but 5 were started"):
        degrees(config, 8, 8, 6, 5)


def test_the_articles_layout_is_planned_for_40_devices_and_more():
    words = ("model.preset=13b", "model.sequence_length=2048", "train.steps=10")
    for nodes, copies in ((5, 1), (10, 2)):
        more = ("train.batch_tokens=65536", "memory.limit=120GiB")
        config = load(ARTICLES, *words, *more)
        shape = config.model.shape(8192)
        made = make_plan(config, shape, describe(shape), parse_cluster(f"{nodes}x8xh100"))
        layout = made.layout
        assert (layout.tensor, layout.pipeline, layout.data) == (8, 5, copies)
        assert layout.split_layers == (17, 23, 29)
        assert not layout.split_ends
        assert made.accumulation == 16
        assert len(made.predicted.ranks_memory) == 5
        assert sum(layout.stages) == 40
        assert 0.5 < made.predicted.utilisation < 1
        assert "Memory of each pipeline rank" in made.explain()


def test_an_open_layout_is_no_slower_than_the_plainest_one():
    words = ("model.preset=small", "train.batch_tokens=786432", "train.steps=10")
    more = ("memory.recompute=auto", "zero_optimization.offload_ratio=auto")
    cluster = parse_cluster("16x8xh100")
    chosen = plan(*words, *AUTO, *more, cluster=cluster)
    plain = plan(*words, "zero_optimization.stage=1", cluster=cluster)
    assert chosen.predicted.step_seconds <= plain.predicted.step_seconds


def test_an_open_layout_comes_with_runners_up_and_reasons(tmp_path):
    made = plan("model.preset=8b", "train.steps=100", *AUTO, cluster=parse_cluster("4x8xh100"))
    assert made.layout == made.alternatives[0].layout
    speeds = [a.tokens_per_second for a in made.alternatives]
    assert speeds == sorted(speeds, reverse=True)
    assert made.rejected
    assert all(r.reason for r in made.rejected)
    limit = 0.9 * made.cluster.device.memory_bytes
    assert all(a.memory_bytes <= limit for a in made.alternatives)
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


def test_an_alternative_can_be_pinned_and_is_then_the_plan():
    words = ("model.preset=8b", "train.steps=100", *AUTO)
    cluster = parse_cluster("4x8xh100")
    made = plan(*words, cluster=cluster)
    other = made.alternatives[1]
    config = pin_layout(load(None, *words), other)
    shape = config.model.shape(8192)
    again = make_plan(config, shape, describe(shape), cluster)
    assert again.layout == other.layout
    assert (again.micro_batch, again.accumulation) == (other.micro_batch, other.micro_batches)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tensor_parallel.degree=3"], "degree: 3 does not divide 4 heads and .* Use 1 or 2 or 4"),
        (["pipeline_parallel.stages=9"], "9 stages are more than the 8 layers"),
        (["pipeline_parallel.stages=2", "pipeline_parallel.layers=[3,4]"], "are 7 layers"),
        (["pipeline_parallel.stages=2", "pipeline_parallel.layers=[8]"], "1 stages do not go on 2"),
        (["pipeline_parallel.stages=2", "pipeline_parallel.micro_batches=3",
          "pipeline_parallel.schedule=dualpipe_v"], "dualpipe_v on 2 ranks needs 4 or more"),
        (["pipeline_parallel.stages=8", "pipeline_parallel.schedule=zero_bubble"],
         "zero_bubble holds 2 stages a rank, 16 in all, of 8 layers"),
        (["pipeline_parallel.stages=2", "train.micro_batch=3", "train.batch_tokens=8192",
          "pipeline_parallel.micro_batches=4"], "3 does not divide the 32 sequences"),
        (["tensor_parallel.degree=2", "tensor_parallel.split_layers=[1]",
          "tensor_parallel.sequence_parallel=true"], "rows can only be shared"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_be_are_one_clear_line(words, message):
    with pytest.raises(ConfigError, match=message):
        plan("model.preset=small", *words)


def test_stages_are_balanced_by_cost_equal_or_as_configured():
    words = ("model.preset=small", "pipeline_parallel.stages=2", "train.batch_tokens=8192",
             "pipeline_parallel.schedule=1f1b")  # fmt: skip
    auto = plan(*words).layout.stages
    assert plan(*words, "pipeline_parallel.layers=equal").layout.stages == (4, 4)
    assert plan(*words, "pipeline_parallel.layers=[6, 2]").layout.stages == (6, 2)
    assert auto[0] > auto[1]  # the head weighs as much as layers


def test_zero_shards_what_its_stage_says():
    words = ("model.preset=small", "data_parallel.degree=4", "precision.format=fp32",
             "train.batch_tokens=8192")  # fmt: skip
    memory = [plan(*words, f"zero_optimization.stage={z}").predicted.memory for z in range(4)]
    moments, gradients = "optimizer (two fp32 moments)", "gradients (fp32)"
    for stage in (1, 2, 3):
        assert memory[stage][moments] == pytest.approx(memory[0][moments] / 4, rel=0.01)
    assert memory[1][gradients] == memory[0][gradients]
    assert memory[2][gradients] < memory[1][gradients]
    assert sum(memory[3].values()) < sum(memory[2].values()) < sum(memory[1].values())


TIED = ("model.preset=small", "train.batch_tokens=8192", "precision.format=fp32",
        "pipeline_parallel.stages=2", "pipeline_parallel.layers=equal")  # fmt: skip


def both(*words):
    """The plan of a model with an embedding and a head, and with one matrix for both."""
    return [plan(*TIED, *words, f"model.tied_embeddings={tied}") for tied in ("false", "true")]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_matrix_as_embedding_and_head_is_held_once_a_rank(schedule):
    two, one = both(f"pipeline_parallel.schedule={schedule}", "pipeline_parallel.micro_batches=4")
    matrix = 4 * one.model.vocab_size * one.model.hidden_size
    names = {"weights (fp32)": 1, "gradients (fp32)": 1, "optimizer (two fp32 moments)": 2}
    for rank in (0, 1):
        saved = matrix if rank == 0 and not one.layout.ends_apart else 0
        for name, copies in names.items():
            apart, shared = (made.predicted.ranks_memory[rank][name] for made in (two, one))
            assert apart - shared == copies * saved, (rank, name)


def test_what_zero_gathers_of_it_is_each_stages_own():
    words = ("pipeline_parallel.schedule=zero_bubble", "data_parallel.degree=2",
             "zero_optimization.stage=1", "precision.format=bf16")  # fmt: skip
    two, one = (made.predicted.ranks_memory[0] for made in both(*words))
    for name in ("gradients (fp32)", "weights in the computing format"):
        assert one[name] == two[name]
    assert one["weights (fp32)"] < two["weights (fp32)"]


def test_its_gradient_travels_between_the_ends_where_they_are_apart():
    def sending(made):
        return made.predicted.seconds["communication"]

    apart = both("pipeline_parallel.schedule=1f1b")
    assert sending(apart[1]) > sending(apart[0])
    together = both("pipeline_parallel.schedule=zero_bubble")
    assert sending(together[1]) == sending(together[0])


def test_ranks_hold_the_stages_that_schedules_give_them():
    loop = Layout(pipeline=2, schedule="interleaved", stages=(1, 2, 1, 2))
    v = Layout(pipeline=2, schedule="zero_bubble", stages=(1, 2, 1, 2))
    assert [loop.stage_numbers(r) for r in (0, 1)] == [(0, 2), (1, 3)]
    assert [v.stage_numbers(r) for r in (0, 1)] == [(0, 3), (1, 2)]
    assert v.layers_of(3) == range(4, 6)
    assert LAPTOP.devices == 1


def test_recompute_trades_memory_for_time_and_auto_takes_the_least_that_fits():
    words = ("model.preset=30m", "train.steps=10", "train.batch_tokens=8192", "train.micro_batch=8")
    made = {r: plan(*words, f"memory.recompute={r}") for r in ("none", "selective", "full")}
    sizes = [p.predicted.memory_bytes for p in made.values()]
    seconds = [p.predicted.step_seconds for p in made.values()]
    assert sizes[0] > sizes[1] > sizes[2]
    assert seconds[0] < seconds[1] < seconds[2]
    layers, tokens, width = 6, 4096, 2
    cheap = describe(made["none"].model)[1].cheap_elements
    assert sizes[0] - sizes[1] == pytest.approx(layers * tokens * width * cheap, abs=8)
    for choice, size in zip(made, sizes, strict=True):
        auto = plan(*words, "memory.recompute=auto", f"memory.limit={size + 2**20}")
        assert auto.layout.recompute == choice
    assert "selective recompute" in made["selective"].layout.text()


def test_gathered_inputs_of_split_layers_are_kept_by_selective_recompute():
    words = ("model.preset=small", "tensor_parallel.degree=2", "train.batch_tokens=8192")
    saved = {}
    for rows in ("true", "false"):
        sizes = [
            plan(
                *words, f"memory.recompute={r}", f"tensor_parallel.sequence_parallel={rows}"
            ).predicted.memory["activations"]
            for r in ("none", "selective")
        ]
        saved[rows] = sizes[0] - sizes[1]
    layer = describe(load(None, "model.preset=small").model.shape(8192))[1]
    norms, swiglu = 2 * 256, layer.split_cheap / 2
    assert saved["true"] / saved["false"] == pytest.approx(swiglu / (norms + swiglu), rel=0.01)


def test_moments_off_a_gpu_leave_room_for_pieces_and_cost_what_the_link_takes():
    words = ("model.preset=1b", "train.steps=10")
    parts = {}
    for share in (0.0, 0.5, 1.0):
        made = plan(
            *words, f"zero_optimization.offload_ratio={share}", cluster=parse_cluster("1xh100")
        )
        moments = made.predicted.memory["optimizer (two fp32 moments)"]
        parts[share] = (moments, made.predicted.seconds.get("offload"))
    weights, update = made.parameters, made.predicted.seconds["optimizer"]
    pieces = 2 * OFFLOAD_PIECES * OFFLOAD_PIECE_BYTES
    assert [parts[s][0] for s in parts] == [8 * weights, 4 * weights + pieces, pieces]
    link = 0.8 * DEVICES["h100"].host_bandwidth
    assert parts[0.0][1] is None
    assert parts[0.5][1] == pytest.approx(4 * weights / link - update)
    assert parts[1.0][1] == pytest.approx(8 * weights / link - update)
