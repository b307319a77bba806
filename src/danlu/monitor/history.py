"""A run as its folder tells it: read once for the report, or followed while it goes on.

The files are taken as they are found: a run may still be going, may have been killed in the middle
of a line, or may have been resumed and have repeated steps. Where two lines speak of the same step
the later one is true, and what an earlier life did beyond the point of a resume never happened.
"""

import contextlib
import json
import math
import operator
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from danlu.base.errors import UserError, closest
from danlu.base.facts import Evaluation, StepReport
from danlu.monitor.curves import Curve

__all__ = ["Follower", "History", "Sample", "Status", "find_run", "read_history"]

FILES = ("config.yaml", "plan.json", "metrics.jsonl", "events.jsonl")
_STEP_FIELDS = (
    "step", "time", "tokens", "loss", "gradient_norm", "learning_rate", "seconds",
    "tokens_per_second", "mfu", "memory_bytes", "data_seconds",
)  # fmt: skip
_WIDTH = len(_STEP_FIELDS)
_STEP_ROW = operator.itemgetter(*_STEP_FIELDS)
_NOT_NUMBERS = frozenset({*_STEP_FIELDS, "kind", "rank"})
_PIECE = 1 << 16  # bytes read and parsed at once; larger ones leave the cache and are slower
_BEYOND = 1e100  # nothing measured is as large; arithmetic with such numbers would overflow
_MOST_EXTRAS = 200  # columns; a broken file must not make one for each line


