import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from danlu.base.errors import DataError, UserError
from danlu.config.data import DataConfig
from danlu.data.corpus import Corpus
from danlu.data.encode import EncodeUnit
from danlu.data.prepare import PrepareStep, prepare
from danlu.data.tokenizer import Tokenizer


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a corpus by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def documents(corpus: Corpus, split: str) -> list[str]:
    """The texts of a split, cut at the end tokens."""
    stream = corpus.stream(split)
    ids = stream.read(0, len(stream))
    ends = np.flatnonzero(ids == corpus.tokenizer.end) + 1
    assert len(ids) == (ends[-1] if len(ends) else 0), "the last document has no end"
    return [corpus.tokenizer.decode(part) for part in np.split(ids, ends)[:-1]]


# What comes out


@pytest.mark.parametrize("tokenizer", [{"type": "bytes"}, {"type": "bpe", "vocab_size": 300}])
def test_every_document_is_in_exactly_one_split_and_reads_as_written(config, books, tokenizer):
    corpus = prepare(config(tokenizer=tokenizer, validation_fraction=0.1))
    train, held_out = documents(corpus, "train"), documents(corpus, "validation")
    written = [path.read_text() for path in sorted(books.iterdir())]
    assert len(held_out) == 4
    assert sorted(train + held_out) == sorted(written)
    assert train == [text for text in written if text in train]


def test_the_facts_and_the_manifest_count_what_is_there(corpus, books):
    size = sum(path.stat().st_size for path in books.iterdir())
    facts = corpus.facts
    assert facts.train_bytes + facts.validation_bytes == size
    assert facts.train_tokens == len(corpus.stream("train"))
    assert facts.train_tokens + facts.validation_tokens == size + 40
    assert (facts.documents, facts.vocab_size) == (40, 257)
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    assert manifest["sources"][0]["files"] == 40
    assert manifest["sources"][0]["name"] == "books"
    assert sum(shard["tokens"] for shard in manifest["shards"]) == size + 40
    assert manifest["tokenizer"]["fingerprint"] == corpus.tokenizer.fingerprint
    assert str(corpus.folder) not in (corpus.folder / "manifest.json").read_text()
    corpus.verify()


def test_copies_of_a_text_stay_on_one_side(config, books):
    for path in sorted(books.iterdir()):
        (books / f"copy-{path.name}").write_bytes(path.read_bytes())
    corpus = prepare(config(validation_fraction=0.2))
    assert set(documents(corpus, "train")).isdisjoint(documents(corpus, "validation"))
    assert len(documents(corpus, "validation")) == 16


