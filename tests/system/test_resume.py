"""A run that was stopped, anywhere and anyhow, goes on as if nothing had happened."""

import signal
import subprocess
import sys
import time

import pytest

from running import TINY, danlu, events, losses

STEPS = 24
WORDS = (*TINY, f"train.steps={STEPS}", "train.evaluate_every=8", "checkpoint.every=6")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    danlu("train", *WORDS, "name=whole", cwd=folder)
    return folder


def start(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "danlu", "train", *WORDS, *words],
        cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for_step(folder, name, step, process):
    path = folder / "runs" / name / "metrics.jsonl"
    for _ in range(1200):
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    raise AssertionError("the step never came")


def test_a_run_is_the_same_bits_every_time(whole):
    danlu("train", *WORDS, "name=again", cwd=whole)
    assert losses(whole / "runs" / "again") == losses(whole / "runs" / "whole")


def test_ctrl_c_writes_a_checkpoint_and_the_same_command_goes_on_bit_identically(whole):
    process = start(whole, "name=stopped", "train.evaluate_every=1")
    wait_for_step(whole, "stopped", 3, process)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "the same command goes on" in output
    done = len(losses(whole / "runs" / "stopped"))
    assert 3 <= done < STEPS
    assert events(whole / "runs" / "stopped", "checkpoint")[-1]["step"] == done
    danlu("train", *WORDS, "name=stopped", cwd=whole)
    assert losses(whole / "runs" / "stopped") == losses(whole / "runs" / "whole")
    assert events(whole / "runs" / "stopped", "resume")[0]["step"] == done


def test_kill_9_loses_only_the_steps_after_the_newest_checkpoint(whole):
    process = start(whole, "name=killed", "train.evaluate_every=1")
    wait_for_step(whole, "killed", 9, process)
    process.kill()
    process.communicate(timeout=60)
    danlu("train", *WORDS, "name=killed", cwd=whole)
    assert losses(whole / "runs" / "killed") == losses(whole / "runs" / "whole")
    assert events(whole / "runs" / "killed", "resume")[0]["step"] in (6, 12, 18)


def test_a_broken_checkpoint_is_passed_over_aloud(whole):
    danlu("train", *WORDS, "name=broken", "train.steps=14", cwd=whole)
    newest = sorted((whole / "runs" / "broken" / "checkpoints").iterdir())[-1]
    shard = next(newest.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1  # one flipped bit
    shard.write_bytes(data)
    done = danlu("train", *WORDS, "name=broken", "train.steps=14", cwd=whole)
    assert "is not used" in done.stdout
    assert "has a wrong checksum" in done.stdout
    assert events(whole / "runs" / "broken", "resume")[-1]["step"] == 12


def test_other_ranks_go_on_where_one_process_stopped(whole):
    """Same samples, none twice, none lost: the loss curve is that of the whole run."""
    words = (*WORDS, "precision.format=fp32")
    danlu("train", *words, "name=fp32", cwd=whole)
    process = subprocess.Popen(
        [sys.executable, "-m", "danlu", "train", *words, "name=shared", "train.evaluate_every=1"],
        cwd=whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for_step(whole, "shared", 4, process)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    danlu("train", *words, "name=shared", "data_parallel.degree=2", cwd=whole)
    alone, shared = losses(whole / "runs" / "fp32"), losses(whole / "runs" / "shared")
    assert list(shared) == list(range(1, STEPS + 1))
    assert shared == pytest.approx(alone, rel=1e-5)
    assert events(whole / "runs" / "shared", "resume")[0]["world"] == 2


def test_a_finished_run_says_so_and_can_be_prolonged(whole):
    danlu("train", *WORDS, "name=short", "train.steps=4", "schedule.type=constant", cwd=whole)
    words = (*WORDS, "name=short", "schedule.type=constant")
    assert "All 4 steps are done" in danlu("train", *words, "train.steps=4", cwd=whole).stdout
    danlu("train", *words, "train.steps=6", cwd=whole)
    assert list(losses(whole / "runs" / "short")) == [1, 2, 3, 4, 5, 6]
