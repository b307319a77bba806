"""Small corpora, prepared fast."""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danlu.config.data import DataConfig
from danlu.data.corpus import Corpus
from danlu.data.prepare import prepare

WORDS = [
    "the",
    "furnace",
    "refines",
    "pills",
    "of",
    "cinnabar",
    "while",
    "a",
    "patient",
    "alchemist",
    "counts",
    "days",
]


def text(index: int, words: int = 60) -> str:
    """A text that is unlike the others."""
    return " ".join(WORDS[(index * 7 + i * i) % len(WORDS)] for i in range(words)) + f" {index}\n"


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here pulls the plug: what the kernel holds is as good as what the disk holds."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """A folder of forty small text files."""
    folder = tmp_path / "books"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index:02d}.txt").write_text(text(index))
    return folder


@pytest.fixture
def config(books: Path, tmp_path: Path) -> Callable[..., DataConfig]:
    """A config for `books`, with other keys on top; raw bytes and one worker unless said."""

    def make(**keys: Any) -> DataConfig:
        usual = {
            "sources": [{"path": str(books)}],
            "folder": str(tmp_path / "corpus"),
            "tokenizer": {"type": "bytes"},
            "shard_bytes": 2048,
            "workers": 1,
        }
        return DataConfig.model_validate(usual | keys)

    return make


@pytest.fixture
def corpus(config: Callable[..., DataConfig]) -> Corpus:
    """`books` prepared as raw bytes."""
    return prepare(config(validation_fraction=0.1))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`full_disk(after=n)`: from now on the disk takes n more bytes, from whole files on."""

    def fill(*, after: int) -> None:
        left = after

        class Full(io.FileIO):
            def write(self, data: Any) -> int:
                nonlocal left
                left -= len(data)
                if left < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.name)
                return super().write(data)

        def opened(path: Any, mode: str = "r", **keys: Any) -> Any:
            if "w" not in mode:
                return open(path, mode, **keys)
            raw = io.BufferedWriter(Full(path, "w"), buffer_size=1 << 10)
            return raw if "b" in mode else io.TextIOWrapper(raw, encoding="utf-8")

        monkeypatch.setattr("danlu.base.files.open", opened, raising=False)

    return fill
