"""Worker processes that run a task over many items.

The processes are started anew (`python -c …`) and never forked, because the one that prepares a
corpus may hold threads and a GPU. `multiprocessing` would also import the user's main module in
each of them, and with it torch, and fail for scripts without an `if __name__ == "__main__"`; here a
worker imports what its task needs and no more. It ends by itself when the process that started it
is gone, so that `kill -9` leaves nothing running.
"""

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Self, TypeVar

from danlu.base.errors import DanluError, MachineError

__all__ = ["Progress", "Task", "Workers"]

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int], None]
"""Called with the amount of work done since the last call."""
Task = Callable[[Item, Progress], Result]

_SECONDS_TO_END = 5.0


class Workers:
    """Up to `count` processes, started when first needed and ended with the `with` block.

    Args:
        count: of processes; one is this process itself.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._pool:
            worker.process.terminate()
        for worker in self._pool:
            worker.end()

    def run(
        self, task: Task[Item, Result], items: Sequence[Item], *, progress: Progress
    ) -> list[Result]:
        """The task's result for each item, in their order.

        One worker, or one item, is work for this process. Otherwise `task`, items and results
        cross process boundaries: they must be picklable, and importable from installed modules.

        Args:
            task: called with an item and `progress`.
            items: what there is to do; given out in this order.
            progress: called in this process with the work done by any of them.

        Raises:
            MachineError: a worker died.
            Exception: whatever the task raised first; the workers can then only be ended.
        """
        if self.count <= 1 or len(items) <= 1:
            return [task(item, progress) for item in items]
        while len(self._pool) < min(self.count, len(items)):
            self._pool.append(_Worker())
        results: dict[int, Result] = {}
        waiting = iter(enumerate(items))
        busy: dict[object, _Worker] = {}
        for worker, (index, item) in zip(self._pool, waiting, strict=False):
            worker.send("task", task)
            worker.give(index, item)
            busy[worker.link] = worker
        while busy:
            for worker in [busy[link] for link in wait([worker.link for worker in busy.values()])]:
                kind, value = worker.receive()
                if kind == "progress":
                    progress(value)
                    continue
                if kind == "failed":
                    raise value
                results[worker.index] = value
                if (following := next(waiting, None)) is None:
                    del busy[worker.link]
                else:
                    worker.give(*following)
        return [results[index] for index in range(len(items))]


class _Worker:
    """One process and the link to it."""

    def __init__(self) -> None:
        self.link, theirs = multiprocessing.Pipe()
        self.index = -1
        code = f"from danlu.data.workers import serve; serve({theirs.fileno()}, {os.getpid()})"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            process_group=0,  # Ctrl-C reaches the parent alone, which ends its workers
            env=_environment(),
        )
        theirs.close()

    def give(self, index: int, item: object) -> None:
        self.index = index
        self.send("item", item)

    def send(self, kind: str, value: object) -> None:
        try:
            self.link.send((kind, value))
        except ConnectionError:
            raise self._death() from None

    def receive(self) -> tuple[str, Any]:
        try:
            return self.link.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionError):
            raise self._death() from None

    def _death(self) -> MachineError:
        code = self.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        memory = " Memory may have run out: use fewer data_pipeline.workers." if code == -9 else ""
        return MachineError(
            f"a process that prepares data ended ({how}).{memory} What is done is kept; run again."
        )

    def end(self) -> None:
        self.link.close()
        try:
            self.process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _environment() -> Mapping[str, str]:
    """The same modules as here, and one thread a worker: the processes are the parallelism."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, **one, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}


def serve(handle: int, parent: int) -> None:
    """The main function of a worker: tasks, and items for the latest, until the link is closed.

    Args:
        handle: file descriptor of the link.
        parent: process id of the one that started this worker; it ends when that is gone.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    link: Connection[Any, Any] = Connection(handle)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            kind, value = link.recv()
            if kind == "task":
                task = value
                continue
            try:
                answer = ("done", task(value, lambda amount: link.send(("progress", amount))))
            except Exception as error:
                answer = ("failed", _portable(error))
            link.send(answer)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _portable(error: Exception) -> Exception:
    """The error as it can be sent: with its traceback as a note, when it is a bug."""
    text = traceback.format_exc()
    if not isinstance(error, DanluError | OSError):
        error.add_note(f"In a worker process:\n{text}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"in a worker process:\n{text}")
    return error
