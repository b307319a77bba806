"""Whatever a user gets wrong ends with one clear line, exit code 2, and nothing half-written."""

import gzip
import json
import shutil

import pytest

from running import TEXT, TINY, danlu

SHORT = (*TINY, "train.steps=2")


def refused(*words, cwd, message, command="train"):
    """The command ends with code 2 and one line that holds `message`; no folder is left behind."""
    before = sorted(p.name for p in (cwd / "runs").glob("*")) if (cwd / "runs").exists() else []
    done = danlu(command, *words, cwd=cwd, check=False)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    after = sorted(p.name for p in (cwd / "runs").glob("*")) if (cwd / "runs").exists() else []
    assert after == before


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder in which one run has been done."""
    folder = tmp_path_factory.mktemp("mistakes")
    danlu("train", *SHORT, "name=good", cwd=folder)
    return folder


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.colour=red", "train.colour: there is no such key."),
        ("train.stesp=3", "train.stesp: there is no such key. Did you mean steps?"),
        ("train.steps=soon", "train.steps: 'soon' is not understood"),
        ("model.heads=7", "model.heads: 7 does not divide hidden_size 96."),
        ("precision.format=fp8", "precision.format: fp8 is not available yet"),
        ("tensor_parallel.degree=2", "degree: 2 does not divide 3 heads"),
        ("tensor_parallel.split_layers=[9]", "split_layers: there is no layer 9. Use numbers"),
        ("tensor_parallel.split_layers=0-999999999999", "split_layers: there is no layer 4."),
        ("tensor_parallel.split_layers=3-1", "split_layers: '3-1' is not understood."),
        ("model.layers=1e12", "model.layers: '1e12' is not possible. Write at most 10,000"),
        ("pipeline_parallel.stages=99", "pipeline_parallel.stages: 99 stages are more than"),
        ("pipeline_parallel.layers=[1,2]", "pipeline_parallel.layers: there is one stage"),
        ("zero_optimization.offload_ratio=2", "offload_ratio: 2 is not possible."),
        ("data_parallel.degree=0", "data_parallel.degree: 0 is not possible."),
        ("train.device=tpu", "train.device: there is no device 'tpu'."),
        ("monitor.sinks=[jsonl, wandb]", "monitor.sinks: there is no 'wandb'."),
        ("schedule.type=cosin", "schedule.type: there is no 'cosin'. Did you mean cosine?"),
        ("checkpoint.start_from=nowhere", "nowhere: this is not a whole checkpoint."),
    ],
)
def test_a_wrong_key_or_value(tmp_path, word, message):
    refused("model.preset=tiny", "train.steps=2", word, "name=x", cwd=tmp_path, message=message)


def test_a_timeline_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    words = (*TINY, "pipeline_parallel.stages=2", "--timeline")
    message = "--timeline: file/t.html cannot be written"
    refused(*words, "file/t.html", cwd=tmp_path, message=message, command="plan")
    refused(*words, ".", cwd=tmp_path, message="'.' is a directory", command="plan")


def test_a_run_folder_that_cannot_be_written(good, tmp_path):
    shutil.copytree(good / "runs" / "good", tmp_path / "runs" / "good")
    (tmp_path / "runs" / "good" / ".lock").unlink()
    (tmp_path / "runs" / "good" / ".lock").mkdir()  # root may write everywhere, but not this
    message = "runs/good: the folder cannot be written (Is a directory)."
    refused(*TINY, "train.steps=3", "name=good", cwd=tmp_path, message=message)


def test_micro_batches_fewer_than_the_schedule_needs(tmp_path):
    words = ("pipeline_parallel.stages=2", "pipeline_parallel.micro_batches=1", "name=x")
    message = "pipeline_parallel.micro_batches: 1f1b on 2 ranks needs 2 or more micro-batches"
    schedule = "pipeline_parallel.schedule=1f1b"
    refused(*SHORT, *words, schedule, cwd=tmp_path, message=message)


def test_an_empty_config_and_a_key_without_a_value(tmp_path):
    (tmp_path / "t.yaml").write_text("")
    refused("t.yaml", cwd=tmp_path, message="t.yaml: the file is empty.")
    message = "train.steps: this key has no value. Write train.steps=VALUE."
    refused("t.yaml", "train.steps", cwd=tmp_path, message=message)


def test_of_many_ranks_the_first_one_speaks(tmp_path):
    words = ("train", "train.stps=1")
    refused(words[1], cwd=tmp_path, message="train.stps: there is no such key.")
    other = danlu(*words, cwd=tmp_path, check=False, environment={"RANK": "1", "LOCAL_RANK": "1"})
    assert (other.returncode, other.stdout, other.stderr) == (2, "", "")


def test_a_missing_config_and_a_second_one(tmp_path):
    refused("none.yaml", cwd=tmp_path, message="none.yaml: there is no such file.")
    (tmp_path / "a.yaml").write_text("train: {steps: 1}")
    refused("a.yaml", "b.yaml", cwd=tmp_path, message="b.yaml: this is a second config file.")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no"),
        ({}, "text"),
        ({"a.txt": b""}, "text"),
        ({"a.txt.gz": gzip.compress(b"some text " * 1000)[:50]}, "a.txt.gz"),
    ],
)
def test_text_that_is_missing_empty_or_corrupt(tmp_path, content, message):
    if content is not None:
        (tmp_path / "text").mkdir()
        for name, data in content.items():
            (tmp_path / "text" / name).write_bytes(data)
    source = "data_pipeline.sources=[{type: files, path: text}]"
    refused(*SHORT, source, "name=x", cwd=tmp_path, message=message)


def test_a_corrupt_parquet_file(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense PAR1")
    source = "data_pipeline.sources=[{type: parquet, path: a.parquet}]"
    refused(*SHORT, source, "name=x", cwd=tmp_path, message="a.parquet")


def test_a_file_that_is_not_utf8_is_quarantined_counted_and_the_run_goes_on(tmp_path):
    shutil.copytree(TEXT, tmp_path / "text", ignore=lambda d, names: ["mime", "__pycache__"])
    (tmp_path / "text" / "latin.py").write_bytes(b"caf\xe9 = 1\n" * 40)
    words = (*SHORT, "data_pipeline.sources=[{type: files, path: text}]", "name=x")
    done = danlu("train", *words, "data_pipeline.folder=shards", cwd=tmp_path)
    listed = [
        json.loads(line)
        for line in (tmp_path / "shards" / "quarantine.jsonl").read_text().splitlines()
    ]
    assert [entry["path"] for entry in listed] == ["latin.py"]
    assert "1 text cannot be read and left out" in done.stdout


def test_a_corpus_shorter_than_one_sequence(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("short")
    (tmp_path / "text" / "b.txt").write_text("brief")
    source = "data_pipeline.sources=[{type: files, path: text}]"
    refused(*SHORT, source, "name=x", cwd=tmp_path, message="sequence")


def test_a_truncated_token_shard(tmp_path):
    words = (*SHORT, "data_pipeline.folder=shards", "name=x")
    danlu("prepare", *words, cwd=tmp_path)
    shard = next((tmp_path / "shards").rglob("*train*.bin"))
    shard.write_bytes(shard.read_bytes()[:-10])
    refused(*words, cwd=tmp_path, message=shard.name)


def test_a_tokenizer_that_is_not_the_shards(tmp_path):
    for name, size in (("one", 300), ("two", 400)):
        danlu(
            "prepare", *SHORT, f"data_pipeline.folder={name}",
            f"data_pipeline.tokenizer.vocab_size={size}", cwd=tmp_path,
        )  # fmt: skip
    for file in (tmp_path / "two").glob("tokenizer*.json"):
        shutil.copy(file, tmp_path / "one")
    words = (*SHORT, "data_pipeline.folder=one", "data_pipeline.tokenizer.vocab_size=300", "name=x")
    refused(*words, cwd=tmp_path, message="tokenizer")


def test_a_run_folder_of_another_config(good):
    message = "belongs to another config (optimizer.weight_decay is 0.1 there, 0.3 here)"
    refused(*SHORT, "name=good", "optimizer.weight_decay=0.3", cwd=good, message=message)
    (good / "other").mkdir()
    (good / "other" / "thesis.tex").write_text("")
    refused(*SHORT, "folder=other", cwd=good, message="holds something else (thesis.tex)")


def test_a_checkpoint_of_another_model(good):
    words = (*SHORT, "name=wider", "model.hidden_size=64", "checkpoint.start_from=runs/good")
    message = "it holds another model (hidden_size: 32 there, 64 here)"
    refused(*words, cwd=good, message=message)
    danlu("train", *SHORT, "name=heir", "checkpoint.start_from=runs/good", cwd=good)


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("generate", ("runs/none",), "this is not a run folder. Runs here: runs/good"),
        ("report", ("runs/none",), "runs/none"),
        ("watch", ("runs/none", "--once"), "runs/none"),
        ("plan", ("--cluster", "16x8xh1000"), "Did you mean h100"),
        ("prepare", ("data_pipeline.sources=[{type: sql}]",), "there is no 'sql'."),
        (
            "generate",
            ("runs/good", "--tokens", "0"),
            "danlu generate: Invalid value for '--tokens'",
        ),
        ("generate", ("runs/good", "--seed", "-1"), "Invalid value for '--seed'"),
        ("generate", ("runs/good", "--temperature", "inf"), "these are finite numbers"),
        ("generate", ("runs/good", "--prompt", "\udcff"), "--prompt: this is not valid text."),
        ("generate", (), "Missing argument 'RUN'. See danlu generate --help."),
        ("trian", (), "error: danlu: No such command 'trian'."),
    ],
)
def test_other_commands_say_it_in_one_line_too(good, command, words, message):
    refused(*words, cwd=good, message=message, command=command)
