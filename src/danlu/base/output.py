"""Standard output whose reader may leave, and whose encoding may lack a character.

`danlu train … | head -1` closes the pipe while the run goes on. Python then raises at the next line
that is printed, wherever that is; a run must not end by it, and a command that only prints has
nothing left to do.
"""

import contextlib
import io
import os
import sys
from typing import NoReturn, TextIO

__all__ = ["guard_output", "leave"]


def guard_output(*, outlive_reader: bool) -> None:
    """Replaces `sys.stdout` and `sys.stderr` by ones that take no harm.

    A character that the encoding cannot show is written as `?`.

    Args:
        outlive_reader: whether the program goes on, unheard, when the reader of a pipe has left;
            else its next line ends it with exit code 0.
    """
    sys.stdout = _guarded(sys.stdout, outlive_reader=outlive_reader)
    sys.stderr = _guarded(sys.stderr, outlive_reader=True)


def leave(code: int) -> NoReturn:
    """Ends a process that has done its work and closed what it opened, at once.

    A thread of a process group that lets go of a tensor while Python shuts down ends the process
    with an abort (seen once in some two hundred ends, torch 2.13): Python does not shut down here.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _guarded(stream: TextIO | None, *, outlive_reader: bool) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # none at all, or a test's
        return stream  # type: ignore[return-value]
    try:
        stream.flush()
        raw = _Pipe(stream.fileno(), outlive_reader=outlive_reader)
    except (OSError, ValueError):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(raw),  # type: ignore[type-var]
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering or stream.write_through,
    )


class _Pipe(io.FileIO):
    """A file descriptor that is written to as long as somebody reads."""

    def __init__(self, descriptor: int, *, outlive_reader: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._outlive_reader, self._left = outlive_reader, False

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Writes, or drops, `data`; returns its length in bytes.

        Raises:
            SystemExit: with code 0, when the reader has left and the program is not to outlive it.
        """
        if not self._left:
            try:
                return super().write(data)
            except BrokenPipeError:
                self._left = True
                _point_to_nothing(self.fileno())  # for what others write there, e.g. a library
                if not self._outlive_reader:
                    raise SystemExit(0) from None
        return len(data)


def _point_to_nothing(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)
