"""What is on the screen while a run goes on: a live panel for people, plain lines for files.

Training hands over numbers and goes on; drawing happens in a thread of the display. Finished
phases, evaluations, samples and notes scroll by as ordinary lines and stay, the panel below them
moves. A display that cannot write any more (a closed pipe) falls silent; it never ends a run.
"""

import contextlib
import dataclasses
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from rich.console import Console, ConsoleOptions, Group
from rich.live import Live
from rich.text import Text

from danlu.base.facts import Evaluation, StepReport
from danlu.base.units import format_count, format_duration
from danlu.monitor.curves import sparkline
from danlu.monitor.figures import Figures, Reading, cells
from danlu.monitor.words import UNKNOWN, ascii_text, countdown, decimal, shorten, signed, visible

__all__ = ["Display", "LiveDisplay", "PlainDisplay", "encodable", "open_display", "panel"]

Progress = bool | Literal["auto"]
_Cell = tuple[str, str, int]  # label, text, slots

_FRAMES_PER_SECOND = 4  # a frame costs about 1 ms of one core
_CELL = 26  # columns of a slot of the panel; a figure takes one
_LEAST_CURVE, _MOST_CURVE = 20, 80  # columns of the loss's curve
_SAMPLE_LINES = 6
_PLAIN_WIDTH = 120  # of a sample's lines in a file
_ENDS = {
    "done": "done",
    "interrupted": "interrupted; the same command goes on from the last checkpoint",
    "nan": "stopped: the loss is not finite",
    "error": "stopped by an error",
}


