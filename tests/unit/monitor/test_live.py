import io
import math
import re
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from danlu.base.facts import Evaluation, StepReport
from danlu.monitor.live import Display, LiveDisplay, PlainDisplay, open_display


def report(step: int, *, loss: float = 3.0, seconds: float = 0.5) -> StepReport:
    return StepReport(step, 100, loss, 1.0, 8.3e-4, seconds, 12_400.0, 0.412, 2 * 2**30)


def terminal(width: int = 80, **more: object) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=30,
        _environ={"TERM": "xterm", **more},
    )


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def tell_a_run(display: Display, *, steps: int = 5) -> None:
    display.phase("reading text", 3, None)
    display.phase("building kernels", 2, 4)
    display.phase("building kernels", 4, 4)
    display.start("tiny", {"model": "10.6 M", "device": "CPU"}, total_steps=100)
    for step in range(1, steps + 1):
        display.step(report(step))
    display.evaluation(Evaluation(steps, 3.1, 1.842, 65_536, 0.2))
    display.sample("def ", "f(x):\n    return \x1b[31mx")
    display.note("checkpoint written")
    display.stop("done")


@pytest.mark.parametrize("make", [lambda: LiveDisplay(terminal()), lambda: PlainDisplay(pipe())])
def test_every_display_tells_a_run(make: object) -> None:
    assert callable(make)
    display = make()
    with display:
        tell_a_run(display)
    text = said(display._console)
    for words in (
        "reading text", "building kernels", "tiny", "model   10.6 M", "step 5/100",
        "loss 3.000", "1.842 bits/byte", "tokens/s 12.4 k", "MFU 41.2%", "memory 2 GiB",
        "learning rate 8.30e-4", "elapsed", "def f(x):", "return ␛[31mx", "checkpoint written",
        "done",
    ):  # fmt: skip
        assert words in text


def test_the_live_panel_counts_down() -> None:
    display = LiveDisplay(terminal())
    with display:
        display.start("tiny", {}, total_steps=100)
        display.step(report(1, seconds=30.0))
        for step in range(2, 41):
            display.step(report(step))
        lines = [line.plain for line in display._lines()]
    assert lines[1].endswith("step 40/100  40%  ETA 30s")


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("steps", [0, 1, 500])
def test_the_panel_fits_the_width(width: int, steps: int) -> None:
    display = LiveDisplay(terminal(width))
    with display:
        display.start("tiny", {}, total_steps=1_000_000)
        for step in range(1, steps + 1):
            display.step(report(step, loss=3 + 5 / step))
        lines = list(display._lines())
    assert all(line.cell_len <= max(width, 54) for line in lines)
    if width >= 60:
        assert all(line.cell_len <= width for line in lines)
        assert len(lines) <= 7


def test_an_exception_leaves_the_terminal_as_it_was() -> None:
    console, before = terminal(), sys.stdout

    def train() -> None:
        with LiveDisplay(console) as display:
            display.start("tiny", {}, total_steps=10)
            assert sys.stdout is not before  # what is printed meanwhile goes above the panel
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train()
    assert sys.stdout is before
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rindex("\x1b[?25h") > console.file.getvalue().rindex("\x1b[?25l")


def test_a_display_may_be_closed_and_used_again() -> None:
    display = LiveDisplay(terminal())
    with display:
        display.phase("measuring the device", 0, None)
    with display:
        tell_a_run(display)
    assert "measuring the device" in said(display._console)


def test_a_step_costs_microseconds() -> None:
    display = LiveDisplay(terminal())
    with display:
        display.start("tiny", {}, total_steps=5000)
        reports = [report(step) for step in range(1, 2001)]
        began = time.perf_counter()
        for each in reports:
            display.step(each)
        mean = (time.perf_counter() - began) / len(reports)
    assert mean < 0.5e-3


def test_plain_lines_come_seldom() -> None:
    console = pipe()
    with PlainDisplay(console, every_seconds=3600) as display:
        display.start("tiny", {}, total_steps=1000)
        for step in range(1, 1001):
            display.step(report(step))
        display.evaluation(Evaluation(1000, 3.1, 1.842, 65_536, 0.2))
        display.stop("done")
    steps = [line for line in said(console).splitlines() if line.startswith("step ")]
    assert len(steps) == 2  # the first, and the last with its evaluation
    assert steps[0].startswith("step 1/1,000  loss")
    assert steps[1].startswith("step 1,000/1,000")


def test_plain_lines_come_every_so_often() -> None:
    console = pipe()
    with PlainDisplay(console, every_seconds=0.0) as display:
        display.start("tiny", {}, total_steps=10)
        for step in range(1, 6):
            display.step(report(step))
    assert said(console).count("\nstep ") == 5


def test_a_closed_pipe_does_not_end_the_run() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with PlainDisplay(Console(file=Closed(), force_terminal=False)) as display:
        tell_a_run(display)


def test_a_quiet_console_stays_quiet() -> None:
    file = io.StringIO()
    with open_display("auto", Console(file=file, quiet=True)) as display:
        tell_a_run(display)
    assert file.getvalue() == ""


@pytest.mark.parametrize("kind", [LiveDisplay, PlainDisplay])
def test_a_terminal_that_knows_only_ascii_gets_ascii(kind: type, tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as file:
        console = Console(file=file, force_terminal=kind is LiveDisplay, width=80)
        with kind(console) as display:
            tell_a_run(display, steps=50)
    assert "1.842 bits/byte" in (tmp_path / "out").read_text()


def test_a_loss_that_is_not_finite_is_said() -> None:
    console = pipe()
    with PlainDisplay(console) as display:
        display.start("tiny", {}, total_steps=10)
        display.step(report(1, loss=math.nan))
        display.stop("nan")
    assert "loss not finite" in said(console)


def test_the_live_panel_is_for_people_who_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert isinstance(open_display("auto", terminal()), LiveDisplay)
    assert isinstance(open_display(False, terminal()), PlainDisplay)
    assert isinstance(open_display("auto", pipe()), PlainDisplay)
    assert isinstance(open_display(True, pipe()), PlainDisplay)
    assert isinstance(open_display("auto", terminal(TERM="dumb")), PlainDisplay)
    monkeypatch.setenv("CI", "true")
    assert isinstance(open_display("auto", terminal()), PlainDisplay)
    assert isinstance(open_display(True, terminal()), LiveDisplay)
