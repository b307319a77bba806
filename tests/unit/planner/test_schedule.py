import random

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from danlu.planner.schedule import (
    SCHEDULES,
    Action,
    StageCost,
    order,
    peak_activations,
    problem,
    share_cores,
    simulate,
)

NAMES = list(SCHEDULES)
SHAPES = [
    (name, ranks, micro_batches, chunks)
    for name in NAMES
    for ranks in (1, 2, 3, 4, 5, 8)
    for micro_batches in (*range(1, 14), 16, 20)
    for chunks in ((2, 3, 4) if name == "interleaved" else (SCHEDULES[name].chunks,))
]
POSSIBLE = [shape for shape in SHAPES if problem(*shape) is None]


class Recorder:
    """A torch pipeline stage that computes and sends nothing but notes what it is asked for."""

    has_backward = True
    submod = None

    def __init__(self, index, rank, ranks, stages):
        self.stage_index, self.group_rank, self.group_size = index, rank, ranks
        self.num_stages, self.is_first, self.is_last = stages, index == 0, index == stages - 1
        self.asked = []

    def forward_one_chunk(self, micro_batch, *_, **__):
        self.asked.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch, **_):
        self.asked.append(f"{self.stage_index}B{micro_batch}")

    def perform_reduce_grad(self, _):
        pass

    def _no_sends(self, _):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_sends


def torch_schedule(name, ranks, micro_batches, chunks, rank=0):
    its = SCHEDULES[name]
    stages = [
        Recorder(stage, rank, ranks, ranks * chunks)
        for stage, owner in enumerate(its.owners(ranks, chunks))
        if owner == rank
    ]
    make = getattr(torch_schedules, its.torch_class)
    several = issubclass(make, torch_schedules.PipelineScheduleMulti)
    return make(stages if several else stages[0], micro_batches)


def torch_order(name, ranks, micro_batches, chunks):
    """What torch computes: from its table, or from running it where it does not use the table."""
    whole = torch_schedule(name, ranks, micro_batches, chunks)
    if isinstance(whole, torch_schedules.PipelineScheduleMulti):
        return [
            [
                str(part)
                for action in whole.pipeline_order[rank]
                if action is not None
                for part in action.sub_actions or (action,)
            ]
            for rank in range(ranks)
        ]
    return [executed(name, ranks, micro_batches, rank) for rank in range(ranks)]


def executed(name, ranks, micro_batches, rank):
    schedule = torch_schedule(name, ranks, micro_batches, 1, rank)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches()
    return schedule._stage.asked


def even(name, ranks, micro_batches, chunks=None, **more):
    """A step in which a rank takes 1 s for a micro-batch's F, I and W each."""
    stages = len(SCHEDULES[name].owners(ranks, chunks))
    cost = StageCost(*[ranks / stages] * 3)
    actions = order(name, ranks, micro_batches, chunks)
    return simulate(actions, [cost] * stages, pairs=SCHEDULES[name].pairs, **more)


@pytest.mark.parametrize("name", NAMES)
def test_every_order_is_what_torch_computes(name):
    for shape in POSSIBLE:
        if shape[0] == name:
            assert [[str(a) for a in rank] for rank in order(*shape)] == torch_order(*shape), shape


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_run_is_what_torch_refuses(name):
    for shape in SHAPES:
        if shape[0] == name and shape not in POSSIBLE:
            with pytest.raises(ValueError, match="micro"):
                torch_schedule(*shape)
            with pytest.raises(ValueError, match="micro-batches"):
                order(*shape)


