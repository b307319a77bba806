"""What every peer trains: one model, one batch shape, one optimizer setting.

The model is a Llama-style decoder (RMSNorm, rotary positions, SwiGLU, no bias, untied head), which
each tool can build from its own parts with the same number of parameters. No torch here: the
parent process measures without it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Workload:
    """One model size with its batch and optimizer; the same for every peer of a run."""

    model: str
    vocab: int
    dim: int
    layers: int
    heads: int
    ffn: int
    sequence: int
    batch: int
    threads: int = 2
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    data_seed: int = 1234
    weight_seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens trained on in one optimizer step."""
        return self.batch * self.sequence

    @property
    def matmul_parameters(self) -> int:
        """Weights that take part in a matrix product: the head counts, the look-up does not."""
        per_layer = 4 * self.dim**2 + 3 * self.dim * self.ffn
        return self.layers * per_layer + self.vocab * self.dim

    @property
    def parameters(self) -> int:
        """All weights of the model; every peer must build exactly as many."""
        norms = (2 * self.layers + 1) * self.dim
        return self.matmul_parameters + self.vocab * self.dim + norms

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6 a weight, and causal attention at half of 12 x L x d x T."""
        return 6 * self.matmul_parameters + 6 * self.layers * self.dim * self.sequence

    def to_json(self) -> str:
        """The workload as a runner gets it on its command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Undo ``to_json``."""
        return cls(**json.loads(text))


PRESETS = {
    "28m": Workload("28m", 8192, 512, 6, 8, 1408, sequence=512, batch=4),
    "10m": Workload("10m", 8192, 256, 8, 4, 704, sequence=256, batch=8),
    # Only for checking that everything still starts: far too small to time.
    "tiny": Workload("tiny", 512, 64, 2, 2, 176, sequence=64, batch=4),
}
