"""Requests that reach a run from outside, taken up between steps."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

__all__ = ["StopRequest"]


class StopRequest:
    """Turns Ctrl-C and a scheduler's SIGTERM into a wish to stop after the step.

    A second Ctrl-C ends the process at once. Used in the main thread; elsewhere it does nothing,
    because Python delivers signals to the main thread only.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.wanted = True