@dataclass(frozen=True, slots=True)
class Sample:
    """What the model wrote after `step` steps when given `prompt`; `text` is the continuation."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Status:
    """How a run stands.

    Attributes:
        word: `waiting` (no step yet), `running`, `silent` (it should have said something by now),
            or why it stopped: `done`, `interrupted`, `nan`, `error`.
        message: the reason in words, may be empty.
    """

    word: str
    message: str = ""

    @property
    def finished(self) -> bool:
        """Whether the run has said that it stopped."""
        return self.word not in ("waiting", "running", "silent")


class History:
    """Everything a run's files say, fed record by record (events before the metrics they precede).

    Attributes:
        folder: the run's folder.
        config_text: `config.yaml` as it stands there.
        plan: `plan.json`; empty when there is none.
        evaluations: in order of steps.
        events: all but samples, in order of time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config_text = ""
        self.plan: Mapping[str, Any] = {}
        self.evaluations: list[Evaluation] = []
        self.events: list[dict[str, Any]] = []
        self._samples: dict[tuple[int, str], Sample] = {}
        self._table = array("d")  # row by row, since that is how it comes
        self._extras: dict[str, array[float]] = {}
        self._lives = _Lives()
        self._config: Any = None

    def __len__(self) -> int:
        return len(self._table) // _WIDTH

    def column(self, name: str) -> Curve:
        """One number of each recorded step (`loss`, `seconds` …); NaN where it is missing."""
        if name in _STEP_FIELDS and self._table:
            # Seen in place, since a long run's table is large; only the column is copied.
            table = np.frombuffer(self._table, dtype=np.float64).reshape(-1, _WIDTH)
            values = table[:, _STEP_FIELDS.index(name)].copy()
        else:
            values = np.array(self._extras.get(name, [math.nan] * len(self)))
        values[~(np.abs(values) < _BEYOND)] = np.nan
        return values

    def planned_parts(self, *path: str) -> dict[str, float]:
        """The named numbers at a path in `plan.json` (bytes or seconds by part), those above 0."""
        parts = self.planned(*path)
        numbers = {n: _number(v) for n, v in parts.items()} if isinstance(parts, Mapping) else {}
        return {name: value for name, value in numbers.items() if 0 < value < math.inf}

    def reports(self, start: int = 0) -> Iterator[StepReport]:
        """The recorded steps from index `start` on, as training reported them."""
        for i in range(start, len(self)):
            row = self._table[i * _WIDTH : (i + 1) * _WIDTH]
            number = dict(zip(_STEP_FIELDS, row, strict=True))
            known = math.isfinite(number["mfu"])
            yield StepReport(
                step=int(number["step"]),
                tokens=_whole(number["tokens"]),
                loss=number["loss"],
                gradient_norm=number["gradient_norm"],
                learning_rate=number["learning_rate"],
                seconds=number["seconds"],
                tokens_per_second=number["tokens_per_second"],
                mfu=number["mfu"] if known else None,
                memory_bytes=_whole(number["memory_bytes"]),
                data_seconds=number["data_seconds"],
            )

    def extras(self) -> list[str]:
        """Names of the recorded numbers beyond those of every `StepReport`."""
        return list(self._extras)

    @property
    def name(self) -> str:
        """The run's name: from its config, else the folder's."""
        return str(self.config("name") or self.folder.resolve().name)

    def config(self, key: str) -> Any:
        """The value of a dotted key in `config.yaml`; None when it is not there."""
        return _descend(self._config, key.split("."))

    def planned(self, *path: str) -> Any:
        """The value at a path in `plan.json`, as in `planned("predicted", "mfu")`, or None."""
        return _descend(self.plan, path)

    def planned_number(self, *path: str) -> float:
        """Like `planned`, as a number; NaN when it is absent or is none."""
        return _number(self.planned(*path))

    @property
    def first_of_life(self) -> npt.NDArray[np.bool_]:
        """Which recorded steps are the first since the process (re)started: they hold warm-up."""
        lives = self._lives.numbers(self.column("time"))
        return np.concatenate([[True], lives[1:] != lives[:-1]])[: len(lives)]

    @property
    def seconds(self) -> float:
        """Wall time in which a process of the run was alive, all lives together."""
        return self._lives.seconds

    @property
    def started(self) -> float:
        """When the run began (Unix seconds); NaN when it did not."""
        return self._lives.began[0] if self._lives.began else math.nan

    def seconds_until(self, event: Mapping[str, Any]) -> float:
        """When an event was, in seconds since the run began; NaN when it does not say."""
        return _number(event.get("time")) - self.started

    @property
    def heard(self) -> float:
        """When the run was last heard of (Unix seconds); NaN when never."""
        return self._lives.heard[-1] if self._lives.heard else math.nan

    @property
    def samples(self) -> list[Sample]:
        """What the model wrote, in order of time; one for each step and prompt."""
        return list(self._samples.values())

    @property
    def total_steps(self) -> int | None:
        """Steps that the plan wants."""
        steps = self.planned_number("steps")
        return int(steps) if 0 < steps < 2**53 else None

    def tokens_until(self) -> Curve:
        """Tokens seen up to each recorded step: steps times the plan's batch.

        Without a plan, the sum of the lines: each counts the tokens since the line before it.
        """
        batch = self.planned_number("batch_tokens")
        if math.isfinite(batch):
            return self.column("step") * batch
        return np.cumsum(np.nan_to_num(self.column("tokens")))

    def status(self, now: float | None = None) -> Status:
        """How the run stands at `now` (Unix seconds; the present when left out)."""
        for event in reversed(self.events):
            if event.get("kind") == "stop":
                return Status(_word(event.get("reason")), str(event.get("message") or ""))
            if event.get("kind") in ("start", "resume") and not self._at_the_end(event):
                break
        moment = time.time() if now is None else now
        if moment - self.heard > self.patience_seconds:
            return Status("silent", "it says nothing any more and did not say that it stopped")
        return Status("running" if len(self) else "waiting")

    def _at_the_end(self, event: Mapping[str, Any]) -> bool:
        """Whether a process started where nothing was left to do (it then says no more)."""
        return self.total_steps is not None and _number(event.get("step")) >= self.total_steps

    @property
    def patience_seconds(self) -> float:
        """Silence after which something is probably wrong: ten steps, at least two minutes."""
        recent = self.column("seconds")[-50:]
        recent = recent[np.isfinite(recent)]
        return max(120.0, 10 * float(np.median(recent))) if len(recent) else 600.0

    def add_event(self, record: Mapping[str, Any]) -> None:
        """Takes one line of `events.jsonl`."""
        kind, when = record.get("kind"), _number(record.get("time"))
        if kind in ("start", "resume"):
            self._lives.begin(when)
        self._lives.hear(when)
        if kind == "resume":
            step = _number(record.get("from", record.get("step")))
            if math.isfinite(step):
                self._samples = {k: s for k, s in self._samples.items() if s.step <= step}
        if kind == "sample":
            self._add_sample(record)
        else:
            self.events.append(dict(record))

    def add_metric(self, record: Mapping[str, Any]) -> None:
        """Takes one line of `metrics.jsonl`."""
        step = _number(record.get("step"))
        if not (0 <= step < 2**53) or record.get("rank"):
            return
        when = _number(record.get("time"))
        if record.get("kind") == "step":
            if not self._lives.began:
                self._lives.begin(when - max(0.0, _number(record.get("seconds"))))
            self._add_step(step, record)
        elif record.get("kind") == "evaluation":
            self._add_evaluation(int(step), record)
        self._lives.hear(when)

    def _add_step(self, step: float, record: Mapping[str, Any]) -> None:
        if self._table and step <= self._table[-_WIDTH]:
            self._forget_from(step)
        end = len(self._table)
        try:
            self._table.extend(_STEP_ROW(record))  # nearly all lines: eleven numbers at one go
        except (KeyError, TypeError, OverflowError):
            del self._table[end:]
            self._table.extend(_number(record.get(name)) for name in _STEP_FIELDS)
        if self._extras or not record.keys() <= _NOT_NUMBERS:
            self._add_extras(record)

    def _add_extras(self, record: Mapping[str, Any]) -> None:
        before = len(self) - 1
        for name in record.keys() - _NOT_NUMBERS - self._extras.keys():
            if len(self._extras) < _MOST_EXTRAS and isinstance(record[name], int | float):
                self._extras[name] = array("d", [math.nan]) * before
        for name, column in self._extras.items():
            column.append(_number(record.get(name)))

    def _forget_from(self, step: float) -> None:
        keep = bisect_left(range(len(self)), step, key=lambda i: self._table[i * _WIDTH])
        del self._table[keep * _WIDTH :]
        for column in self._extras.values():
            del column[keep:]
        self._forget_evaluations_from(step)

    def _forget_evaluations_from(self, step: float) -> None:
        while self.evaluations and self.evaluations[-1].step >= step:
            self.evaluations.pop()

    def _add_evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        numbers = {k: _number(record.get(k)) for k in ("loss", "bits_per_byte", "seconds")}
        tokens = _number(record.get("tokens"))
        self._forget_evaluations_from(step)
        self.evaluations.append(Evaluation(step=step, tokens=_whole(tokens), **numbers))

    def _add_sample(self, record: Mapping[str, Any]) -> None:
        step = _number(record.get("step"))
        prompt, text = str(record.get("prompt") or ""), str(record.get("text") or "")
        whole = _whole(step)
        self._samples.pop((whole, prompt), None)  # a repeated one moves to the end
        self._samples[whole, prompt] = Sample(whole, prompt, text.removeprefix(prompt))

    def read(
        self, events: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]]
    ) -> None:
        """Takes lines of both files; events first, since they say where a life begins."""
        for record in events:
            self.add_event(record)
        for record in metrics:
            self.add_metric(record)

    def read_settings(self) -> None:
        """Takes in `config.yaml` and `plan.json`; broken ones count as empty."""
        text = _text(self.folder / "config.yaml")
        if text != self.config_text:
            self.config_text = text
            with contextlib.suppress(yaml.YAMLError, RecursionError):
                self._config = yaml.safe_load(text)
        self.plan = _parse(_text(self.folder / "plan.json")) or {}


