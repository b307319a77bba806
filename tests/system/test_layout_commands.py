"""Layouts from the command line: trained, gone on in another one, tried, validated, drawn."""

import json

from danlu.config.load import load
from danlu.train import launch, worker
from danlu.train.folder import RunFolder
from running import TINY, danlu, events, losses

WORDS = (*TINY, "model.layers=4", "model.tied_embeddings=false", "precision.format=fp32")


def test_a_run_goes_on_in_another_layout_with_the_same_losses(tmp_path):
    steps = "train.steps=8"
    stages = ("pipeline_parallel.stages=2", "pipeline_parallel.layers=measured")
    danlu("train", *WORDS, "name=one", steps, cwd=tmp_path)
    danlu("train", *WORDS, "name=two", "train.steps=4", *stages, cwd=tmp_path)
    (cut,) = [e["text"] for e in events(tmp_path / "runs/two", "note") if "cut" in e["text"]]
    assert "measured" in cut
    assert events(tmp_path / "runs/two", "sample")  # by the first rank, from the checkpoint
    danlu("train", *WORDS, "name=two", steps, "tensor_parallel.degree=2", cwd=tmp_path)
    assert list(losses(tmp_path / "runs/two")) == list(range(1, 9))
    assert events(tmp_path / "runs/two", "resume")[0]["step"] == 4
    written = json.loads((tmp_path / "runs/two/plan.json").read_text())
    assert written["layout"]["tensor"] == 2


def test_open_layouts_are_tried_and_the_fastest_is_kept(tmp_path):
    words = ("name=open", "train.steps=2", "pipeline_parallel.stages=2", "launch.measure_layouts=2")
    danlu("train", *WORDS, *words, cwd=tmp_path)
    tried = events(tmp_path / "runs/open", "layout")
    assert len(tried) == 2
    assert [t["seconds"] for t in tried] == sorted(t["seconds"] for t in tried)
    assert json.loads((tmp_path / "runs/open/plan.json").read_text())["hash"] == tried[0]["plan"]


def test_a_clusters_layout_is_proved_in_small_and_drawn(tmp_path):
    words = ("plan", "model.preset=3b", "train.steps=9", "--cluster", "4x8xh100")
    layout = ("tensor_parallel.degree=8", "pipeline_parallel.stages=2", "data_parallel.degree=1")
    answer = danlu(
        *words, *layout, "--validate", "--ranks", "4", "--timeline", "t.html", cwd=tmp_path
    )
    assert "trains like one process" in answer.stdout
    assert "TP 2, PP 2" in answer.stdout
    assert "<svg" in (tmp_path / "t.html").read_text()
    refused = danlu(*words, "model.preset=1b", "--timeline", "none.html", cwd=tmp_path, check=False)
    assert refused.returncode == 2
    assert "the plan has no pipeline to draw" in refused.stderr
    assert not (tmp_path / "none.html").exists()


def test_ranks_train_their_own_config_whatever_takes_the_folder_before_them(tmp_path, monkeypatch):
    trained = []

    class Run:
        def train(self):
            return "done"

    def start_ranks(module, argument, *_, **__):
        assert module == worker.__name__
        (tmp_path / "run" / "config.yaml").write_text("pipeline_parallel: {stages: 2}")
        assert worker.main(argument) == 0

    monkeypatch.setattr(launch, "start_ranks", start_ranks)
    monkeypatch.setattr(worker, "open_run", lambda config: trained.append(config) or Run())
    config = load(None, *WORDS, "train.steps=2", "data_parallel.degree=2", f"folder={tmp_path}/run")
    assert launch.train(config) == "done"
    assert trained == [config]


def test_a_folder_that_another_run_has_taken_is_not_removed(tmp_path):
    config = load(None, *WORDS, f"folder={tmp_path}/run")
    mine, other = RunFolder.of(config), RunFolder.of(config)
    mine.claim(config)
    mine.release()
    other.claim(config)
    mine.discard()
    assert other.config.exists()
    other.release()
    mine.discard()
    assert not mine.path.exists()