def test_torchs_own_table_for_1f1b_is_off_by_one_on_the_last_rank():
    """Why the order is compared with what torch executes; when this fails, the table will do."""
    table = torch_schedule("1f1b", 3, 4, 1).pipeline_order
    drawn = [str(a) for a in table[2] if a is not None and str(a)[1] in "FB"]
    assert drawn[0] == "2F1"
    assert executed("1f1b", 3, 4, 2)[0] == "2F0"


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (("1f1b", 4, 3, 1), "1f1b on 4 ranks needs 4 or more micro-batches, not 3."),
        (("dualpipe_v", 4, 7, 2), "dualpipe_v on 4 ranks needs 8 or more micro-batches, not 7."),
        (("gpipe", 4, 0, 1), "gpipe on 4 ranks needs 1 or more micro-batches, not 0."),
        (("gpipe", 0, 1, 1), "A pipeline of 0 ranks cannot be; use 1 or more."),
        (("gpipe", 2, 4, 2), "gpipe needs 1 stage on each rank, not 2."),
        (("interleaved", 2, 4, 1), "interleaved needs 2 or more stages on each rank, not 1."),
        (("zero_bubble", 2, 4, 3), "zero_bubble needs 2 stages on each rank, not 3."),
        (("zerobubble", 2, 4, 2), "There is no schedule 'zerobubble'. Did you mean zero_bubble?"),
        (
            ("interleaved", 5, 16, 2),
            "interleaved on 5 ranks does not divide 16 micro-batches into 3 equal rounds;"
            " use 15 or 18.",
        ),
    ],
)
def test_a_refusal_says_which_number_and_what_to_use(shape, sentence):
    assert problem(*shape) == sentence


def test_stages_lie_in_a_loop_or_in_a_v():
    assert SCHEDULES["interleaved"].owners(3, 2) == (0, 1, 2, 0, 1, 2)
    assert SCHEDULES["dualpipe_v"].owners(3) == (0, 1, 2, 2, 1, 0)
    for name, ranks, micro_batches, chunks in POSSIBLE:
        held = order(name, ranks, micro_batches, chunks)
        for stage, owner in enumerate(SCHEDULES[name].owners(ranks, chunks)):
            assert any(action.stage == stage for action in held[owner])


def test_every_micro_batch_goes_once_each_way_through_every_stage():
    for name, ranks, micro_batches, chunks in POSSIBLE:
        actions = [a for rank in order(name, ranks, micro_batches, chunks) for a in rank]
        once = {(s, m) for s in range(ranks * chunks) for m in range(micro_batches)}
        by_kind = {kind: [(s, m) for k, s, m in actions if k == kind] for kind in "FBIW"}
        assert sorted(by_kind["F"]) == sorted(once)
        assert sorted(by_kind["B"] + by_kind["I"]) == sorted(once)
        assert sorted(by_kind["W"]) == sorted(by_kind["I"])


def test_no_order_ends_in_ranks_that_wait_for_one_another():
    dice = random.Random(0)
    for shape in POSSIBLE:
        stages = len(SCHEDULES[shape[0]].owners(shape[1], shape[3]))
        costs = [StageCost(*(dice.uniform(0.1, 3) for _ in range(3))) for _ in range(stages)]
        made = simulate(order(*shape), costs, send_seconds=0.2, pairs=SCHEDULES[shape[0]].pairs)
        work = shape[2] * sum(c.forward + c.backward_input + c.backward_weight for c in costs)
        assert sum(made.busy) == pytest.approx(work)
        assert made.seconds >= max(made.busy)


def test_in_a_timeline_no_rank_does_two_things_and_nothing_starts_before_its_input():
    for name in NAMES:
        stages = len(SCHEDULES[name].owners(3))
        costs = [StageCost(1 + s % 2, 1, 0.5) for s in range(stages)]
        actions = order(name, 3, 6)
        made = simulate(actions, costs, send_seconds=0.25, pairs=SCHEDULES[name].pairs)
        assert len(made.events) == sum(map(len, actions))
        end = {
            ("I" if e.action.kind == "B" else e.action.kind, *e.action[1:]): e for e in made.events
        }
        for before, after in zip(made.events, made.events[1:], strict=False):
            assert before.rank < after.rank or before.end <= after.start
        for event in made.events:
            kind, stage, m = event.action
            source = ("F", stage - 1, m) if kind == "F" else ("I", stage + 1, m)
            if kind != "W" and source in end:
                sent = 0.25 if end[source].rank != event.rank else 0.0
                assert event.start >= end[source].end + sent


@pytest.mark.parametrize("micro_batches", [4, 8, 12, 32])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bubbles_are_those_of_the_closed_formulas(ranks, micro_batches):
    p, m = ranks, micro_batches
    for name in ("gpipe", "1f1b"):
        assert 1 - even(name, p, m).utilisation == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 3, 4):
        bubble = (p - 1) / (m * v + p - 1)
        assert 1 - even("interleaved", p, m, v).utilisation == pytest.approx(bubble)
    if m >= 2 * p:
        assert even("zero_bubble", p, m).seconds == pytest.approx(3 * m + (p - 1) / 2)
        # (p/2 - 1)(F&B + B - 3W) with p the chunks: F&B = 1.5, B = 1, W = 0.5 s
        assert even("dualpipe_v", p, m).seconds == pytest.approx(3 * m + p - 1)


