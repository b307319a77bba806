"""Random numbers that depend on nothing but the run's seed and what they are for.

There is no global generator to advance: each purpose (a weight's first values, a draw at step 10)
has one of its own, so that layouts, ranks and resumes cannot change one another's numbers.
"""

import hashlib

import torch

__all__ = ["derive_seed", "generator"]


def derive_seed(seed: int, *purpose: object) -> int:
    """A 63-bit seed for one purpose."""
    text = "\x1f".join(map(str, (seed, *purpose)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, *purpose: object) -> torch.Generator:
    """A CPU generator for one purpose, at its start."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))
