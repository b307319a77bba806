"""`danlu watch RUN`: a run seen from another terminal, or after it ended, from its files alone."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from danlu.base.units import format_bytes, format_count, format_duration
from danlu.monitor.curves import Curve, line_chart, sparkline
from danlu.monitor.figures import Figures, Reading
from danlu.monitor.history import Follower, History, Status
from danlu.monitor.live import encodable, panel
from danlu.monitor.summary import device_text, model_text
from danlu.monitor.words import describe_event, shorten, small

__all__ = ["watch"]

_POLL_SECONDS = 1.0
_RECENT = 400  # steps that the figures are made of; the charts show all
_TALL, _LOW = 5, 2  # lines of the loss's chart and of the others
_LEAST_EVENTS, _MOST_EVENTS = 3, 12
_WORDS = {
    "waiting": ("no step yet", "yellow"),
    "running": ("running", "green"),
    "done": ("finished", "bold green"),
    "interrupted": ("interrupted", "bold yellow"),
    "nan": ("stopped: the loss is not finite", "bold red"),
    "error": ("stopped by an error", "bold red"),
}


def watch(run_folder: str | Path, *, once: bool = False, console: Console | None = None) -> None:
    """Shows a run until it ends or Ctrl-C.

    Takes no lock and writes nothing; the run may be on another machine that shares the folder.

    Args:
        run_folder: the run's folder.
        once: print one frame and return; so does a console that is no terminal.
        console: where to draw; standard output when left out.

    Raises:
        UserError: there is no run in `run_folder`.
    """
    target = console or Console(highlight=False)
    follower = Follower(run_folder)
    follower.poll()
    if not once and target.is_interactive:
        try:
            _follow(follower, target)
        except KeyboardInterrupt:
            return
    target.print(_Frame(follower.history, height=None))


def _follow(follower: Follower, console: Console) -> None:
    """Draws until the run has ended; the last frame is left to the caller."""
    frame = _Frame(follower.history, height=console.height)
    with Live(frame, console=console, screen=True, auto_refresh=False) as live:
        while not follower.history.status().finished:
            live.update(_Frame(follower.history, height=console.height), refresh=True)
            time.sleep(_POLL_SECONDS)
            follower.poll()


class _Frame:
    """One picture of a run, in the width that the console has.

    Args:
        history: what is known of the run.
        height: lines there are; None for as many as wanted.
    """

    def __init__(self, history: History, *, height: int | None) -> None:
        self._history, self._height = history, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, ascii_only = options.max_width, options.ascii_only
        lines = list(_header(self._history, width))
        reading = _reading(self._history)
        lines += [
            Text(),
            *panel(reading, self._history.seconds, width=width, ascii_only=ascii_only),
        ]
        lines += _charts(self._history, width, ascii_only=ascii_only)
        room = _MOST_EVENTS
        if self._height is not None:
            room = max(min(self._height - len(lines) - 2, room), _LEAST_EVENTS)
        lines += _events(self._history, width, room)
        yield from (encodable(line, options) for line in lines)


def _header(history: History, width: int) -> Iterator[Text]:
    status = history.status()
    word, style = _WORDS.get(status.word, (status.word, "bold yellow"))
    line = Text(f"  {shorten(history.name, max(width - 30, 10))}", style="bold", no_wrap=True)
    yield line.append(f"   {_state(history, status, word)}", style=style)
    if status.message and status.word != "silent":
        yield Text(f"  {shorten(status.message, width - 4)}", style="red")
    for text in (model_text(history), device_text(history), str(history.folder)):
        if text:
            yield Text(f"  {shorten(text, width - 4)}", style="dim", no_wrap=True)


def _state(history: History, status: Status, word: str) -> str:
    ago = time.time() - history.heard
    heard = f" for {format_duration(max(ago, 0.0))}" if math.isfinite(ago) else ""
    if status.word == "silent":
        return f"silent{heard}: hanging, or killed?"
    return word


def _reading(history: History) -> Reading:
    """The figures as the run's own display would show them now."""
    steps = history.column("step")
    start = max(len(steps) - _RECENT, 0)
    figures = Figures(
        total_steps=history.total_steps, start_step=int(steps[0]) - 1 if len(steps) else 0
    )
    for report in history.reports(start):
        figures.step(report)
    for evaluation in history.evaluations:
        figures.evaluation(evaluation)
    reading = dataclasses.replace(figures.read(), losses=())  # the chart below shows it larger
    ended = history.status().finished
    return dataclasses.replace(reading, eta_seconds=math.nan) if ended else reading


def _charts(history: History, width: int, *, ascii_only: bool) -> list[Text]:
    """Loss, large, and throughput and memory beside each other where there is room."""
    if len(history) < 2:
        return []
    loss = _settled(history.column("loss"))
    speed, memory = history.column("tokens_per_second"), history.column("memory_bytes")
    first = history.first_of_life
    if (~first).any():
        speed = speed[~first]
    lines = [Text(), *_chart("loss", loss, width - 4, small, ascii_only=ascii_only)]
    half = (width - 8) // 2
    left = _chart("tokens/s", speed, half, format_count, ascii_only=ascii_only)
    right = _chart("memory", memory, half, format_bytes, ascii_only=ascii_only)
    for one, other in zip(left, right, strict=True):
        one.pad_right(half + 4 - one.cell_len)
        lines.append(one.append_text(other))
    return lines


def _settled(loss: Curve) -> Curve:
    """The loss without its first fall, which would leave a flat line of the rest."""
    return loss[len(loss) // 50 :]


def _chart(
    label: str, values: Curve, width: int, form: Callable[[float], str], *, ascii_only: bool
) -> list[Text]:
    finite, height = values[np.isfinite(values)], _TALL if label == "loss" else _LOW
    title = Text(f"  {label}", style="dim", no_wrap=True)
    if not len(finite):
        return [title, *[Text("  ")] * (1 if ascii_only else height)]
    title.append(f"  {form(float(finite.min()))} … {form(float(finite.max()))}")
    if ascii_only:
        return [title, Text("  " + sparkline(finite, width, ascii_only=True))]
    drawn = line_chart(finite, width, height, from_zero=label != "loss")
    return [title, *[Text(f"  {line}", style="cyan", no_wrap=True) for line in drawn]]


def _events(history: History, width: int, room: int) -> Iterator[Text]:
    if history.events:
        yield Text()
    for event in history.events[-room:]:
        when, step = event.get("time"), event.get("step")
        line = Text(f"  {_clock(when)}", style="dim", no_wrap=True, overflow="crop")
        line.append(f"  {shorten(str(event.get('kind') or '?'), 12):<12}", style="not dim bold")
        line.append(f" {step:>8,}  " if isinstance(step, int) else " " * 11)
        yield line.append(shorten(describe_event(event), max(width - 37, 10)), style="not dim")


def _clock(when: object) -> str:
    try:
        return datetime.fromtimestamp(float(when)).strftime("%H:%M:%S")  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, OSError):
        return "        "
