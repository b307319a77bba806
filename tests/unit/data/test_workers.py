import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import psutil
import pytest

from danlu.base.errors import DataError, MachineError
from danlu.data.workers import Workers

TASKS = '''
"""Tasks for workers, which must be able to import them."""
import os, signal, sys
from danlu.base.errors import DataError

def double(item, progress):
    progress(item)
    return 2 * item

def refuse(item, progress):
    raise DataError("a", "b.", "c.")

def fill(item, progress):
    raise OSError(28, "No space left on device", "x")

def divide(item, progress):
    return item / 0

def die(item, progress):
    os.kill(os.getpid(), signal.SIGKILL)

def process(item, progress):
    return os.getpid()

def modules(item, progress):
    return sorted(sys.modules)
'''


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "danlu_test_tasks.py").write_text(TASKS)
    sys.path.append(str(folder))
    import danlu_test_tasks

    yield danlu_test_tasks
    sys.path.remove(str(folder))


def run(task: Callable, items: list[int], workers: int = 2) -> tuple[list, list[int]]:
    """The results, and the progress that was reported."""
    seen: list[int] = []
    with Workers(workers) as pool:
        return pool.run(task, items, progress=seen.append), seen


def test_results_come_in_the_order_of_the_items_and_progress_arrives_here(tasks):
    results, seen = run(tasks.double, list(range(20)))
    assert results == [2 * item for item in range(20)]
    assert sorted(seen) == list(range(20))


def test_one_worker_or_one_item_is_done_here():
    def unknown_to_workers(item, progress):
        progress(1)
        return -item

    assert run(unknown_to_workers, [1, 2], workers=1) == ([-1, -2], [1, 1])
    assert run(unknown_to_workers, [3], workers=8) == ([-3], [1])
    assert run(unknown_to_workers, [], workers=8) == ([], [])


def test_the_same_processes_run_one_task_after_another(tasks):
    with Workers(2) as pool:
        first = pool.run(tasks.process, [1, 2, 3], progress=print)
        assert pool.run(tasks.double, [4, 5], progress=[].append) == [8, 10]
        second = pool.run(tasks.process, [1, 2, 3], progress=print)
    assert len(set(first) | set(second)) <= 2


def test_a_users_error_crosses_whole(tasks):
    with pytest.raises(DataError, match=r"a: b\. c\.") as caught:
        run(tasks.refuse, [1, 2, 3])
    assert (caught.value.where, caught.value.fix) == ("a", "c.")


def test_a_full_disk_in_a_worker_is_the_same_error_here(tasks):
    with pytest.raises(OSError, match="No space left") as caught:
        run(tasks.fill, [1, 2, 3])
    assert caught.value.errno == 28


def test_a_bug_in_a_worker_keeps_its_traceback(tasks):
    with pytest.raises(ZeroDivisionError) as caught:
        run(tasks.divide, [1, 2, 3])
    assert "In a worker process" in caught.value.__notes__[0]


def test_a_worker_that_dies_is_an_error_that_says_so(tasks):
    with pytest.raises(MachineError, match=r"signal 9.*fewer data_pipeline\.workers"):
        run(tasks.die, [1, 2, 3])


def test_workers_import_neither_torch_nor_the_users_main_module(tasks):
    for loaded in run(tasks.modules, [1, 2])[0]:
        assert "torch" not in loaded
        assert "pytest" not in loaded


def test_no_worker_outlives_a_process_that_was_killed():
    script = """
    import sys, time
    from danlu.data.workers import _Worker
    pool = [_Worker() for _ in range(2)]
    print(*(worker.process.pid for worker in pool), flush=True)
    time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        workers = [psutil.Process(int(word)) for word in process.stdout.readline().split()]
        process.send_signal(signal.SIGKILL)
    limit = time.monotonic() + 10
    while any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers):
        assert time.monotonic() < limit, "a worker is still there"
        time.sleep(0.05)
