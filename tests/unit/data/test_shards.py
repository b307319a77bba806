import errno
import itertools

import numpy as np
import pytest

from danlu.base.errors import DataError
from danlu.data.corpus import TokenStream
from danlu.data.shards import open_shard, write_shard

U2, U4 = np.dtype("<u2"), np.dtype("<u4")


def write(path, tokens, dtype=U2):
    with write_shard(path, dtype=dtype, tokenizer="0123456789ab") as writer:
        for part in np.array_split(np.array(tokens), 3):
            writer.write(part)
    return open_shard(path)


@pytest.mark.parametrize("dtype", [U2, U4])
def test_tokens_come_back_as_they_were_written(tmp_path, dtype):
    tokens = [0, 1, 65_535, 7] + [70_000] * (dtype == U4)
    shard = write(tmp_path / "a.bin", tokens, dtype)
    shard.verify()
    assert shard.tokens().tolist() == tokens
    assert shard.tokens().dtype == dtype
    assert (shard.length, shard.tokenizer) == (len(tokens), "0123456789ab")


def test_a_shard_that_fails_halfway_leaves_nothing(tmp_path):
    def writes_half() -> None:
        with write_shard(tmp_path / "a", dtype=U2, tokenizer="") as writer:
            writer.write(np.arange(10))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        writes_half()
    assert list(tmp_path.iterdir()) == []


def test_a_shard_on_a_full_disk_leaves_nothing(tmp_path, full_disk):
    full_disk(after=100)
    with pytest.raises(OSError, match="No space") as caught:
        write(tmp_path / "a.bin", range(10_000))
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 10, 63, 64, 65, 83])
def test_a_cut_off_shard_is_one_clear_line(tmp_path, size):
    shard = write(tmp_path / "a.bin", range(10))
    shard.path.write_bytes(shard.path.read_bytes()[:size])
    with pytest.raises(DataError, match="cut off") as caught:
        open_shard(shard.path)
    assert str(shard.path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_shard_that_grew_a_missing_one_and_a_foreign_file_are_refused(tmp_path):
    shard = write(tmp_path / "a.bin", range(10))
    with open(shard.path, "ab") as file:
        file.write(b"xx")
    with pytest.raises(DataError, match="cut off"):
        open_shard(shard.path)
    with pytest.raises(DataError, match="missing"):
        open_shard(tmp_path / "b.bin")
    (tmp_path / "c.bin").write_bytes(b"something else" * 100)
    with pytest.raises(DataError, match="not a token shard"):
        open_shard(tmp_path / "c.bin")


def test_a_flipped_bit_is_found_by_verify(tmp_path):
    shard = write(tmp_path / "a.bin", range(10))
    data = bytearray(shard.path.read_bytes())
    data[70] ^= 1
    shard.path.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        open_shard(shard.path).verify()


def test_a_stream_reads_across_shards_as_if_they_were_one(tmp_path):
    tokens = np.arange(100, dtype=U2)
    cuts = [0, 1, 1, 40, 41, 100]
    shards = [write(tmp_path / f"{a}-{b}", tokens[a:b]) for a, b in itertools.pairwise(cuts)]
    stream = TokenStream(shards, U2)
    assert len(stream) == 100
    for start in range(101):
        for count in (0, 1, 2, 39, 60, 100 - start):
            if start + count <= 100:
                assert stream.read(start, count).tolist() == list(range(start, start + count))


def test_a_stream_keeps_few_files_open_and_reads_on_from_threads(tmp_path, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr("danlu.data.corpus._MOST_OPEN", 3)
    shards = [write(tmp_path / f"{i:02d}", np.full(10, i)) for i in range(20)]
    stream = TokenStream(shards, U2)
    with ThreadPoolExecutor(4) as pool:
        reads = list(pool.map(lambda i: stream.read((i * 37) % 190, 10).tolist(), range(200)))
    assert all(r == [((i * 37) % 190 + k) // 10 for k in range(10)] for i, r in enumerate(reads))
    assert stream._mapped.cache_info().currsize == 3


def test_an_empty_stream_has_length_0():
    assert len(TokenStream([], U2)) == 0
    assert TokenStream([], U2).read(0, 0).size == 0
