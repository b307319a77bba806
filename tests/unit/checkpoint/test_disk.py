import dataclasses
import json

import pytest
import torch
from torch import nn

from danlu.base.errors import CheckpointError
from danlu.checkpoint import disk
from danlu.checkpoint.disk import CheckpointStore, damage, read_facts
from danlu.checkpoint.state import CheckpointFacts
from danlu.hardware.comm import Comm

FACTS = CheckpointFacts(3, {"position": 12, "seed": 0}, {"layers": 1}, "corpus", "run")


def learner(width=4):
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def notes():
    return []


@pytest.fixture
def store(tmp_path, notes):
    return CheckpointStore(tmp_path / "checkpoints", Comm(), keep=2, warn=notes.append)


def test_what_is_saved_comes_back_to_the_bit(store):
    model, optimizer = learner()
    path = store.save(model, optimizer, FACTS)
    other, fresh = learner()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert store.load(path, other, fresh) == FACTS
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[a][name], fresh.state[b][name])


def test_weights_alone_can_be_loaded(store):
    model, optimizer = learner()
    path = store.save(model, optimizer, FACTS)
    other, _ = learner()
    with torch.no_grad():
        other.weight.zero_()
    store.load(path, other, None)
    assert torch.equal(model.weight, other.weight)


def test_only_the_newest_are_kept(store):
    model, optimizer = learner()
    for step in (1, 2, 3, 4):
        store.save(model, optimizer, dataclasses.replace(FACTS, step=step))
    assert [p.name for p in store.all()] == ["step-00000004", "step-00000003"]


@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_checkpoint_is_never_loaded(store, notes, how):
    model, optimizer = learner()
    for step in (1, 2):
        newest = store.save(model, optimizer, dataclasses.replace(FACTS, step=step))
    shard = next(newest.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif how == "truncate":
        shard.write_bytes(data[:-1])
    elif how == "remove":
        shard.unlink()
    else:
        (newest / "manifest.json").unlink()
    assert damage(newest)
    assert store.newest().name == "step-00000001"
    assert "step-00000002 is not used" in notes[0]


def test_a_half_written_checkpoint_has_no_name(store, monkeypatch):
    model, optimizer = learner()
    store.save(model, optimizer, dataclasses.replace(FACTS, step=1))

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(disk, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        store.save(model, optimizer, dataclasses.replace(FACTS, step=2))
    assert [p.name for p in store.all()] == ["step-00000001"]


@pytest.mark.parametrize("part", ["save_distributed", "write_json"])
def test_a_full_disk_is_one_clear_line_and_leaves_the_old_ones(store, monkeypatch, part):
    model, optimizer = learner()
    store.save(model, optimizer, dataclasses.replace(FACTS, step=1))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, part, full)
    with pytest.raises(CheckpointError, match=r"step-00000002: the disk is full .* Earlier ones"):
        store.save(model, optimizer, dataclasses.replace(FACTS, step=2))
    assert [p.name for p in store.folder.iterdir()] == ["step-00000001"]


def test_another_model_s_checkpoint_is_refused_in_one_line(store):
    path = store.save(*learner(4), FACTS)
    with pytest.raises(CheckpointError, match="it does not fit this model") as caught:
        store.load(path, *learner(6))
    assert "\n" not in str(caught.value)


def test_what_is_not_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        read_facts(tmp_path)
    (tmp_path / "checkpoint.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        read_facts(tmp_path)


@pytest.mark.parametrize(
    "manifest",
    ["{}", "[]", "null", '{"checkpoint.json": [1, "x"]}', '{"checkpoint.json": 1, "a": 2}', "{"],
)
def test_a_manifest_that_does_not_list_the_files_is_broken(store, notes, manifest):
    newest = store.save(*learner(), FACTS)
    (newest / "manifest.json").write_text(manifest)
    assert damage(newest) == "its manifest is broken"
    assert store.newest() is None


def test_a_manifest_without_data_or_facts_is_broken(store):
    newest = store.save(*learner(), FACTS)
    whole = json.loads((newest / "manifest.json").read_text())
    assert damage(newest) is None
    for kept in (["checkpoint.json"], [name for name in whole if name != "checkpoint.json"]):
        (newest / "manifest.json").write_text(json.dumps({name: whole[name] for name in kept}))
        assert damage(newest) == "its manifest is broken"
