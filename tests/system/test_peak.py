"""A run that is faster than the measured peak."""

from dataclasses import replace

import pytest

import danlu
from danlu.hardware import device
from danlu.hardware.cluster import remember
from danlu.train import run as train_run
from running import TINY, events, records


def test_the_peak_is_measured_again_where_a_step_was_faster(tmp_path, monkeypatch):
    monkeypatch.setenv("DANLU_HOME", str(tmp_path / "home"))
    facts = device.measure("cpu")
    slow = {name: rate * 1e-6 for name, rate in facts.peak_flops.items()}
    answers = [replace(facts, peak_flops=slow), facts]

    def probe(_kind):
        facts = answers.pop(0)
        remember(facts, 1)
        return facts

    monkeypatch.setattr(train_run, "probe", probe)
    folder = tmp_path / "run"
    config = danlu.load(None, *TINY, f"folder={folder}", "train.steps=4", "monitor.progress=false")
    danlu.build(config).train()
    assert not answers
    assert all(step["mfu"] <= 1 for step in records(folder).values())
    notes = [event["text"] for event in events(folder, "note")]
    assert any(text.startswith("A step was faster than the peak") for text in notes)
    summary = train_run.summarise(folder)
    assert summary.mfu <= 1
    assert summary.peak_flops == pytest.approx(max(facts.peak_flops.values()))
