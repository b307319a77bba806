import itertools
import threading

import numpy as np
import pytest
import torch

from danlu.base.errors import ConfigError, DataError
from danlu.data.corpus import TokenStream
from danlu.data.loader import Batch, Loader, evaluation_windows, training_order
from danlu.data.order import windows
from danlu.data.shards import open_shard, write_shard

T = 8


@pytest.fixture
def stream(tmp_path) -> TokenStream:
    """1,000 tokens that name their own position, in four shards."""
    for index in range(4):
        path = tmp_path / f"{index}.bin"
        with write_shard(path, dtype=np.dtype("<u2"), tokenizer="t") as writer:
            writer.write(np.arange(250 * index, 250 * (index + 1)))
    shards = [open_shard(tmp_path / f"{index}.bin") for index in range(4)]
    return TokenStream(shards, np.dtype("<u2"))


@pytest.fixture
def load(stream):
    """Makes loaders of `stream` and closes them."""
    made: list[Loader] = []

    def make(**keys) -> Loader:
        usual = {"batch_sequences": 24, "micro_batch": 3, "rank": 0, "world": 1, "prefetch": 2}
        order = training_order(stream, sequence_length=T, seed=keys.pop("seed", 1))
        made.append(Loader(stream, order, sequence_length=T, **(usual | keys)))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def samples(batches: tuple[Batch, ...]) -> list[int]:
    """Which windows a step's batches are, told from their first tokens."""
    assert all(int(row[0]) % T == 0 for batch in batches for row in batch.ids_bt)
    return [int(row[0]) // T for batch in batches for row in batch.ids_bt]


def steps(loader: Loader, count: int) -> list[list[int]]:
    return [samples(loader.next_step()) for _ in range(count)]


def test_a_batch_holds_windows_and_the_token_after_each(load):
    for batch in load().next_step():
        assert batch.ids_bt.shape == batch.targets_bt.shape == (3, T)
        assert batch.tokens == 3 * T
        assert batch.ids_bt.dtype == batch.targets_bt.dtype == torch.int64
        assert torch.equal(batch.targets_bt, batch.ids_bt + 1)
        assert batch.starts_bt is None


@pytest.mark.parametrize("prefetch", [1, 5])
@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_any_number_of_ranks_reads_the_same_samples_none_twice_none_lost(
    load, world, micro_batch, prefetch
):
    # 124 windows an epoch; 72 sequences a step do not divide them, so epochs end inside steps.
    keys = {"micro_batch": micro_batch, "prefetch": prefetch, "batch_sequences": 72}
    ranks = [load(rank=rank, world=world, **keys) for rank in range(world)]
    count = 2 * 124 // 72 + 1
    per_rank = [steps(rank, count) for rank in ranks]
    together = [[i for own in per_rank for i in own[step]] for step in range(count)]
    assert together == steps(load(batch_sequences=72), count)
    for epoch in range(2):
        flat = list(itertools.chain(*together))[124 * epoch : 124 * (epoch + 1)]
        assert sorted(flat) == list(range(124))


@pytest.mark.parametrize("done", [0, 1, 4, 5, 6, 10, 11, 30])
def test_resume_gives_the_same_next_batch(load, done):
    # Step 5 (positions 120 to 143) holds the end of the first epoch, step 10 that of the second.
    whole = load()
    steps(whole, done)
    state = whole.state()
    assert state["position"] == whole.position == 24 * done
    resumed = load(position=state["position"], world=2, rank=1, micro_batch=2, prefetch=4)
    for _ in range(3):
        assert samples(resumed.next_step()) == samples(whole.next_step())[12:]


def test_resume_goes_on_with_another_batch_size(load):
    first = load(batch_sequences=24)
    read = steps(first, 3)
    then = load(batch_sequences=6, position=first.position)
    read += steps(then, 4)
    assert [*itertools.chain(*read)] == [*itertools.chain(*steps(load(), 4))]


def test_the_state_is_a_few_integers(load):
    loader = load(seed=5)
    loader.next_step()
    state = {"position": 24, "samples": 124, "seed": 5, "sequence_length": T}
    assert loader.state() == state


def test_another_seed_is_another_order(load):
    assert steps(load(seed=1), 1) != steps(load(seed=2), 1)


def test_a_document_starts_after_the_end_token(stream, load):
    # Token 20 is at position 4 of window 2: from position 5 on there is another document.
    loader = load(document_starts=20)
    rows = {
        int(ids[0]) // T: starts.tolist()
        for _ in range(6)
        for batch in loader.next_step()
        for ids, starts in zip(batch.ids_bt, batch.starts_bt, strict=True)
    }
    assert rows[2] == [0, 0, 0, 0, 0, 5, 5, 5]
    assert all(row == [0] * T for window, row in rows.items() if window != 2)


@pytest.mark.parametrize(
    ("ids", "starts"),
    [
        ([9, 1, 9, 9, 2, 3], [0, 1, 1, 3, 4, 4]),  # an end token belongs to what it ends
        ([1, 2, 3, 4, 5, 9], [0, 0, 0, 0, 0, 0]),
        ([9, 9, 9, 9, 9, 9], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_document_starts_are_right(tmp_path, ids, starts):
    with write_shard(tmp_path / "a", dtype=np.dtype("<u2"), tokenizer="t") as writer:
        writer.write(np.array([*ids, 0]))
    stream = TokenStream([open_shard(tmp_path / "a")], np.dtype("<u2"))
    (batch,) = evaluation_windows(
        stream, sequence_length=6, micro_batch=1, tokens=6, document_starts=9
    )
    assert batch.starts_bt is not None
    assert batch.starts_bt.dtype == torch.int32
    assert batch.starts_bt.tolist() == [starts]


def test_sequences_that_do_not_split_evenly_are_one_clear_line(load):
    with pytest.raises(ConfigError, match=r"24 sequences .* 5 on 1 ranks\. Use a multiple of 5"):
        load(micro_batch=5)
    with pytest.raises(ConfigError, match="multiple of 12"):
        load(batch_sequences=6, micro_batch=3, world=4)


def test_a_stream_shorter_than_a_window_is_one_clear_line(stream):
    with pytest.raises(DataError, match="1000 tokens, fewer than the 1001 of one window"):
        training_order(stream, sequence_length=1000, seed=0)


def test_an_error_while_reading_ahead_surfaces_and_nothing_is_skipped(stream, load, monkeypatch):
    loader = load(prefetch=2)
    expected = steps(load(), 4)
    good = [samples(loader.next_step())]
    read, broken = TokenStream.read, threading.Event()
    broken.set()

    def failing(self, start, count):
        if broken.is_set():
            raise OSError("the disk is gone")
        return read(self, start, count)

    monkeypatch.setattr(TokenStream, "read", failing)
    while loader.position < 24 * 6:
        try:
            good.append(samples(loader.next_step()))
        except OSError:
            break
    before = loader.position
    with pytest.raises(OSError, match="the disk is gone"):
        loader.next_step()
    assert loader.position == before == 24 * len(good)
    assert good == expected[: len(good)]


def test_close_ends_the_reading_thread(load):
    loader = load(prefetch=4)
    names = [t.name for t in threading.enumerate() if t.name.startswith("danlu-loader")]
    assert names
    loader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("danlu-loader")]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 40])
def test_evaluation_reads_the_same_spread_windows_on_any_number_of_ranks(stream, world):
    keys = {"sequence_length": T, "micro_batch": 4, "tokens": 100, "world": world}
    shares = [evaluation_windows(stream, rank=rank, **keys) for rank in range(world)]
    there = windows(1000, T)
    spread = [i * there // 13 for i in range(13)]
    assert sorted(i for share in shares for i in samples(share)) == spread
    sizes = [sum(batch.tokens for batch in share) // T for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert all(len(batch.ids_bt) <= 4 for share in shares for batch in share)


def test_evaluation_of_more_tokens_than_there_are_reads_all_once(stream):
    batches = evaluation_windows(stream, sequence_length=T, micro_batch=50, tokens=10**9)
    assert samples(batches) == list(range(windows(1000, T)))


@pytest.mark.parametrize(("length", "shape"), [(0, None), (1, None), (2, 1), (5, 4), (9, 8)])
def test_evaluation_of_a_short_stream_is_one_short_window(tmp_path, length, shape):
    shards = []
    if length:
        with write_shard(tmp_path / "a", dtype=np.dtype("<u2"), tokenizer="t") as writer:
            writer.write(np.arange(length))
        shards = [open_shard(tmp_path / "a")]
    batches = evaluation_windows(
        TokenStream(shards, np.dtype("<u2")), sequence_length=T, micro_batch=4, tokens=64
    )
    assert [tuple(batch.ids_bt.shape) for batch in batches] == ([(1, shape)] if shape else [])
