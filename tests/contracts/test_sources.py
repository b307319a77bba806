"""What every source promises, whatever its kind.

A new file in `danlu/data/sources` needs one line in `SAMPLES` to be held to all of this.
"""

import gzip
import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

from danlu.base.errors import UserError
from danlu.config.data import SourceConfig
from danlu.data.source import SOURCES, Document, Piece, Reject, Source, Unit, build_sources

TEXTS = [f"Text {i} in Ünïcode, 漢字 and 😀.\n" + "line\n" * (i % 40) for i in range(60)]


@dataclass(frozen=True)
class Sample:
    """A small place of one kind; `texts` is what must come out, when it is known."""

    config: SourceConfig
    texts: list[str] | None = None


def files(folder: Path) -> Sample:
    for index, text in enumerate(TEXTS):
        path = folder / f"{index // 10}" / f"{index:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Sample(SourceConfig(path=str(folder)), TEXTS)


def jsonl(folder: Path) -> Sample:
    lines = [json.dumps({"id": i, "body": t}) + "\n" for i, t in enumerate(TEXTS)]
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(lines[:40]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("".join(lines[40:]))
    return Sample(SourceConfig(type="jsonl", path=str(folder), text_field="body"), TEXTS)


def parquet(folder: Path) -> Sample:
    arrow, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    for name, part in (("a", TEXTS[:40]), ("b", TEXTS[40:])):
        pq.write_table(arrow.table({"text": part}), folder / f"{name}.parquet", row_group_size=7)
    return Sample(SourceConfig(type="parquet", path=str(folder)), TEXTS)


def python_stdlib(folder: Path) -> Sample:
    return Sample(SourceConfig(type="python_stdlib", include=("json", "email")))


SAMPLES = {"files": files, "jsonl": jsonl, "parquet": parquet, "python_stdlib": python_stdlib}


def test_every_registered_source_has_a_sample():
    assert set(SOURCES.names()) == set(SAMPLES)


@pytest.fixture(params=sorted(SAMPLES))
def sample(request, tmp_path) -> Sample:
    return SAMPLES[request.param](tmp_path / "place")


def build(sample: Sample) -> Source:
    (source,) = build_sources([sample.config])
    return source


def read(source: Source, units: list[Unit]) -> list[Document | Reject]:
    return [item for unit in units for item in source.read_unit(unit)]


def texts(items: list[Document | Reject]) -> list[str]:
    """Whole texts: parts are joined up to the one that ends the document."""
    assert all(isinstance(item, Document) for item in items)
    whole, parts = [], []
    for item in items:
        parts.append(item.text)
        if item.last:
            whole.append("".join(parts))
            parts = []
    assert not parts
    return whole


@pytest.mark.parametrize("size", [1, 300, 5000, 1 << 40])
def test_units_of_any_size_hold_every_text_once_and_in_order(sample, size):
    source = build(sample)
    everything = texts(read(source, source.units(1 << 40)))
    assert texts(read(source, source.units(size))) == everything
    assert everything == (sample.texts or everything)
    assert everything


def test_two_listings_are_equal_and_sorted(sample):
    first, second = build(sample), build(sample)
    assert first.files() == second.files()
    assert [file.path for file in first.files()] == sorted(file.path for file in first.files())
    assert first.units(3000) == second.units(3000)


def test_paths_are_relative_so_that_nothing_tells_the_machine(sample, tmp_path):
    source = build(sample)
    named = [f.path for f in source.files()]
    named += [item.path for item in read(source, source.units(1 << 40))]
    assert not any(path.startswith("/") for path in named)


def test_a_worker_reads_the_same_from_a_unit_that_was_sent_to_it(sample):
    source = build(sample)
    units = source.units(2000)
    sent = pickle.loads(pickle.dumps((sample.config, units)))
    assert read(build(Sample(sent[0])), sent[1]) == read(source, units)


def test_a_unit_is_no_larger_than_asked_unless_it_is_one_piece(sample):
    for unit in build(sample).units(4000):
        assert unit.size <= 4000 or len(unit.pieces) == 1
        assert all(isinstance(piece, Piece) and piece.size >= 0 for piece in unit.pieces)


@pytest.mark.parametrize("kind", sorted(set(SAMPLES) - {"python_stdlib"}))
def test_a_place_that_does_not_exist_is_one_clear_line(kind, tmp_path):
    (source,) = build_sources([SourceConfig(type=kind, path=str(tmp_path / "nowhere"))])
    with pytest.raises(UserError, match="nowhere") as caught:
        source.files()
    assert "\n" not in str(caught.value)
    assert caught.value.where == "data_pipeline.sources[0].path"


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_a_place_that_is_empty_is_one_clear_line(kind, tmp_path):
    path = None if kind == "python_stdlib" else str(tmp_path)
    (source,) = build_sources([SourceConfig(type=kind, path=path, include=("*.nothing",))])
    with pytest.raises(UserError, match="holds no files"):
        source.files()


def test_a_source_without_a_path_says_which_key_is_missing():
    for kind in set(SAMPLES) - {"python_stdlib"}:
        (source,) = build_sources([SourceConfig(type=kind)])
        with pytest.raises(UserError, match=r"sources\[0\]\.path: .* needs a path"):
            source.files()
