import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from danlu.base.errors import UserError
from danlu.monitor.history import Follower, find_run, read_history

MakeRun = Callable[..., Path]
Append = Callable[..., None]


def _step(step: int, **more: Any) -> dict[str, Any]:
    values = {"kind": "step", "time": 1e9 + step, "step": step, "tokens": 10, "loss": 5.0}
    return values | {"seconds": 1.0, "tokens_per_second": 10.0} | more


def test_steps_repeated_after_a_resume_count_once_and_the_later_line_is_true(
    make_run: MakeRun,
) -> None:
    history = read_history(make_run(400, resume_at=240))
    assert history.column("step").tolist() == list(range(1, 401))
    assert len(history.evaluations) == 10
    assert [s.step for s in history.samples] == [s for s in range(40, 401, 40) for _ in range(3)]


def test_what_a_killed_life_did_beyond_the_resume_never_happened(
    tmp_path: Path, append_lines: Append
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append_lines(metrics, *[_step(s, loss=1.0) for s in range(1, 31)])
    append_lines(metrics, {"kind": "evaluation", "step": 30, "loss": 1.0, "bits_per_byte": 1.0})
    append_lines(metrics, _step(21, loss=2.0))
    history = read_history(tmp_path)
    assert history.column("step").tolist() == list(range(1, 22))
    assert history.column("loss")[-1] == 2.0
    assert history.evaluations == []


def test_tokens_are_those_of_the_steps_that_count(make_run: MakeRun) -> None:
    history = read_history(make_run(400, resume_at=240))
    assert history.tokens_until()[-1] == 400 * 16_384


def test_wall_time_is_that_of_all_lives_without_the_pause(make_run: MakeRun) -> None:
    history = read_history(make_run(100, resume_at=40, evaluate_every=0))
    assert 120 < history.seconds < 260  # the pause between was an hour
    assert history.heard - history.started > 3600


def test_the_first_step_of_each_start_is_known(make_run: MakeRun) -> None:
    history = read_history(make_run(100, resume_at=40))
    assert np.flatnonzero(history.first_of_life).tolist() == [0, 40]


@pytest.mark.parametrize(
    ("stop", "word"), [("done", "done"), ("nan", "nan"), ("interrupted", "interrupted")]
)
def test_a_run_that_said_why_it_stopped_has_that_status(
    make_run: MakeRun, stop: str, word: str
) -> None:
    status = read_history(make_run(20, stop=stop)).status()
    assert (status.word, status.finished) == (word, True)


def test_a_run_without_an_end_is_running_until_it_has_been_silent_for_long(
    make_run: MakeRun,
) -> None:
    history = read_history(make_run(20, stop=None))
    assert history.status(history.heard + 5).word == "running"
    assert history.status(history.heard + 500).word == "silent"


def test_a_resumed_run_is_running_though_its_first_life_stopped(
    make_run: MakeRun, append_lines: Append
) -> None:
    folder = make_run(20, stop="interrupted")
    append_lines(folder / "events.jsonl", {"kind": "resume", "time": 2e9, "step": 10})
    assert read_history(folder).status(2e9 + 1).word == "running"


def test_a_run_that_is_started_again_with_nothing_left_to_do_stays_done(
    make_run: MakeRun, append_lines: Append
) -> None:
    folder = make_run(20)
    append_lines(folder / "events.jsonl", {"kind": "resume", "time": 2e9, "step": 20})
    append_lines(folder / "events.jsonl", {"kind": "note", "time": 2e9, "text": "all done"})
    assert read_history(folder).status(2e9 + 1).word == "done"


def test_numbers_beyond_a_step_report_are_kept_by_name(
    tmp_path: Path, append_lines: Append
) -> None:
    append_lines(tmp_path / "metrics.jsonl", _step(1), _step(2, scale=4), _step(3))
    history = read_history(tmp_path)
    assert history.extras() == ["scale"]
    np.testing.assert_equal(history.column("scale"), [math.nan, 4.0, math.nan])


def test_broken_lines_and_odd_values_are_passed_over(tmp_path: Path) -> None:
    lines = [
        '{"kind": "step", "step": 1, "loss": NaN, "time": 1}',
        '{"kind": "step", "step": 2, "loss": "high", "mfu": null, "extra": [1]}',
        '{"kind": "step", "step": 3, "loss": ' + "9" * 400 + "}",
        '{"kind": "step", "step": true}',
        '{"kind": "step", "step": 1e999}',
        '{"kind": "step", "step": -4}',
        '{"kind": "step"}',
        '{"kind": ["step"], "step": 5}',
        '{"kind": "evaluation", "step": 3, "loss": null, "bits_per_byte": Infinity}',
        "null",
        "[1, 2]",
        "\x00\xff",
        '{"kind": "step", "step": 4, "lo',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="latin-1")
    history = read_history(tmp_path)
    assert history.column("step").tolist() == [1, 2, 3]
    assert np.isnan(history.column("loss")).all()
    assert math.isnan(history.evaluations[0].loss)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model": 3, "predicted": [1]}'])
def test_a_broken_plan_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    history = read_history(tmp_path)
    assert history.planned("model", "layers") is None
    assert math.isnan(history.planned_number("predicted", "mfu"))
    assert history.total_steps is None


def test_other_ranks_do_not_add_steps(tmp_path: Path, append_lines: Append) -> None:
    append_lines(tmp_path / "metrics.jsonl", _step(1), _step(1, rank=3, loss=9.0))
    assert read_history(tmp_path).column("loss").tolist() == [5.0]


def test_a_follower_sees_what_is_appended_and_waits_for_the_end_of_a_line(
    make_run: MakeRun, append_lines: Append
) -> None:
    folder = make_run(20, stop=None)
    follower = Follower(folder)
    assert follower.poll()
    assert not follower.poll()
    line = json.dumps(_step(21))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(line[:30])
    assert not follower.poll()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(line[30:] + "\n")
    assert follower.poll()
    assert follower.history.column("step")[-1] == 21
    append_lines(folder / "events.jsonl", {"kind": "stop", "reason": "done"})
    assert follower.poll()
    assert follower.history.status().word == "done"


def test_a_follower_starts_over_when_the_folder_is_used_again(
    make_run: MakeRun, append_lines: Append
) -> None:
    folder = make_run(20)
    follower = Follower(folder)
    follower.poll()
    (folder / "metrics.jsonl").write_text("")
    (folder / "events.jsonl").write_text("")
    append_lines(folder / "metrics.jsonl", _step(1))
    follower.poll()
    assert len(follower.history) == 1


def test_a_folder_that_is_no_run_is_one_clear_line(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(20, name="tiny-python")
    with pytest.raises(UserError, match=r"tiny-pyhton: there is no such folder\. Did you mean"):
        find_run(tmp_path / "tiny-pyhton")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="there is no run in this folder"):
        find_run(tmp_path / "empty")
    with pytest.raises(UserError, match=r"holds runs, it is not one.*tiny-python"):
        find_run(tmp_path)