def test_pairs_that_send_together_cost_what_torch_pays_in_dualpipe_v():
    actions, costs = order("dualpipe_v", 4, 8), [StageCost(0.5, 0.5, 0.5)] * 8
    assert simulate(actions, costs).seconds == pytest.approx(25.5)
    assert simulate(actions, costs, pairs=True).seconds == pytest.approx(27)


def test_in_flight_peaks_are_those_of_the_papers():
    def whole(name, micro_batches, chunks=None):  # in units of a rank's share of the model
        stages = len(SCHEDULES[name].owners(8, chunks))
        return peak_activations(order(name, 8, micro_batches, chunks), [8 / stages] * stages)

    assert whole("gpipe", 16) == (16,) * 8
    assert whole("1f1b", 16) == (8, 7, 6, 5, 4, 3, 2, 1)
    assert whole("interleaved", 16, 2)[0] == pytest.approx(8 * (1 + 7 / 16))
    assert whole("interleaved", 16, 4)[0] == pytest.approx(8 * (1 + 7 / 32))
    assert whole("zero_bubble", 16) == (8,) * 8
    assert whole("dualpipe_v", 16) == (8.5,) * 8


def test_peaks_by_stage_and_weighted_peaks_agree():
    made = even("zero_bubble", 4, 8)
    assert [dict(peaks) for peaks in made.peaks] == [
        {0: 8, 7: 1}, {1: 7, 6: 2}, {2: 6, 5: 3}, {3: 5, 4: 4},
    ]  # fmt: skip
    for stage in range(8):
        only = [float(s == stage) for s in range(8)]
        assert max(peak_activations(order("zero_bubble", 4, 8), only)) == max(
            peaks.get(stage, 0) for peaks in made.peaks
        )


def test_sending_takes_time_and_an_expensive_stage_sets_the_pace():
    assert even("1f1b", 4, 8, send_seconds=0.5).seconds > even("1f1b", 4, 8).seconds
    costs = [StageCost(1, 1, 1)] * 3 + [StageCost(2, 2, 2)]
    assert simulate(order("1f1b", 4, 64), costs).seconds == pytest.approx(64 * 6 + 3 * 3)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_wait_leave_their_core_to_the_others(name):
    crowded = even(name, 4, 8)
    one_core = share_cores(crowded, 4)  # never idle: all work, one after the other
    assert one_core.seconds == pytest.approx(sum(crowded.busy) / 4)
    two_cores = share_cores(crowded, 2)
    ideal = sum(crowded.busy) / 4
    assert max(ideal, crowded.seconds / 2) <= two_cores.seconds < crowded.seconds
    assert two_cores.seconds == pytest.approx(max(e.end for e in two_cores.events))
    alone = share_cores(even(name, 4, 8), 1)
    assert alone.seconds == pytest.approx(crowded.seconds)


def test_ranks_that_take_turns_have_a_core_each():
    turns = simulate(order("gpipe", 4, 1), [StageCost(1, 1, 1)] * 4)
    assert share_cores(turns, 2).seconds == pytest.approx(turns.seconds / 2)
    assert sum(share_cores(turns, 2).busy) == pytest.approx(sum(turns.busy) / 2)


def test_a_stuck_order_names_the_action_that_waits():
    forward, backward = Action("F", 0, 0), Action("B", 0, 0)
    with pytest.raises(ValueError, match="rank 0 waits at 0B0 for 0F0, which never comes"):
        simulate(((backward, forward),), [StageCost(1, 1, 1)])
    crossed = (
        (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)),
        (Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)),
    )
    with pytest.raises(ValueError, match="rank 1 waits at 1F1 for 0F1"):
        simulate(crossed, [StageCost(1, 1, 1)] * 2)


def test_costs_must_be_those_of_the_stages():
    with pytest.raises(ValueError, match="3 costs do not fit"):
        simulate(order("1f1b", 2, 2), [StageCost(1, 1, 1)] * 3)
