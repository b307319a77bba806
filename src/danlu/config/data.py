"""`data_pipeline`: where text comes from, how it becomes tokens, in which order they are read."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from danlu.config._block import Auto, Block, Count, Limit, Positive, Text, planned

__all__ = [
    "AugmentationConfig",
    "DataConfig",
    "QualityConfig",
    "SamplingConfig",
    "SourceConfig",
    "TokenizerConfig",
]


class SourceConfig(Block):
    """One place that text comes from."""

    type: str = "files"
    """Kind of source: `files` (a file or folder of text or code), `jsonl`, `parquet`,
    `python_stdlib`."""
    path: str | None = None
    """File or folder; `~` and `$VARIABLES` are expanded. `.gz` and `.zst` files are read as what
    they hold."""
    name: str | None = None
    """Name in reports; the path's last part when left out."""
    include: tuple[str, ...] = ()
    """Only files whose path matches one of these patterns, e.g. `["*.py", "*.md"]`."""
    exclude: tuple[str, ...] = ()
    """Not files whose path matches one of these patterns."""
    text_field: str = "text"
    """Field (JSON lines) or column (Parquet) that holds the text."""
    weight: float = planned(1.0)
    """Share of this source against the others."""

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class TokenizerConfig(Block):
    """How text becomes tokens."""

    type: Literal["bpe", "file", "bytes"] = "bpe"
    """`bpe` (byte-level, trained on the corpus), `file` (any `tokenizer.json`), `bytes` (256 raw
    bytes)."""
    vocab_size: Count = Field(8192, ge=257)
    """Size of a trained vocabulary, with its 256 bytes and the end-of-document token."""
    path: str | None = None
    """The `tokenizer.json` of type `file`, or a folder that holds one."""
    end_token: str | None = None
    """The token of type `file` that ends a document; found by its usual names when left out."""
    training_bytes: Positive = 50_000_000
    """Text used to train a vocabulary; an even sample of the corpus when that is larger."""


class SamplingConfig(Block):
    """Which sample is read next."""

    strategy: Literal["uniform", "difficulty_aware"] = planned(
        "uniform", values=("difficulty_aware",)
    )
    """`uniform`: every sample once an epoch, in an order shuffled by the seed."""
    difficulty_threshold: float = planned(0.7)
    """Loss quantile above which samples count as difficult."""


class AugmentationConfig(Block):
    """Changed copies of samples."""

    text: tuple[str, ...] = planned(())
    """E.g. `["synonym_replacement", "back_translation"]`."""
    image: tuple[str, ...] = planned(())
    """E.g. `["color_jitter", "random_crop"]`."""
    audio: tuple[str, ...] = planned(())
    """E.g. `["noise"]`."""


class QualityConfig(Block):
    """What text must satisfy to be trained on."""

    entropy_threshold: float | None = planned(None)
    """Documents of fewer bits per byte (unigram entropy) are quarantined."""
    duplication_rate: Limit | None = planned(None)
    """Bound on the share of duplicated content, e.g. `<0.05`."""


class DataConfig(Block):
    """Text in, batches of token windows out."""

    sources: tuple[SourceConfig, ...] = Field(
        (SourceConfig(type="python_stdlib", exclude=("encodings",)),), min_length=1
    )
    """Where text comes from; the default is the source code of the Python that runs danlu, without
    the tables of character sets."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""
    validation_fraction: float = Field(0.02, ge=0, lt=1)
    """Share of documents held out, chosen by the hash of their text (so copies stay on one
    side)."""
    folder: Text | Auto = "auto"
    """Where token shards are kept; `auto` is a folder under `$DANLU_HOME`, named by what it was
    made from."""
    shard_bytes: Count = Field(32_000_000, ge=1024)
    """Text that one unit of preparation holds."""
    workers: Annotated[Count, Field(ge=1, le=1024)] | Auto = "auto"
    """Processes that prepare the corpus; `auto` is one a CPU."""
    prefetch: Count = Field(4, ge=1, le=1024)
    """Batches read ahead of the training loop."""
    attention_within_documents: bool = False
    """Whether a token sees only its own document in a window that holds several."""
    bad_file_limit: float = Field(0.1, ge=0, le=1)
    """Share of unreadable files or lines above which preparation stops; below it they are
    quarantined and counted."""
    sampling: SamplingConfig = SamplingConfig()
    """Which sample is read next."""
    augmentation: AugmentationConfig = AugmentationConfig()
    """Changed copies of samples."""
    quality_checks: QualityConfig = QualityConfig()
    """What text must satisfy to be trained on."""
