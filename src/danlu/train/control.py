"""Requests that reach a run from outside, taken up between steps."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Self

__all__ = ["StopRequest"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Turns Ctrl-C, a scheduler's SIGTERM and a closed terminal into a wish to stop after the step.

    A second Ctrl-C ends the process at once, except while `saving`. Used in the main thread;
    elsewhere it does nothing, because Python delivers signals to the main thread only.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._saving = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While a checkpoint is written, further signals wait for its end."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.wanted and number == signal.SIGINT and not self._saving:
            raise KeyboardInterrupt
        self.wanted = True