class Display(ABC):
    """What training tells the person in front of it.

    A context manager; leaving it restores the terminal, also when an exception passes.
    """

    @abstractmethod
    def phase(self, name: str, done: float, total: float | None) -> None:
        """Progress of something before the first step (preparing text, building kernels).

        Args:
            name: what is being done; a bar each.
            done: how much of it is done; the phase ends when that is `total`.
            total: None when it is not known: the phase then lasts until the next one or the first
                step.
        """

    @abstractmethod
    def start(
        self, title: str, facts: Mapping[str, str], *, total_steps: int, start_step: int = 0
    ) -> None:
        """Training is about to begin.

        Args:
            title: the run's name.
            facts: a few lines worth saying (model, device, plan …), label → text.
            total_steps: where the run ends.
            start_step: the last step that was already done; 0 for a new run.
        """

    @abstractmethod
    def step(self, report: StepReport) -> None:
        """One step is done. Costs the caller microseconds."""

    @abstractmethod
    def evaluation(self, evaluation: Evaluation) -> None:
        """One evaluation is done."""

    @abstractmethod
    def sample(self, prompt: str, text: str) -> None:
        """What the model writes (`text`) when given `prompt`; control characters are shown."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Something worth a line."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """The run ends: `done`, `interrupted`, `nan`, `error`. Nothing is shown after it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Gives the terminal back; may be called again."""


def open_display(progress: Progress = "auto", console: Console | None = None) -> Display:
    """The display for where the output goes.

    Args:
        progress: `monitor.progress`: False for plain lines, "auto" for the live panel where a
            person is watching, True for the panel on any terminal, a CI's too.
        console: where to write; standard output when left out.
    """
    target = console or Console(highlight=False)
    watched = target.is_interactive and not (progress == "auto" and os.environ.get("CI"))
    return LiveDisplay(target) if progress and watched else PlainDisplay(target)


@dataclass(slots=True)
class _Phase:
    name: str
    done: float = 0.0
    total: float | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def share(self) -> float | None:
        return min(self.done / self.total, 1.0) if self.total else None

    @property
    def complete(self) -> bool:
        return self.total is not None and self.done >= self.total

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class _Phases:
    """The phases under way; says which of them an update ends."""

    def __init__(self) -> None:
        self.open: dict[str, _Phase] = {}

    def update(self, name: str, done: float, total: float | None) -> list[_Phase]:
        """Takes an update in and returns the phases that are over with it."""
        over = [] if name in self.open else self._end_unmeasured()
        phase = self.open.setdefault(name, _Phase(name))
        phase.done, phase.total = done, total
        return over + ([self.open.pop(name)] if phase.complete else [])

    def end(self) -> list[_Phase]:
        """Ends all that are open."""
        over = list(self.open.values())
        self.open.clear()
        return over

    def _end_unmeasured(self) -> list[_Phase]:
        names = [name for name, phase in self.open.items() if phase.total is None]
        return [self.open.pop(name) for name in names]


class LiveDisplay(Display):
    """A panel that moves at the bottom of a terminal."""

    def __init__(self, console: Console) -> None:
        self._console, self._phases = console, _Phases()
        self._figures: Figures | None = None
        self._began, self._stepped = time.monotonic(), False
        self._live = Live(
            get_renderable=lambda: Group(*self._lines()),  # anew, in the width there then is
            console=console,
            refresh_per_second=_FRAMES_PER_SECOND,
            transient=True,
        )

    def phase(self, name: str, done: float, total: float | None) -> None:
        """See `Display.phase`."""
        self._open()
        self._show_ended(self._phases.update(name, done, total))

    def start(
        self, title: str, facts: Mapping[str, str], *, total_steps: int, start_step: int = 0
    ) -> None:
        """See `Display.start`."""
        self._open()
        self._print(Text(), Text(f"  {visible(title)}", style="bold"))
        width = max((len(label) for label in facts), default=0)
        for label, text in facts.items():
            line = Text(f"  {label:<{width}}  ", style="dim")
            self._print(line.append(visible(text), style="not dim"))
        self._print(Text())
        self._began = time.monotonic()
        self._figures = Figures(total_steps=total_steps, start_step=start_step)

    def step(self, report: StepReport) -> None:
        """See `Display.step`."""
        assert self._figures is not None, "start() comes before step()"
        if not self._stepped:
            self._stepped = True
            self._show_ended(self._phases.end())
        self._figures.step(report)

    def evaluation(self, evaluation: Evaluation) -> None:
        """See `Display.evaluation`."""
        assert self._figures is not None, "start() comes before evaluation()"
        self._figures.evaluation(evaluation)
        self._print(_evaluation_line(evaluation, self._figures.read()))

    def sample(self, prompt: str, text: str) -> None:
        """See `Display.sample`."""
        for line in _sample_lines(prompt, text, self._console.width):
            self._print(line)

    def note(self, text: str) -> None:
        """See `Display.note`."""
        self._print(Text(f"  {visible(text)}", style="dim"))

    def stop(self, reason: str) -> None:
        """See `Display.stop`."""
        self._phases.end()
        frame = list(self._lines(ended=True))
        self.close()
        self._print(*frame)
        style = "bold green" if reason == "done" else "bold yellow"
        self._print(Text(f"  {_ENDS.get(reason, reason)}", style=style))

    def close(self) -> None:
        """See `Display.close`."""
        self._live.stop()

    def _open(self) -> None:
        if not self._live.is_started:
            self._live.start()

    def _print(self, *lines: Text) -> None:
        with contextlib.suppress(OSError):
            for line in lines:
                self._console.print(encodable(line, self._console.options))

    def _show_ended(self, phases: list[_Phase]) -> None:
        for phase in phases:
            line = Text(f"  {phase.name}", style="dim")
            self._print(line.append(f"  {format_duration(phase.seconds)}"))

    def _lines(self, *, ended: bool = False) -> Iterator[Text]:
        options = self._console.options
        width, ascii_only = options.max_width, options.ascii_only
        for phase in list(self._phases.open.values()):
            yield encodable(_phase_line(phase, width, ascii_only=ascii_only), options)
        if self._figures is not None:
            reading, elapsed = self._figures.read(), time.monotonic() - self._began
            if ended:
                reading = dataclasses.replace(reading, eta_seconds=math.nan)
            yield Text()
            yield from panel(reading, elapsed, width=width, ascii_only=ascii_only)


class PlainDisplay(Display):
    """Readable lines, few of them: for pipes, log files and CI.

    Args:
        console: where to write.
        every_seconds: least wall time between two lines about steps; the first step, the last one
            and every evaluation get theirs anyway.
    """

    def __init__(self, console: Console, *, every_seconds: float = 10.0) -> None:
        self._console, self._every = console, every_seconds
        self._phases = _Phases()
        self._figures: Figures | None = None
        self._began = self._spoke = time.monotonic()
        self._newest: StepReport | None = None
        self._shown_step = -1

    def phase(self, name: str, done: float, total: float | None) -> None:
        """See `Display.phase`."""
        new = name not in self._phases.open
        self._show_ended(self._phases.update(name, done, total))
        phase = self._phases.open.get(name)
        if phase is not None and (new or self._due()):
            share = f" {phase.share:.0%}" if phase.share else ""
            self._say(f"{name} …{share}")

    def start(
        self, title: str, facts: Mapping[str, str], *, total_steps: int, start_step: int = 0
    ) -> None:
        """See `Display.start`."""
        self._say(title)
        width = max((len(label) for label in facts), default=0)
        for label, text in facts.items():
            self._say(f"  {label:<{width}}  {text}")
        self._began = time.monotonic()
        self._figures = Figures(total_steps=total_steps, start_step=start_step)

    def step(self, report: StepReport) -> None:
        """See `Display.step`."""
        assert self._figures is not None, "start() comes before step()"
        first, self._newest = self._newest is None, report
        self._figures.step(report)
        if first:
            self._show_ended(self._phases.end())
        if first or self._due():
            self._say_step()

    def evaluation(self, evaluation: Evaluation) -> None:
        """See `Display.evaluation`."""
        assert self._figures is not None, "start() comes before evaluation()"
        self._figures.evaluation(evaluation)
        self._say_step()

    def sample(self, prompt: str, text: str) -> None:
        """See `Display.sample`."""
        for line in _sample_lines(prompt, text, _PLAIN_WIDTH):
            self._say(line.plain)

    def note(self, text: str) -> None:
        """See `Display.note`."""
        self._say(text)

    def stop(self, reason: str) -> None:
        """See `Display.stop`."""
        if self._newest is not None and self._newest.step != self._shown_step:
            self._say_step()
        self._say(_ENDS.get(reason, reason))

    def close(self) -> None:
        """See `Display.close`."""

    def _due(self) -> bool:
        return time.monotonic() - self._spoke >= self._every

    def _show_ended(self, phases: list[_Phase]) -> None:
        for phase in phases:
            self._say(f"{phase.name}: {format_duration(phase.seconds)}")

    def _say_step(self) -> None:
        assert self._figures is not None
        reading = self._figures.read()
        self._shown_step = reading.step
        self._say(_step_line(reading, time.monotonic() - self._began))

    def _say(self, text: str) -> None:
        self._spoke = time.monotonic()
        if self._console.quiet:
            return
        line = visible(text)
        line = ascii_text(line) if self._console.options.ascii_only else line
        with contextlib.suppress(OSError, ValueError):  # a closed pipe, a closed file
            self._console.file.write(line + "\n")
            self._console.file.flush()


def panel(
    reading: Reading, elapsed_seconds: float, *, width: int, ascii_only: bool = False
) -> Iterator[Text]:
    """The bar and the figures of a run, in lines of at most `width` columns.

    Args:
        reading: how the run stands.
        elapsed_seconds: time since it began.
        width: columns there are; from about 40 on everything has its place.
        ascii_only: whether the terminal shows nothing but ASCII.
    """
    yield _bar_line(reading, width, ascii_only=ascii_only)
    *rows, last = _rows(cells(reading, elapsed_seconds), max((width - 2) // _CELL, 1))
    for row in rows:
        line = _row(row, ascii_only=ascii_only)
        line.rstrip()
        yield line
    line = _row(last, ascii_only=ascii_only)
    free = width - 2 - sum(slots for *_, slots in last) * _CELL
    if free < _LEAST_CURVE and reading.losses:
        line.rstrip()
        yield line
        line, free = Text("  "), width - 3
    curve = sparkline(reading.losses, min(free, _MOST_CURVE), ascii_only=ascii_only)
    line.append(curve, style="cyan")
    line.rstrip()
    yield line


def _rows(figures: list[tuple[str, str]], columns: int) -> list[list[_Cell]]:
    """The figures set into rows of `columns` slots; the validation, with its change, takes two."""
    rows: list[list[_Cell]] = [[]]
    for label, text in figures:
        slots = min(2 if label == "validation" else 1, columns)
        if sum(taken for *_, taken in rows[-1]) + slots > columns:
            rows.append([])
        rows[-1].append((label, text, slots))
    return rows


def encodable(line: Text, options: ConsoleOptions) -> Text:
    """`line` as the terminal can show it: signs it has no letters for are replaced."""
    if options.ascii_only:
        line.plain = ascii_text(line.plain)
    return line


def _row(row: list[_Cell], *, ascii_only: bool) -> Text:
    line = Text("  ", no_wrap=True, overflow="crop")
    for label, text, slots in row:
        bad = text == "not finite"
        shown = ascii_text(text) if ascii_only else text
        line.append(f"{label} ", style="dim").append(shown, style="bold red" if bad else "bold")
        line.append(" " * max(slots * _CELL - len(label) - 1 - len(shown), 2))
    return line


def _bar_line(reading: Reading, width: int, *, ascii_only: bool) -> Text:
    total = reading.total_steps
    share = reading.step / total if total else None
    words = f"  step {reading.step:,}" + (f"/{total:,}" if total else "")
    if share is not None:
        words += f"  {share:.0%}"
    if math.isfinite(reading.eta_seconds):
        words += f"  ETA {countdown(reading.eta_seconds)}"
    bar = _bar(share or 0.0, max(width - len(words) - 3, 8), ascii_only=ascii_only)
    return Text("  ", no_wrap=True, overflow="crop").append(bar).append(words)


def _phase_line(phase: _Phase, width: int, *, ascii_only: bool) -> Text:
    name = shorten(phase.name, max(width // 2, 10))
    line = Text("  ", no_wrap=True, overflow="crop")
    if phase.share is None:
        signs = "-\\|/" if ascii_only else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
        line.append(f"{signs[int(phase.seconds * 4) % len(signs)]} ", style="cyan")
        count = f"  {format_count(phase.done)}" if phase.done > 1 else ""
        return line.append(f"{name}{count}  {format_duration(phase.seconds)}")
    words = f"  {phase.share:.0%}"
    if phase.share > 0.02:
        words += f"  ETA {countdown(phase.seconds * (1 - phase.share) / phase.share)}"
    line.append(f"{name}  ")
    room = min(width - len(name) - len(words) - 6, 60)
    return line.append(_bar(phase.share, max(room, 8), ascii_only=ascii_only)).append(words)


def _bar(share: float, width: int, *, ascii_only: bool) -> Text:
    full, half, empty = ("#", "#", "-") if ascii_only else ("━", "╸", "━")
    halves = round(min(max(share, 0.0), 1.0) * width * 2)
    done = full * (halves // 2) + (half if halves % 2 else "")
    return Text(done, style="cyan").append(empty * (width - len(done)), style="bright_black")


def _evaluation_line(evaluation: Evaluation, reading: Reading) -> Text:
    line = Text(f"  step {evaluation.step:<7,}", style="dim")
    line.append(f" validation {decimal(evaluation.bits_per_byte)} bits/byte", style="not dim bold")
    if math.isfinite(reading.change):
        better = reading.change < 0
        line.append(f" {signed(reading.change)}", style="not dim green" if better else "not dim")
    return line.append(f"  loss {decimal(evaluation.loss)}  training {decimal(reading.loss)}")


def _step_line(reading: Reading, elapsed_seconds: float) -> str:
    total = f"/{reading.total_steps:,}" if reading.total_steps else ""
    words = [f"step {reading.step:,}{total}"]
    words += [
        f"{label} {text}" for label, text in cells(reading, elapsed_seconds) if text != UNKNOWN
    ]
    if math.isfinite(reading.eta_seconds) and reading.eta_seconds > 0:
        words.append(f"ETA {countdown(reading.eta_seconds)}")
    return "  ".join(words)


def _sample_lines(prompt: str, text: str, width: int) -> Iterator[Text]:
    """A sample as a few lines of at most `width` columns behind a rule, the prompt in bold."""
    whole = Text(visible(prompt), style="not dim bold").append(visible(text), style="not bold")
    whole.expand_tabs(4)
    lines = whole.split("\n")
    for line in lines[:_SAMPLE_LINES]:
        line.truncate(max(width - 4, 10), overflow="ellipsis")
        yield Text("  │ ", style="dim").append_text(line)
    if len(lines) > _SAMPLE_LINES:
        yield Text(f"  │ … {len(lines) - _SAMPLE_LINES} more lines", style="dim")
