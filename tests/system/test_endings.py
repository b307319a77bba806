"""How a command ends: its exit code and its last words, whoever ends it and whoever reads them."""

import errno
import os
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest

from danlu import build, load
from danlu.base.events import JsonLines
from danlu.planner.plan import Plan
from running import TINY, danlu, events

INTERRUPTIBLE = (
    "import os, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "os.execv(sys.executable, [sys.executable, '-m', 'danlu', *sys.argv[1:]])\n"
)
"""Starts danlu where Ctrl-C may be ignored, as it is for what a shell runs in the background."""


def start(*words, cwd):
    return subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *words], cwd=cwd,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for(path, process):
    for _ in range(1200):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"{path} never came")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_says_which_command_goes_on(tmp_path, number):
    words = (*TINY, "train.steps=1000000", "name=two words", "train.evaluate_every=100000")
    process = start("train", *words, cwd=tmp_path)
    wait_for(tmp_path / "runs" / "two words" / "metrics.jsonl", process)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130, (out, errors)
    assert out.splitlines()[-1] == f"Go on: {shlex.join(['danlu', 'train', *words])}"
    assert "Try it" not in out
    assert events(tmp_path / "runs" / "two words", "stop")[0]["reason"] == "interrupted"


def test_a_run_that_is_stopped_before_its_first_step_says_it_too(tmp_path):
    words = (*TINY, "train.steps=1000000", "name=early", "train.evaluate_every=100000")
    process = start("train", *words, cwd=tmp_path)
    wait_for(tmp_path / "runs" / "early" / "data.json", process)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode in (130, 143), (out, errors)  # 143: before it listens to signals
    if process.returncode == 130:
        assert out.splitlines()[-1].startswith("Go on: danlu train ")


def importing_torch(process):
    """The ranks that a process has started, once they are all importing torch."""
    for _ in range(1200):
        ranks = psutil.Process(process.pid).children()
        if len(ranks) == 2 and all("libtorch" in str(rank.memory_maps()) for rank in ranks):
            return ranks
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("no ranks came")


def test_ranks_that_are_stopped_while_they_start_say_nothing_and_leave_nothing(tmp_path):
    words = (*TINY, "train.steps=1000000", "name=early", "data_parallel.degree=2")
    process = start("train", *words, cwd=tmp_path)
    importing_torch(process)
    os.killpg(process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches all of them
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    assert out.splitlines()[-1].startswith("Go on: danlu train ")
    assert not (tmp_path / "runs" / "early").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_is_stopped_before_training_says_one_line(tmp_path, number, code):
    (tmp_path / "text").mkdir()
    for index in range(400):
        (tmp_path / "text" / f"{index}.txt").write_text(f"{index} furnaces refine pills\n" * 20_000)
    process = start(
        "prepare", "data_pipeline.sources=[{type: files, path: text}]", "data_pipeline.folder=to",
        "data_pipeline.workers=2", "data_pipeline.shard_bytes=1M", cwd=tmp_path,
    )  # fmt: skip
    wait_for(tmp_path / "to" / "work", process)
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == code, errors
    assert errors == "interrupted; what is done is kept, the same command goes on\n"


def test_a_run_whose_reader_leaves_is_done_all_the_same(tmp_path):
    process = start("train", *TINY, "train.steps=4", "name=unheard", cwd=tmp_path)
    assert process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0, errors
    assert errors == ""
    assert events(tmp_path / "runs" / "unheard", "stop")[0]["reason"] == "done"


def test_a_command_that_only_prints_ends_well_when_its_reader_leaves(tmp_path):
    process = start("schema", cwd=tmp_path)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 0


def test_after_a_loss_that_is_not_finite_nothing_is_offered_to_try(tmp_path):
    words = (
        *TINY, "train.steps=40", "name=wild", "optimizer.learning_rate=1e30",
        "optimizer.gradient_clip=null", "schedule.warmup_steps=0", "precision.format=fp32",
    )  # fmt: skip
    done = danlu("train", *words, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "Report: runs/wild" in done.stdout
    assert "Try it" not in done.stdout


def test_what_is_offered_to_try_can_be_pasted_into_a_shell(tmp_path):
    out = danlu("train", *TINY, "train.steps=2", "name=two words", cwd=tmp_path).stdout
    line = out.strip().splitlines()[-1]
    assert line == "Try it: danlu generate 'runs/two words' --prompt 'def '"
    danlu(*shlex.split(line)[3:], "--device", "cpu", "--tokens", "4", cwd=tmp_path)


def test_a_home_that_cannot_be_written_costs_a_note(tmp_path):
    (tmp_path / "home").write_text("")
    words = (*TINY, "train.steps=2", "name=homeless", "data_pipeline.folder=shards")
    home = {"DANLU_HOME": str(tmp_path / "home")}
    done = danlu("train", *words, cwd=tmp_path, environment=home)
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("note: ")
    assert events(tmp_path / "runs" / "homeless", "stop")[0]["reason"] == "done"


def test_a_disk_that_is_full_for_events_and_the_plan_ends_no_run(tmp_path, monkeypatch):
    config = load(None, *TINY, "train.steps=2", f"folder={tmp_path / 'run'}")
    run = build(config)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JsonLines, "write", full)
    monkeypatch.setattr(Plan, "save", full)
    assert run.train() == "done"
