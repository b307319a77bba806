import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from danlu.base.errors import UserError
from danlu.monitor.summary import summarise

MakeRun = Callable[..., Path]
Append = Callable[..., None]


def test_a_run_is_summed_up(make_run: MakeRun) -> None:
    summary = summarise(make_run(400))
    assert (summary.name, summary.status) == ("tiny-python", "done")
    assert (summary.step, summary.total_steps) == (400, 400)
    assert summary.tokens == 400 * 16_384
    assert summary.first_loss > 8 > 3 > summary.loss > 2
    assert summary.bits_per_byte == summary.best_bits_per_byte
    assert summary.step_seconds == pytest.approx(1.31, rel=0.02)
    assert summary.peak_flops == 2.1e11
    ratio = {row.label: row.ratio for row in summary.comparison}
    assert ratio["step time"] == pytest.approx(1.31 / 1.23, rel=0.02)
    assert ratio["memory"] == pytest.approx(1.97e9 / 2.018e9, rel=0.01)


def test_the_text_has_about_ten_aligned_lines(make_run: MakeRun) -> None:
    lines = summarise(make_run(400)).summary().splitlines()
    assert 8 <= len(lines) <= 12
    assert all(line[:2] == "  " and line[2] != " " and line[14] != " " for line in lines)
    assert all(len(line) <= 100 for line in lines)
    text = "\n".join(lines)
    assert "tiny-python: done" in text
    assert "1.06x the plan's 1.23 s" in text
    assert "of 210 GFLOP/s (fp32, measured)" in text


def test_the_dictionary_is_valid_json(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    for folder in (make_run(400), tmp_path):
        text = json.dumps(summarise(folder).to_dict(), allow_nan=False)
        assert json.loads(text)["status"] in ("done", "waiting")


def test_one_step_is_enough(make_run: MakeRun) -> None:
    summary = summarise(make_run(1, stop=None))
    assert summary.step == 1
    assert summary.step_seconds > 20  # it holds warm-up, but there is no other
    assert math.isnan(summary.bits_per_byte)
    assert "validation" not in summary.summary()


def test_no_step_at_all_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {preset: tiny}\n")
    text = summarise(tmp_path).summary()
    assert "no step yet" in text
    assert "nan" not in text.lower()


def test_a_run_that_diverged_says_so(make_run: MakeRun, append_lines: Append) -> None:
    folder = make_run(30, stop=None)
    step = {"kind": "step", "time": 1.77e9, "step": 31, "loss": math.nan}
    append_lines(folder / "metrics.jsonl", step)
    stop = {"kind": "stop", "time": 1.77e9, "reason": "nan", "message": "step 31 broke."}
    append_lines(folder / "events.jsonl", stop)
    summary = summarise(folder)
    assert summary.status == "nan"
    assert math.isfinite(summary.loss)
    assert "stopped, the loss is not finite" in summary.summary()
    assert "step 31 broke." in summary.summary()


def test_mfu_is_a_share_of_all_devices(make_run: MakeRun) -> None:
    folder = make_run(30)
    plan = json.loads((folder / "plan.json").read_text())
    plan["layout"]["data"] = 8
    (folder / "plan.json").write_text(json.dumps(plan))
    assert summarise(folder).peak_flops == 2.1e11  # eight ranks share one CPU
    plan["cluster"]["device"]["kind"] = "cuda"
    (folder / "plan.json").write_text(json.dumps(plan))
    assert summarise(folder).peak_flops == 8 * 2.1e11


def test_mfu_is_of_the_peak_that_the_plan_has_last(make_run: MakeRun) -> None:
    folder = make_run(30)
    plan = json.loads((folder / "plan.json").read_text())
    before = summarise(folder)
    plan["cluster"]["device"]["peak_flops"]["fp32"] *= 2
    (folder / "plan.json").write_text(json.dumps(plan))
    assert summarise(folder).mfu == pytest.approx(before.mfu / 2)
    plan["cluster"]["device"]["peak_flops"]["fp32"] /= 100
    (folder / "plan.json").write_text(json.dumps(plan))
    assert summarise(folder).mfu_text.endswith("a peak that was measured too low")


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        summarise(tmp_path / "nowhere")
