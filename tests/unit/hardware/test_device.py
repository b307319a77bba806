"""Rates that others disturbed are measured again."""

from dataclasses import replace
from pathlib import Path

import pytest

from danlu.hardware import device
from danlu.hardware.cluster import recall, remember
from danlu.hardware.device import measure, probe


def _slowed(share: float) -> dict[str, float]:
    """Remembers this CPU's rates times `share`; returns what they were."""
    facts = measure("cpu")
    slow = {name: rate * share for name, rate in facts.peak_flops.items()}
    remember(replace(facts, peak_flops=slow, bandwidth=facts.bandwidth * share), 1)
    return dict(facts.peak_flops)


def test_all_rates_of_a_disturbed_measurement_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DANLU_HOME", str(tmp_path))
    rates = _slowed(0.01)
    found = probe("cpu")
    assert all(found.peak_flops[name] > 0.05 * rate for name, rate in rates.items())
    kept = recall()
    assert kept is not None
    assert kept[0] == found


def test_a_high_rate_stands_though_the_machine_is_busy_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DANLU_HOME", str(tmp_path))
    _slowed(1.0)
    monkeypatch.setattr(device, "_matrix_rate", lambda *_: 1.0)
    known = recall()
    assert known is not None
    assert probe("cpu") == known[0]
