"""Which sample is read next, as pure arithmetic: position in, sample out.

A shuffled list of a billion indices takes gigabytes and minutes, a shuffle buffer is lost in a
crash and reads neighbours near one another, and what depends on the number of workers changes when
that does. A keyed permutation has none of this: sample k of an epoch is a block cipher of k. So the
state of reading is one integer, opening takes no time at any size, and every rank computes its
share of the one global order by itself.
"""

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["Order", "Permutation", "windows"]

Indices = npt.NDArray[np.int64]

_ROUNDS = 8
_SMALLEST_DOMAIN_BITS = 6
"""With smaller halves the orders of a handful of samples come out unevenly (measured)."""
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Permutation:
    """A bijection of 0 … size - 1, chosen by a key, computed index by index.

    A Feistel network permutes the smallest power of two that holds `size`; an index that leaves
    the range is sent through again until it is back ("cycle walking", Black and Rogaway 2002),
    fewer than two times on average once `size` is more than 32. Eight rounds mix with the finaliser
    of splitmix64: made to look random, not to keep secrets.

    Args:
        size: number of indices, 1 to 2**62.
        key: any text; another key is another permutation.
    """

    def __init__(self, size: int, key: str) -> None:
        assert 1 <= size <= 1 << 62, f"size {size} is out of range"
        self.size, self.key = size, key
        bits = max((size - 1).bit_length(), _SMALLEST_DOMAIN_BITS)
        self._low, self._high = np.uint64(bits - bits // 2), np.uint64(bits // 2)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, indices: npt.ArrayLike) -> Indices:
        """The images of `indices`, each in 0 … size - 1; any shape, which is kept."""
        asked = np.asarray(indices, dtype=np.int64)
        assert asked.size == 0 or (asked.min() >= 0 and asked.max() < self.size), "out of range"
        values = self._encrypt(asked.astype(np.uint64).reshape(-1))
        while (outside := np.flatnonzero(values >= np.uint64(self.size))).size:
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64).reshape(asked.shape)

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """One pass of the network over all powers of two; halves differ by at most one bit."""
        low_bits, high_bits = self._low, self._high
        one = np.uint64(1)
        low, high = values & ((one << low_bits) - one), values >> low_bits
        for key in self._keys:
            mixed = _mix(low, key) & ((one << high_bits) - one)
            low, high = high ^ mixed, low
            low_bits, high_bits = high_bits, low_bits
        return (high << low_bits) | low


def _mix(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _M1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _M2
    return mixed ^ (mixed >> np.uint64(31))


class Order:
    """The endless sequence of samples: every sample once an epoch, each epoch in another order.

    Args:
        samples: number of samples, 1 or more.
        seed: another seed is another sequence.
    """

    def __init__(self, samples: int, seed: int) -> None:
        assert samples >= 1, "an order needs samples"
        self.samples, self.seed = samples, seed
        self._permutation = lru_cache(maxsize=4)(self._epoch_permutation)

    def _epoch_permutation(self, epoch: int) -> Permutation:
        return Permutation(self.samples, f"{self.seed}/{epoch}")

    def epoch(self, position: int) -> int:
        """The epoch, from 0, that a position of the sequence is in."""
        return position // self.samples

    def at(self, start: int, count: int) -> Indices:
        """The samples at positions start … start + count - 1; shape (count,)."""
        parts = []
        while count > 0:
            epoch, within = divmod(start, self.samples)
            taken = min(count, self.samples - within)
            parts.append(self._permutation(epoch)(np.arange(within, within + taken)))
            start, count = start + taken, count - taken
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def windows(tokens: int, sequence_length: int) -> int:
    """Samples in a stream of `tokens`: windows of `sequence_length` inputs and one more target."""
    return max(0, (tokens - 1) // sequence_length)
