"""Metrics on their way to the sinks, out of training's sight.

Each sink has a queue and a thread of its own. Handing over a record costs the training loop a few
microseconds whatever a sink does: one that is slow falls behind alone, one that raises is switched
off, and the run goes on.
"""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from danlu.base.errors import UserError
from danlu.base.events import JsonLines
from danlu.base.facts import Evaluation, StepReport
from danlu.monitor.sinks._base import SINKS, Sink

__all__ = ["Recorder"]


class Recorder:
    """Feeds records to all sinks of a run. Used by one thread of one rank.

    Args:
        folder: the run's folder.
        sinks: names of sinks (`monitor.sinks`), or sinks of one's own, not opened yet.
        events: the run's event log; a sink that fails or falls behind is told there.
        capacity: records that may wait for one sink; beyond, new ones are left out for it, counted.

    Raises:
        ConfigError: a sink that does not exist, or that needs a package which is not installed.
    """

    def __init__(
        self,
        folder: Path,
        sinks: Sequence[str | Sink],
        *,
        events: JsonLines,
        capacity: int = 10_000,
    ) -> None:
        self._events = events
        self._feeds: list[_Feed] = []
        try:
            for sink in sinks:
                self._add(sink, folder, capacity)
        except BaseException:
            self.close()
            raise

    def step(self, report: StepReport) -> None:
        """Records one optimizer step as `{"kind": "step", "time": …, …}`."""
        self.write(report.to_dict() | {"kind": "step"})

    def evaluation(self, evaluation: Evaluation) -> None:
        """Records one evaluation as `{"kind": "evaluation", "time": …, …}`."""
        self.write(dataclasses.asdict(evaluation) | {"kind": "evaluation"})

    def write(self, record: Mapping[str, Any]) -> None:
        """Hands a record to every sink and returns at once; `time` is added when it is missing."""
        stamped = {"kind": record.get("kind"), "time": round(time.time(), 3), **record}
        for feed in self._feeds:
            feed.put(stamped)
            self._tell(feed)

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Waits until every sink has written what it was handed, and closes it.

        Args:
            timeout_seconds: longest wait for each sink; one that hangs is then left behind.
        """
        for feed in self._feeds:
            feed.finish()
        for feed in self._feeds:
            feed.join(timeout_seconds)
            self._tell(feed)
        self._feeds.clear()

    def _add(self, sink: str | Sink, folder: Path, capacity: int) -> None:
        name = sink if isinstance(sink, str) else type(sink).__name__
        part = SINKS.find(sink)() if isinstance(sink, str) else sink
        feed = _Feed(name, part, capacity)
        try:
            part.open(folder)
        except UserError:
            raise
        except Exception as error:
            feed.fail(error)
        self._feeds.append(feed)
        feed.start()
        self._tell(feed)

    def _tell(self, feed: "_Feed") -> None:
        """Events are written by the caller's thread: the log is not shared with the sinks'."""
        with contextlib.suppress(OSError):  # a full disk must not end the run from in here
            for event in feed.news():
                self._events.write(**event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Feed:
    """One sink with its queue and its thread."""

    def __init__(self, name: str, sink: Sink, capacity: int) -> None:
        self._name, self._sink, self._capacity = name, sink, capacity
        # Unbounded inside, so that the end mark always fits; `put` keeps the bound.
        self._queue: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._failure: str | None = None
        self._lost = 0
        self._news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def start(self) -> None:
        if self._failure is None:
            self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        if self._failure is not None:
            return
        if self._queue.qsize() < self._capacity:
            self._queue.put(record)
            return
        self._lost += 1
        if self._lost == 1:
            text = f"sink {self._name} is {self._capacity:,} records behind; it misses new ones."
            self._news.put({"kind": "warning", "text": text})

    def finish(self) -> None:
        self._queue.put(None)

    def join(self, timeout_seconds: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._lost += self._queue.qsize()
            self.fail(TimeoutError(f"did not finish within {timeout_seconds:g} s"))
        if self._lost:
            text = f"sink {self._name} missed {self._lost:,} records."
            self._news.put({"kind": "warning", "text": text})

    def fail(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        self._news.put({"kind": "sink_failed", "sink": self._name, "reason": self._failure})

    def news(self) -> list[dict[str, Any]]:
        """What happened since the last call, as events."""
        return [self._news.get() for _ in range(self._news.qsize())]

    def _run(self) -> None:
        try:
            while (record := self._queue.get()) is not None:
                self._sink.write(record)
            self._sink.close()
        except Exception as error:
            self.fail(error)
            with contextlib.suppress(Exception):
                self._sink.close()