class _Lives:
    """The stretches of time in which a process of the run was alive: one, or one a resume."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.heard: list[float] = []

    def begin(self, when: float) -> None:
        if math.isfinite(when):
            self.began.append(max(when, self.began[-1]) if self.began else when)
            self.heard.append(self.began[-1])

    def hear(self, when: float) -> None:
        if self.began and math.isfinite(when):
            life = max(bisect_right(self.began, when) - 1, 0)
            self.heard[life] = max(self.heard[life], when)

    def numbers(self, times: Curve) -> npt.NDArray[np.intp]:
        """Which life each of the moments falls into."""
        return np.searchsorted(np.array(self.began), times, side="right")

    @property
    def seconds(self) -> float:
        return sum(last - first for first, last in zip(self.began, self.heard, strict=True))


def _descend(tree: Any, path: Iterable[str]) -> Any:
    for part in path:
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _number(value: Any) -> float:
    """A JSON value as a number; NaN for what is none, or is beyond anything measured."""
    if type(value) in (int, float) and -_BEYOND < value < _BEYOND:
        return float(value)
    return math.nan


def _whole(value: float) -> int:
    return int(value) if math.isfinite(value) else 0


def _word(reason: Any) -> str:
    return str(reason) if reason else "done"


def find_run(folder: str | Path) -> Path:
    """The folder, when a run lives there.

    Raises:
        UserError: it does not exist or holds none of a run's files.
    """
    path = Path(folder)
    if _is_run(path):
        return path
    if inside := _runs_in(path):
        raise UserError(str(path), "this folder holds runs, it is not one.", closest("", inside))
    problem = "there is no run in this folder." if path.is_dir() else "there is no such folder."
    near = _runs_in(path.parent) or _runs_in(Path("runs"))
    raise UserError(str(path), problem, closest(str(path), near) or "Check the path.")


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in FILES)


def _runs_in(folder: Path) -> list[str]:
    """The newest few runs right below `folder`."""
    below = folder.iterdir() if folder.is_dir() else ()
    runs = [p for p in below if p.is_dir() and _is_run(p)]
    return [str(p) for p in sorted(runs, key=lambda p: p.stat().st_mtime)[-8:]]


def read_history(folder: str | Path) -> History:
    """Reads all of a run's files.

    Raises:
        UserError: there is no run in `folder`.
    """
    history = History(find_run(folder))
    history.read_settings()
    history.read(_Tail(history.folder / "events.jsonl"), _Tail(history.folder / "metrics.jsonl"))
    return history


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _parse(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Follower:
    """A history that grows with its run: reads what other processes append, and takes no lock.

    Args:
        folder: the run's folder.

    Raises:
        UserError: there is no run in `folder`.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = find_run(folder)
        self._start_over()

    def _start_over(self) -> None:
        self.history = History(self._folder)
        self._events = _Tail(self._folder / "events.jsonl")
        self._metrics = _Tail(self._folder / "metrics.jsonl")

    def poll(self) -> bool:
        """Takes in what was appended since the last call; whether there was anything."""
        if self._events.shrank() or self._metrics.shrank():
            self._start_over()  # the folder was emptied and used again
        self.history.read_settings()
        before = self._events.offset, self._metrics.offset
        self.history.read(self._events, self._metrics)
        return before != (self._events.offset, self._metrics.offset)


class _Tail:
    """A JSON-lines file; iterating gives what was appended since the last time.

    Half a line waits for its end; lines that are no objects are passed over.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.offset = path, 0

    def shrank(self) -> bool:
        """Whether the file holds less than was read: it was emptied."""
        return self._size() < self.offset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._size() == self.offset:
            return
        with open(self._path, "rb") as file:
            file.seek(self.offset)
            rest = b""
            while piece := file.read(_PIECE):
                lines, _, rest = (rest + piece).rpartition(b"\n")
                self.offset = file.tell() - len(rest)
                yield from _objects(lines.decode("utf-8", errors="replace"))

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


def _objects(lines: str) -> Iterator[dict[str, Any]]:
    """The objects of whole lines: parsed at one go, which is faster, unless one is broken."""
    try:
        values = json.loads("[" + lines.strip().replace("\n", ",") + "]")
    except (ValueError, RecursionError):
        for line in lines.split("\n"):
            if (value := _parse(line)) is not None:
                yield value
        return
    for value in values:
        if isinstance(value, dict):
            yield value
