"""The command line and the library, from the outside."""

import json
import subprocess
import sys

import pytest

import danlu as library
from running import TINY, danlu, events, losses, records


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder with one finished run, and what the command printed."""
    folder = tmp_path_factory.mktemp("commands")
    out = danlu("train", *TINY, "train.steps=6", "name=small", cwd=folder).stdout
    return folder, out


def test_train_ends_with_a_summary_a_sample_and_a_report(done):
    folder, out = done
    assert "bits a byte" in out
    assert "Report: runs/small/report.html" in out
    assert (folder / "runs" / "small" / "report.html").stat().st_size > 10_000
    assert [e["prompt"] for e in events(folder / "runs" / "small", "sample")][-3:] == [
        "def ", "import ", "class ",
    ]  # fmt: skip
    assert set(records(folder / "runs" / "small", "evaluation")) == set(range(1, 7))


def test_report_watch_and_plan_answer_without_torch(done):
    folder, _ = done
    for words in (
        ["report", "runs/small"],
        ["watch", "runs/small", "--once"],
        ["plan"],
        ["schema"],
    ):
        code = (
            "import sys; sys.argv = ['danlu', *sys.argv[1:]]\n"
            "from danlu.cli import app\n"
            "app(standalone_mode=False)\n"
            "assert 'torch' not in sys.modules"
        )
        answer = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout


def test_plan_is_printed_for_a_cluster_one_does_not_have(tmp_path):
    words = ("plan", "model.preset=1b", "train.steps=10", "--cluster", "16x8xh100")
    assert "16 x 8 x NVIDIA H100" in danlu(*words, cwd=tmp_path).stdout
    tree = json.loads(danlu(*words, "--json", cwd=tmp_path).stdout)
    assert tree["layout"]["data"] == 128


def test_generate_continues_a_prompt_reproducibly(done):
    folder, _ = done
    words = ("generate", "runs/small", "--prompt", "def f", "--tokens", "12", "--device", "cpu")
    first = danlu(*words, cwd=folder).stdout
    assert first.startswith("def f")
    assert first == danlu(*words, cwd=folder).stdout


def test_doctor_says_what_the_machine_has_and_what_will_be_used(tmp_path):
    out = danlu("doctor", cwd=tmp_path).stdout
    for word in ("peak rates", "bandwidth", "danlu will use", "compiler"):
        assert word in out
    assert json.loads(danlu("doctor", "--json", cwd=tmp_path).stdout)["device"]["kind"]


def test_a_second_prepare_finds_everything_done(tmp_path):
    words = ("prepare", *TINY, "data_pipeline.folder=shards")
    danlu(*words, cwd=tmp_path)
    stamp = (tmp_path / "shards" / "manifest.json").stat().st_mtime_ns
    assert "documents" in danlu(*words, cwd=tmp_path).stdout
    assert (tmp_path / "shards" / "manifest.json").stat().st_mtime_ns == stamp


def test_torch_s_own_operations_train_alike(done):
    folder, _ = done
    words = (*TINY, "train.steps=6", "name=torch", "kernels.backend=torch", "precision.format=fp32")
    danlu("train", *words, cwd=folder)
    fast = losses(folder / "runs" / "small")
    for step, loss in losses(folder / "runs" / "torch").items():
        assert fast[step] == pytest.approx(loss, rel=0.01)


def test_a_loss_that_is_not_finite_stops_the_run_early_with_good_weights(tmp_path):
    words = (
        *TINY, "train.steps=40", "name=wild", "optimizer.learning_rate=1e30",
        "optimizer.gradient_clip=null", "schedule.warmup_steps=0", "precision.format=fp32",
    )  # fmt: skip
    done = danlu("train", *words, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "is not a finite number" in events(tmp_path / "runs" / "wild", "nan")[0]["reason"]
    assert events(tmp_path / "runs" / "wild", "stop")[0]["reason"] == "nan"


def test_documents_can_be_kept_apart(tmp_path):
    words = (*TINY, "train.steps=4", "data_pipeline.attention_within_documents=true", "name=apart")
    danlu("train", *words, cwd=tmp_path)
    assert len(losses(tmp_path / "runs" / "apart")) == 4


def test_a_rank_that_dies_ends_the_run_with_its_own_last_words(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, threading, time\n"
        "def die():\n"
        "    time.sleep(0.5)\n"
        "    while 'danlu.train.loop' not in __import__('sys').modules: time.sleep(0.05)\n"
        "    time.sleep(3); os.write(2, b'the disk of rank 1 caught fire\\n'); os._exit(9)\n"
        "if os.environ.get('RANK') == '1': threading.Thread(target=die, daemon=True).start()\n"
    )
    words = (*TINY, "train.steps=100000", "name=fire", "data_parallel.degree=2")
    import os

    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = danlu("train", *words, cwd=tmp_path, check=False, environment={"PYTHONPATH": path})
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: rank 1 of 2 ended with exit code 9: the disk of rank 1 caught")


def test_torchrun_joins_the_same_command(tmp_path):
    words = (*TINY, "train.steps=4", "precision.format=fp32", "name=joined", "launch.threads=1")
    danlu("train", *words, "name=alone", cwd=tmp_path)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "danlu"]
    answer = subprocess.run(
        [*run, "train", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("Report:") == 1
    alone, joined = (losses(tmp_path / "runs" / name) for name in ("alone", "joined"))
    assert joined == pytest.approx(alone, rel=1e-5)


def test_the_library_does_what_the_readme_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = library.load(None, *TINY, "train.steps=3", "name=api", "monitor.progress=false")
    plan = library.plan(config, cluster="2x8xh100")
    assert "Plan " in plan.explain()
    run = library.build(config)
    assert run.train() == "done"
    assert "bits a byte" in run.report().summary()
    loaded = library.load_model("runs/api", device="cpu")
    assert loaded.step == 3


def test_the_public_names_are_exactly_what_is_importable():
    assert len(library.__all__) < 25
    for name in library.__all__:
        assert getattr(library, name) is not None
    with pytest.raises(AttributeError):
        library.nothing  # noqa: B018
    assert set(library.__all__) == set(library._HOME)
