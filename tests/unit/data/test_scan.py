import numpy as np
import pytest

from danlu.data.scan import Scan, Split, choose_split, salt_of, text_hash
from danlu.data.source import Reject


def scan(hashes, sizes=None) -> Scan:
    sizes = sizes if sizes is not None else [10] * len(hashes)
    return Scan(np.array(hashes, "u8"), np.array(sizes, "i8"), len(hashes), 0, 0, ())


def held_out(hashes: list[int], fraction: float) -> int:
    split = choose_split([scan(hashes)], fraction, sampled=[0], sample_bytes=10**9)
    return sum(split.held_out(hash_) for hash_ in hashes)


HASHES = [text_hash(str(i).encode(), salt_of(0)) for i in range(1000)]


@pytest.mark.parametrize(("fraction", "count"), [(0, 0), (0.001, 1), (0.02, 20), (0.5, 500)])
def test_the_share_that_is_held_out_is_exact(fraction, count):
    assert held_out(HASHES, fraction) == count


@pytest.mark.parametrize("fraction", [1e-9, 0.02, 0.999])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_of_two_texts_or_more_one_is_held_out_and_one_is_not(count, fraction):
    assert 1 <= held_out(HASHES[:count], fraction) < count


def test_a_single_text_is_trained_on_however_many_copies_there_are():
    assert held_out(HASHES[:1], 0.5) == held_out(HASHES[:1] * 7, 0.5) == 0


def test_copies_stay_on_one_side():
    split = choose_split([scan(HASHES * 3)], 0.1, sampled=[0], sample_bytes=10**9)
    assert sum(map(split.held_out, HASHES * 3)) == 3 * sum(map(split.held_out, HASHES)) == 300


def test_a_very_large_corpus_is_split_by_the_share_of_hashes(monkeypatch):
    monkeypatch.setattr("danlu.data.scan._EXACT", 100)
    assert held_out(HASHES, 0.1) == pytest.approx(100, abs=40)


def test_the_tokenizers_sample_fits_its_size_and_holds_nothing_of_the_validation_split():
    sizes = [i % 17 + 1 for i in range(1000)]
    split = choose_split([scan(HASHES, sizes)], 0.1, sampled=[0], sample_bytes=500)
    sampled = [s for h, s in zip(HASHES, sizes, strict=True) if split.in_sample(h)]
    assert 480 < sum(sampled) <= 500
    assert not any(split.in_sample(h) and split.held_out(h) for h in HASHES)


def test_the_tokenizers_sample_has_at_least_one_text_and_all_when_they_fit():
    tiny = choose_split([scan(HASHES)], 0.1, sampled=[0], sample_bytes=1)
    assert sum(map(tiny.in_sample, HASHES)) == 1
    every = choose_split([scan(HASHES)], 0.1, sampled=[0], sample_bytes=10**6)
    assert sum(map(every.in_sample, HASHES)) == 900


def test_a_scan_is_saved_whole_and_a_damaged_one_is_done_again(tmp_path):
    path = tmp_path / "scan.npz"
    first = Scan(
        np.array([1, 2**64 - 1], "u8"), np.array([3, 4]), 2, 1, 1, (Reject("a/b:3", "bäd"),)
    )
    first.save(path)
    loaded = Scan.load(path)
    assert loaded is not None
    assert loaded.rejects == first.rejects
    assert (loaded.bytes, loaded.digest, loaded.empty) == (7, 0, 1)
    path.write_bytes(path.read_bytes()[:-30])
    assert Scan.load(path) is None
    assert Scan.load(tmp_path / "none") is None


def test_another_seed_holds_out_other_texts():
    texts = [str(i).encode() for i in range(100)]
    sides = []
    for seed in (0, 1, -5):
        hashes = [text_hash(data, salt_of(seed)) for data in texts]
        split = choose_split([scan(hashes)], 0.2, sampled=[0], sample_bytes=10**9)
        sides.append([split.held_out(hash_) for hash_ in hashes])
    assert sides[0] != sides[1] != sides[2]


def test_a_split_without_a_limit_samples_everything():
    assert Split(0).in_sample(0)
    assert Split(0).in_sample(2**64 - 1)
    assert not Split(0).held_out(0)
