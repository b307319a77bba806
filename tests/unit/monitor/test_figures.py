import math
import threading

import pytest

from danlu.base.facts import Evaluation, StepReport
from danlu.monitor.figures import Figures, cells


def report(step: int, *, seconds: float = 1.0, loss: float = 3.0) -> StepReport:
    return StepReport(step, 100, loss, 1.0, 1e-3, seconds, 100 / seconds, 0.4, 2**30)


def test_the_eta_comes_from_recent_steps_not_from_compilation_or_a_hiccup() -> None:
    figures = Figures(total_steps=1000)
    figures.step(report(1, seconds=60.0))
    for step in range(2, 100):
        figures.step(report(step, seconds=30.0 if step % 20 == 0 else 0.5))
    assert figures.read().eta_seconds == pytest.approx((1000 - 99) * 0.5)


def test_the_first_step_gives_an_eta_too() -> None:
    figures = Figures(total_steps=11)
    figures.step(report(1, seconds=2.0))
    assert figures.read().eta_seconds == pytest.approx(20.0)


def test_the_eta_counts_evaluations_to_come() -> None:
    figures = Figures(total_steps=200)
    for step in range(1, 101):
        figures.step(report(step))
    figures.evaluation(Evaluation(100, 3.0, 1.2, 10, seconds=50.0))
    assert figures.read().eta_seconds == pytest.approx(150.0)


def test_a_resumed_run_starts_behind_its_start_step() -> None:
    figures = Figures(total_steps=100, start_step=40)
    assert figures.read().step == 40
    figures.step(report(41))
    assert figures.read().eta_seconds == pytest.approx(59.0)


def test_the_change_is_against_the_evaluation_before() -> None:
    figures = Figures(total_steps=100)
    assert math.isnan(figures.read().bits_per_byte)
    figures.evaluation(Evaluation(10, 3.0, 1.5, 10, 1.0))
    assert math.isnan(figures.read().change)
    figures.evaluation(Evaluation(20, 3.0, 1.3, 10, 1.0))
    assert figures.read().change == pytest.approx(-0.2)


def test_a_loss_that_is_not_finite_is_shouted_and_does_not_poison_the_mean() -> None:
    figures = Figures(total_steps=100)
    figures.step(report(1))
    figures.step(report(2, loss=math.nan))
    reading = figures.read()
    assert reading.diverged
    assert reading.loss == pytest.approx(3.0)
    assert dict(cells(reading, 1.0))["loss"] == "not finite"


def test_nothing_known_yet_is_shown_as_such() -> None:
    shown = dict(cells(Figures(total_steps=None).read(), 0.0))
    assert {shown[name] for name in ("loss", "validation", "tokens/s", "MFU", "memory")} == {
        "\N{EN DASH}"
    }


def test_reading_while_steps_come_in_is_safe() -> None:
    figures, done = Figures(total_steps=10_000), threading.Event()

    def read() -> None:
        while not done.is_set():
            figures.read()

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 3000):
        figures.step(report(step))
    done.set()
    reader.join()
    assert figures.read().step == 2999
