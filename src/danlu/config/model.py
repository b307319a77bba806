"""`model`: the transformer's shape, by preset or by number."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import Field, field_validator

from danlu.base.errors import ConfigError, closest
from danlu.base.facts import ModelShape
from danlu.config._block import Auto, Block, Positive, PositiveNumber

__all__ = ["PRESETS", "ModelConfig"]


def _shape(
    hidden: int, layers: int, heads: int, intermediate: int, context: int, **more: float
) -> Mapping[str, float]:
    values = {"hidden_size": hidden, "layers": layers, "heads": heads, "kv_heads": heads}
    values |= {"intermediate_size": intermediate, "sequence_length": context}
    return MappingProxyType(values | {"tied_embeddings": False, "rope_theta": 10000.0} | more)


PRESETS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "tiny": _shape(96, 4, 3, 256, 256, tied_embeddings=True),
        "small": _shape(256, 8, 4, 704, 256),
        "30m": _shape(512, 6, 8, 1408, 512),
        "125m": _shape(768, 12, 12, 2048, 1024),
        "350m": _shape(1024, 24, 16, 2816, 2048),
        "1b": _shape(2048, 16, 32, 8192, 4096, kv_heads=8, rope_theta=5e5, tied_embeddings=True),
        "3b": _shape(3072, 28, 24, 8192, 4096, kv_heads=8, rope_theta=5e5, tied_embeddings=True),
        "7b": _shape(4096, 32, 32, 11008, 4096),
        "8b": _shape(4096, 32, 32, 14336, 8192, kv_heads=8, rope_theta=5e5),
        "13b": _shape(5120, 40, 40, 13824, 4096),
        "34b": _shape(8192, 48, 64, 22016, 4096, kv_heads=8, rope_theta=1e6),
        "70b": _shape(8192, 80, 64, 28672, 8192, kv_heads=8, rope_theta=5e5),
        "175b": _shape(12288, 96, 96, 32768, 2048),
    }
)
"""Shapes by name, about 1 M to 175 B parameters. 1b, 3b, 8b and 70b are Llama 3's, 7b and 13b Llama
2's, 34b Code Llama's; 175b is GPT-3's width and depth with a SwiGLU feed-forward of the same
size."""

_VOCAB_MULTIPLE = 64


class ModelConfig(Block):
    """The transformer; any number written here replaces the preset's."""

    preset: str = "small"
    """A shape by name, from `tiny` (1 M parameters) to `175b`."""
    vocab_size: Positive | Auto = "auto"
    """Tokens in the embedding; `auto` is the tokenizer's size rounded up to a multiple of 64."""
    hidden_size: Positive | Auto = "auto"
    """Width of the residual stream."""
    layers: Annotated[Positive, Field(le=10_000)] | Auto = "auto"
    """Number of blocks."""
    heads: Positive | Auto = "auto"
    """Query heads."""
    kv_heads: Positive | Auto = "auto"
    """Key/value heads (grouped-query attention when fewer than `heads`)."""
    head_size: Positive | Auto = "auto"
    """Width of a head; `auto` is `hidden_size / heads`."""
    intermediate_size: Positive | Auto = "auto"
    """Width of the SwiGLU feed-forward."""
    sequence_length: Positive | Auto = "auto"
    """Tokens in a training sequence."""
    tied_embeddings: bool | Auto = "auto"
    """Whether input embedding and output head are one matrix."""
    rope_theta: PositiveNumber | Auto = "auto"
    """Base of the rotary position frequencies."""
    norm_epsilon: float = Field(1e-5, gt=0)
    """Added to the mean square in RMSNorm."""

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, name: str) -> str:
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}. {closest(name, PRESETS)}")
        return name

    def shape(self, tokenizer_size: int) -> ModelShape:
        """Every number of the model.

        Args:
            tokenizer_size: number of tokens the tokenizer knows (used when `vocab_size` is `auto`).

        Raises:
            ConfigError: numbers that do not go together.
        """
        preset = PRESETS[self.preset]
        number = {
            name: preset[name] if getattr(self, name) == "auto" else getattr(self, name)
            for name in preset
        }
        if self.heads != "auto" and self.kv_heads == "auto":
            number["kv_heads"] = self.heads
        vocab = -(-tokenizer_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        if self.vocab_size != "auto":
            vocab = self.vocab_size
        shape = ModelShape(
            vocab_size=vocab,
            hidden_size=int(number["hidden_size"]),
            layers=int(number["layers"]),
            heads=int(number["heads"]),
            kv_heads=int(number["kv_heads"]),
            head_size=self._head_size(int(number["hidden_size"]), int(number["heads"])),
            intermediate_size=int(number["intermediate_size"]),
            sequence_length=int(number["sequence_length"]),
            tied_embeddings=bool(number["tied_embeddings"]),
            rope_theta=float(number["rope_theta"]),
            norm_epsilon=self.norm_epsilon,
        )
        _check(shape, tokenizer_size)
        return shape

    def _head_size(self, hidden: int, heads: int) -> int:
        if self.head_size != "auto":
            return self.head_size
        if heads < 1 or hidden % heads:
            if hidden % 2:
                raise ConfigError(
                    "model.hidden_size",
                    f"{hidden} cannot be cut into heads of an even width.",
                    "Use an even number, e.g. a multiple of 64, or set model.head_size.",
                )
            fits = ", ".join(map(str, _divisors(hidden // 2)))
            raise ConfigError(
                "model.heads",
                f"{heads} does not divide hidden_size {hidden}.",
                f"Use one of {fits}, or set model.head_size.",
            )
        return hidden // heads


def _divisors(number: int) -> list[int]:
    """The twelve smallest divisors that are at most 1024."""
    return [d for d in range(1, min(number, 1024) + 1) if number % d == 0][:12]


def _check(shape: ModelShape, tokenizer_size: int) -> None:
    for name in ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size"):
        if getattr(shape, name) < 1:
            raise ConfigError(
                f"model.{name}", f"{getattr(shape, name)} is not possible.", "Use 1 or more."
            )
    if shape.sequence_length < 2:
        raise ConfigError(
            "model.sequence_length", f"{shape.sequence_length} is too short.", "Use 2 or more."
        )
    if shape.heads % shape.kv_heads:
        raise ConfigError(
            "model.kv_heads",
            f"{shape.kv_heads} does not divide {shape.heads} heads.",
            f"Use {', '.join(map(str, _divisors(shape.heads)))}.",
        )
    if shape.head_size % 2:
        raise ConfigError(
            "model.head_size",
            f"{shape.head_size} is odd.",
            "Rotary positions need an even head_size.",
        )
    if shape.vocab_size < tokenizer_size:
        raise ConfigError(
            "model.vocab_size",
            f"{shape.vocab_size} is smaller than the tokenizer's {tokenizer_size} tokens.",
            "Leave it out, or train a smaller tokenizer (data_pipeline.tokenizer.vocab_size).",
        )