def test_one_long_book_has_a_validation_split_and_ends_once_a_shard(config, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Paragraph {i} of the book.\n\n" for i in range(20_000)))
    corpus = prepare(config(sources=[{"path": str(book)}], shard_bytes=100_000))
    assert corpus.facts.documents == 1
    assert 0.01 < corpus.facts.validation_bytes / book.stat().st_size < 0.06
    shards = [shard for shard in corpus.manifest.shards if shard.split == "train"]
    assert len(documents(corpus, "train")) == len(shards) < 10


def test_a_document_is_never_glued_to_one_whose_end_the_other_split_has(config, tmp_path):
    folder = tmp_path / "tales"
    folder.mkdir()
    for index in range(12):
        tale = "".join(f"Tale {index}, line {i}.\n" for i in range(900))
        (folder / f"{index}.txt").write_text(tale)
    keys = {"sources": [{"path": str(folder)}], "shard_bytes": 10_000}
    corpus = prepare(config(validation_fraction=0.4, **keys))
    for split in ("train", "validation"):
        for text in documents(corpus, split):
            assert len({line.split(",")[0] for line in text.splitlines()}) == 1


def test_without_a_validation_fraction_all_is_train(config):
    corpus = prepare(config(validation_fraction=0))
    assert len(corpus.stream("validation")) == 0
    assert len(documents(corpus, "train")) == 40


def test_several_sources_follow_one_another(config, books, tmp_path):
    path = tmp_path / "more.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"text": f"line {i}"}) + "\n" for i in range(30))
    sources = [{"path": str(books)}, {"type": "jsonl", "path": str(path), "name": "more"}]
    corpus = prepare(config(sources=sources))
    assert [(s.name, s.documents) for s in corpus.manifest.sources] == [("books", 40), ("more", 30)]
    assert documents(corpus, "train")[-1].startswith("line ")


def test_a_given_tokenizer_is_used_and_kept_beside_the_shards(config, tmp_path):
    given = Tokenizer.train_bpe(["the furnace refines the pills"] * 9, 270)
    given.save(tmp_path / "given")
    corpus = prepare(config(tokenizer={"type": "file", "path": str(tmp_path / "given")}))
    assert corpus.tokenizer.fingerprint == given.fingerprint
    assert corpus.facts.tokenizer == f"file:{given.fingerprint}"


def test_the_automatic_folder_has_a_readable_name_and_changes_with_the_text(
    config, books, tmp_path, monkeypatch
):
    monkeypatch.setenv("DANLU_HOME", str(tmp_path / "home"))
    first = prepare(config(folder="auto"))
    assert first.folder.parent == tmp_path / "home" / "data"
    assert first.folder.name.startswith("books-")
    assert prepare(config(folder="auto", workers=2)).folder == first.folder
    (books / "new.txt").write_text("new")
    assert prepare(config(folder="auto")).folder != first.folder
    assert prepare(config(folder="auto"), seed=1).folder.parent == first.folder.parent


def test_output_inside_the_source_folder_is_not_read_as_text(config, books):
    inside = {"sources": [{"path": str(books)}], "folder": str(books / "out")}
    first = prepare(config(**inside))
    assert prepare(config(**inside)).fingerprint == first.fingerprint


# Parallel, resumable, watched


def test_any_number_of_workers_gives_the_same_bytes(config, tmp_path):
    folders = [tmp_path / f"workers-{n}" for n in (1, 3)]
    for count, folder in zip((1, 3), folders, strict=True):
        prepare(
            config(
                folder=str(folder), workers=count, tokenizer={"vocab_size": 280}, shard_bytes=4096
            )
        )
    assert contents(folders[0]) == contents(folders[1])
    assert len(contents(folders[0])) > 5


def test_a_corpus_that_is_there_is_opened_without_work(config):
    first, seen = prepare(config()), []
    before = contents(first.folder)
    assert prepare(config(), watch=seen.append).fingerprint == first.fingerprint
    assert seen == []
    assert contents(first.folder) == before


def test_progress_grows_from_nothing_to_all_in_each_phase(config):
    seen: list[PrepareStep] = []
    prepare(config(tokenizer={"vocab_size": 280}), watch=seen.append)
    phases = list(dict.fromkeys(step.phase for step in seen))
    assert phases == ["scan", "train tokenizer", "tokenize"]
    for phase in phases:
        done = [step.done for step in seen if step.phase == phase]
        totals = {step.total for step in seen if step.phase == phase}
        assert done[0] == 0
        assert done == sorted(done)
        assert {done[-1]} == totals


KILLED = """
import os, signal, sys
from danlu.config.data import DataConfig
from danlu.data.prepare import prepare

def watch(step):
    if step.phase == sys.argv[2] and step.done >= int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

prepare(DataConfig.model_validate_json(sys.argv[1]), watch=watch)
"""


@pytest.mark.parametrize(
    ("phase", "done", "workers"), [("scan", 4000, 1), ("tokenize", 9000, 1), ("tokenize", 5000, 2)]
)
def test_a_rerun_after_kill_9_ends_with_the_bytes_of_an_uninterrupted_run(
    config, tmp_path, phase, done, workers
):
    keys = {"tokenizer": {"vocab_size": 280}, "workers": workers}
    whole = prepare(config(folder=str(tmp_path / "whole"), **keys))
    killed = config(folder=str(tmp_path / "killed"), **keys)
    command = [sys.executable, "-c", KILLED, killed.model_dump_json(), phase, str(done)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "manifest.json").exists()
    assert contents(prepare(killed).folder) == contents(whole.folder)
    assert not (tmp_path / "killed" / "work").exists()


class _StopError(Exception):
    pass


def stop_at(phase: str, done: int):
    def watch(step: PrepareStep) -> None:
        if step.phase == phase and step.done >= done:
            raise _StopError

    return watch


def test_finished_units_are_not_done_again_and_damaged_ones_are(config, monkeypatch):
    whole = prepare(config(folder=config().folder + "-whole"))
    with pytest.raises(_StopError):
        prepare(config(), watch=stop_at("tokenize", 9000))
    folder = Path(config().folder)
    shards = sorted(folder.glob("train-*.bin"))
    assert 2 < len(shards) < len(whole.manifest.shards)
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    data = bytearray(shards[1].read_bytes())
    data[-1] ^= 1
    shards[1].write_bytes(data)
    done_again: list[int] = []
    encode = EncodeUnit._encode

    def counted(self, item, progress):
        done_again.append(item.job.number)
        return encode(self, item, progress)

    monkeypatch.setattr(EncodeUnit, "_encode", counted)
    prepare(config())
    assert contents(folder) == contents(whole.folder)
    units = {shard.name.split("-")[1] for shard in whole.manifest.shards}
    assert len(done_again) == len(units) - (len(shards) - 2)
    assert {0, 1} & set(done_again)


def test_other_settings_start_an_unfinished_folder_anew(config, tmp_path):
    with pytest.raises(_StopError):
        prepare(config(), watch=stop_at("tokenize", 9000))
    corpus = prepare(config(tokenizer={"vocab_size": 280}))
    other = prepare(config(folder=str(tmp_path / "other"), tokenizer={"vocab_size": 280}))
    assert contents(corpus.folder) == contents(other.folder)


def test_ctrl_c_ends_the_workers_and_leaves_a_folder_that_goes_on(config, tmp_path):
    script = f"""
    import os, signal
    from danlu.config.data import DataConfig
    from danlu.data.prepare import prepare
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    def watch(step):
        if step.phase == "tokenize" and step.done:
            os.kill(os.getpid(), signal.SIGINT)
    prepare(DataConfig.model_validate_json({config(workers=2).model_dump_json()!r}), watch=watch)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, stderr=subprocess.PIPE, check=False, timeout=60)
    assert b"KeyboardInterrupt" in done.stderr
    assert done.returncode == -signal.SIGINT
    assert not list(Path(config().folder).glob(".*.part"))
    whole = prepare(config(folder=str(tmp_path / "whole")))
    assert contents(prepare(config()).folder) == contents(whole.folder)


def test_of_two_that_want_different_corpora_in_one_folder_one_is_refused(config):
    wanted = [config(tokenizer={"vocab_size": size}) for size in (280, 290)]
    outcomes: list[object] = []

    def ask(index: int) -> None:
        try:
            outcomes.append(prepare(wanted[index]).facts.vocab_size)
        except DataError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(isinstance(outcome, DataError) for outcome in outcomes) == [False, True]


def test_many_processes_ask_at_once_and_one_works(config):
    keys = config(tokenizer={"vocab_size": 280})
    phases: list[list[str]] = [[], [], []]
    found: list[Corpus] = []

    def ask(index: int) -> None:
        found.append(prepare(keys, watch=lambda step: phases[index].append(step.phase)))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({corpus.fingerprint for corpus in found}) == 1
    assert len(found) == 3
    assert sum("tokenize" in seen for seen in phases) == 1


# What the user can get wrong: one clear line each, nothing half-written


def refused(config: DataConfig, match: str) -> UserError:
    with pytest.raises(UserError, match=match) as caught:
        prepare(config)
    assert "\n" not in str(caught.value)
    assert caught.value.fix
    folder = Path(config.folder)
    if os.path.exists(folder):  # Path.exists raises for a name that is too long
        assert not (folder / "manifest.json").exists()
        assert not list(folder.rglob("*.part"))
    return caught.value


def test_a_missing_path_is_refused_before_anything_is_written(config, tmp_path):
    refused(config(sources=[{"path": str(tmp_path / "none")}]), "there is no")
    assert not Path(config().folder).exists()


@pytest.mark.parametrize("kind", ["file", "folder", "blank"])
def test_an_empty_corpus_is_refused(config, tmp_path, kind):
    place = tmp_path / "place"
    place.mkdir()
    if kind != "folder":
        (place / "a.jsonl").write_text("" if kind == "file" else "\n\n\n")
    kinds = {"file": "files", "folder": "files", "blank": "jsonl"}
    match = "holds no files" if kind == "folder" else "no text in them"
    refused(config(sources=[{"path": str(place), "type": kinds[kind]}]), match)


def test_a_few_bad_files_are_quarantined_and_the_run_goes_on(config, books):
    (books / "bad.txt").write_bytes(b"\xff\xfe\xfd")
    (books / "worse.txt").write_bytes(b"na\xefve")
    corpus = prepare(config())
    lines = [json.loads(s) for s in (corpus.folder / "quarantine.jsonl").read_text().splitlines()]
    assert [line["path"] for line in lines] == ["bad.txt", "worse.txt"]
    assert all(line["source"] == "books" and "not UTF-8" in line["reason"] for line in lines)
    assert corpus.manifest.sources[0].rejected == 2
    assert corpus.facts.documents == 40


def test_too_many_bad_files_stop_the_run_and_a_higher_limit_lets_it_go_on(config, books):
    for index in range(10):
        (books / f"bad{index}.txt").write_bytes(b"\xff")
    error = refused(config(), r"10 of 50 texts in books cannot be read \(the first: bad0\.txt: it")
    assert error.where == "data_pipeline.sources[0]"
    assert "bad_file_limit" in error.fix
    assert len((Path(config().folder) / "quarantine.jsonl").read_text().splitlines()) == 10
    assert prepare(config(bad_file_limit=0.2)).facts.documents == 40


def test_what_is_wrong_with_a_line_may_be_anything_and_is_still_written(config, tmp_path):
    path = tmp_path / "a.jsonl"
    bad = ['{"\\ud800": 1}', json.dumps({"x" * 9000: "\n\u2028"}), "\x00", "{"]
    path.write_text("\n".join(bad + ['{"text": "good"}'] * 9))
    corpus = prepare(config(sources=[{"type": "jsonl", "path": str(path)}], bad_file_limit=0.5))
    lines = (corpus.folder / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["path"] for line in lines] == [f"a.jsonl:{n}" for n in (1, 2, 3, 4)]
    assert max(map(len, lines)) < 500


def test_corrupt_compressed_text_stops_the_run(config, books):
    (books / "c.txt.gz").write_bytes(gzip.compress(os.urandom(5000))[:-9])
    refused(config(), "corrupt or cut off")
    refused(config(workers=2), "corrupt or cut off")


def test_a_cut_off_shard_is_refused(corpus, config):
    shard = next(corpus.folder.glob("train-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-10])
    for open_ in (
        lambda: Corpus.open(corpus.folder),
        lambda: prepare(config(validation_fraction=0.1)),
    ):
        with pytest.raises(DataError, match="cut off") as caught:
            open_()
        assert str(shard) in str(caught.value)


def test_a_tokenizer_that_is_not_the_one_of_the_shards_is_refused(corpus, config):
    Tokenizer.train_bpe(["another"], 260).save(corpus.folder)
    with pytest.raises(DataError, match="not the tokenizer that made"):
        Corpus.open(corpus.folder)


def test_shards_of_another_corpus_are_refused(corpus, config, tmp_path):
    other = prepare(config(folder=str(tmp_path / "o"), tokenizer={"vocab_size": 280}))
    name = corpus.manifest.shards[0].name
    (corpus.folder / name).write_bytes((other.folder / name).read_bytes())
    with pytest.raises(DataError, match="another tokenizer"):
        Corpus.open(corpus.folder)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"tokenizer": {"vocab_size": 300}}, "data_pipeline.tokenizer"),
        ({"validation_fraction": 0.3}, "validation_fraction"),
        ({"shard_bytes": 4096}, "shard_bytes"),
    ],
)
def test_a_folder_made_with_other_settings_is_refused_and_kept(config, keys, part):
    before = contents(prepare(config()).folder)
    with pytest.raises(DataError, match=f"other settings .*{part}"):
        prepare(config(**keys))
    assert contents(Path(config().folder)) == before


def test_a_folder_whose_sources_changed_is_refused_but_may_outlive_them(config, books):
    first = prepare(config())
    for path in books.iterdir():
        path.unlink()
    books.rmdir()
    assert prepare(config()).fingerprint == first.fingerprint
    books.mkdir()
    (books / "a.txt").write_text("another")
    with pytest.raises(DataError, match=r"the files of data_pipeline\.sources"):
        prepare(config())


def test_a_folder_with_other_files_is_refused_and_left_alone(config, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "letter.txt").write_text("dear")
    refused(config(), "holds other files")
    assert contents(tmp_path / "corpus") == {"letter.txt": b"dear"}


def test_a_folder_that_cannot_be_made_is_refused(config, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/corpus", "x" * 300, "/proc/corpus"):
        refused(config(folder=str(tmp_path / folder)), "the folder cannot be used")


def test_a_home_that_is_no_folder_is_refused(config, tmp_path, monkeypatch):
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("DANLU_HOME", str(tmp_path / "home"))
    refused(config(folder="auto"), "the folder cannot be used")


def test_an_unfinished_corpus_does_not_open(config):
    with pytest.raises(_StopError):
        prepare(config(), watch=stop_at("tokenize", 9000))
    with pytest.raises(DataError, match="no prepared corpus here"):
        Corpus.open(Path(config().folder))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": 99}', '{"format": 1}'])
def test_a_broken_manifest_is_one_clear_line(corpus, content):
    (corpus.folder / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json") as caught:
        Corpus.open(corpus.folder)
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_at_any_byte_is_one_clear_line_and_the_run_goes_on(config, full_disk):
    keys = config(tokenizer={"vocab_size": 280}, shard_bytes=8192)
    for after in (0, 500, 3000, 9000, 20_000):
        full_disk(after=after)
        refused(keys, "the disk is full. Free some space")
    full_disk(after=10**9)
    whole = prepare(keys)
    assert len(documents(whole, "train")) + len(documents(whole, "validation")) == 40


def test_a_disk_that_fills_in_a_worker_is_one_clear_line(config, monkeypatch):
    def full(self, task, items, *, progress):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("danlu.data.workers.Workers.run", full)
    refused(config(workers=2), "the disk is full")


def test_files_that_change_while_they_are_read_are_noticed(config, books):
    def change(step: PrepareStep) -> None:
        if step.phase == "tokenize" and step.done == 0:
            (books / "00.txt").write_text("another text")

    with pytest.raises(DataError, match="changed while they were being prepared"):
        prepare(config(), watch=change)


def test_preparing_needs_no_torch():
    modules = "prepare corpus tokenizer order shards workers sources.files sources.parquet"
    imports = "; ".join(f"import danlu.data.{module}" for module in modules.split())
    script = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_an_opened_corpus_is_ready_at_once(corpus):
    begin = time.perf_counter()
    Corpus.open(corpus.folder)
    assert time.perf_counter() - begin < 1
