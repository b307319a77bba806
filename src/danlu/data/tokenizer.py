"""Text to tokens and back: byte-level BPE trained on the corpus, any `tokenizer.json`, raw bytes.

All three are one class around the Hugging Face `tokenizers` library, stored in its own format, so
that what danlu writes opens there too. What is added here is what training needs and the library
leaves to its caller: special tokens never come out of ordinary text, a file's truncation and
dropout cannot eat data, a document of any length fits in memory, and a fingerprint ties token
shards to the tokenizer that made them.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from danlu.base.errors import ConfigError, DataError, closest
from danlu.base.files import atomic_write, write_json
from danlu.config.data import TokenizerConfig
from danlu.config.load import expand_path
from danlu.config.run import fingerprint

__all__ = ["END_TOKEN", "Ids", "Tokenizer", "configured_tokenizer", "tokenizer_threads"]

Ids = npt.NDArray[np.unsignedinteger[Any]]
"""Token ids in the smallest type that holds them: uint16, or uint32 for large vocabularies."""

END_TOKEN: Final = "<|endoftext|>"
"""The token that follows each document, in the tokenizers that danlu makes."""

_USUAL_END_TOKENS = (
    END_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[EOS]", "<EOS>",
    "[SEP]",
)  # fmt: skip

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where merges stop, as in GPT-4 and Llama 3: words, numbers of three digits, indentation."""

_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTES_BY_CHARACTER: Mapping[str, int] = {chr(byte): byte for byte in _VISIBLE} | {
    chr(256 + index): byte for index, byte in enumerate(_HIDDEN)
}
"""How byte-level tokenizers since GPT-2 write bytes as visible characters."""

_LONGEST_TEXT = 1 << 18
_GROUP = 1 << 22
"""Characters in one text given to the library, and in all that are given at once: it keeps about a
hundred bytes a token meanwhile."""


@final
class Tokenizer:
    """A vocabulary and its rules. Made by `train_bpe`, `raw_bytes`, `from_file` or `load`.

    Args:
        rules: the content of a `tokenizer.json`.
        end: the token that ends a document.
        where: the file or key to name when the rules do not work.

    Attributes:
        size: one more than the largest id.
        end: id of the token that ends a document.
        fingerprint: twelve hex digits that name this very tokenizer.

    Raises:
        DataError: rules that are no tokenizer, or that do not hold `end`.
    """

    def __init__(self, rules: Mapping[str, Any], end: str, *, where: str = "tokenizer") -> None:
        self._rules = _without_traps(rules, where)
        self._end_token = end
        self._inner = _build(self._rules, where)
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        if end not in vocabulary:
            raise DataError(where, f"there is no token {end!r}.", closest(end, _special(rules)))
        self._inner.add_special_tokens([tokenizers.AddedToken(end, special=True)])
        self.size: int = max(vocabulary.values()) + 1
        self.end: int = vocabulary[end]
        self.fingerprint: str = fingerprint([self._rules, end])
        self._raw = _is_raw_bytes(self._rules)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type for an id, little-endian: uint16 or uint32."""
        return np.dtype("<u2" if self.size <= 1 << 16 else "<u4")

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, without an end token; special tokens never come out of text.

        Texts of more than 262,144 characters are encoded in pieces that end at line ends, where
        byte-level BPE gives the same tokens as the whole.
        """
        if self._raw:
            return [np.frombuffer(t.encode(), np.uint8).astype(self.dtype) for t in texts]
        parts: list[list[Ids]] = [[] for _ in texts]
        pieces = ((index, piece) for index, t in enumerate(texts) for piece in self._pieces(t))
        for group in _groups(pieces):
            encoded = self._inner.encode_batch_fast([p for _, p in group], add_special_tokens=False)
            for (index, _), encoding in zip(group, encoded, strict=True):
                parts[index].append(np.array(encoding.ids, dtype=self.dtype))
        return [p[0] if len(p) == 1 else np.concatenate(p) for p in parts]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of `ids`; end and other special tokens are left out."""
        numbers = np.asarray(ids, dtype=np.int64)
        if self._raw:
            return numbers[numbers < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")
        return str(self._inner.decode(numbers.tolist(), skip_special_tokens=True))

    def byte_lengths(self) -> npt.NDArray[np.int32]:
        """UTF-8 bytes that each token stands for; shape (size,), 0 for special tokens.

        Exact where the tokenizer is byte-level (the trained ones, raw bytes, the GPT and Llama 3
        families): summed over a text's ids it is the text's size. For others it is that of the
        token's own text, which differs where normalisation changed the text.
        """
        lengths = np.zeros(self.size, dtype=np.int32)
        byte_level = '"ByteLevel"' in json.dumps(self._rules.get("decoder"))
        added = {t["content"]: t["special"] for t in self._rules.get("added_tokens", ())}
        for token, id_ in self._inner.get_vocab(with_added_tokens=True).items():
            if token in added:
                lengths[id_] = 0 if added[token] else len(token.encode())
            else:
                lengths[id_] = len(token) if byte_level else _text_bytes(token)
        lengths[self.end] = 0
        return lengths

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json`, and `tokenizer_config.json` with the end token."""
        end = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self._end_token}
        write_json(folder / "tokenizer_config.json", end)
        with atomic_write(folder / "tokenizer.json") as file:
            json.dump(self._rules, file, ensure_ascii=False)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """The tokenizer that `save` wrote.

        Raises:
            DataError: a file is missing or broken.
        """
        return cls.from_file(folder)

    @classmethod
    def from_file(cls, path: Path, *, end_token: str | None = None) -> "Tokenizer":
        """Any tokenizer in Hugging Face's format.

        Args:
            path: a `tokenizer.json`, or a folder that holds one.
            end_token: the token that ends a document; else the one that a
                `tokenizer_config.json` beside it names, else the first of the usual names.

        Raises:
            DataError: a file is missing or broken, or no end token is found.
        """
        path = path / "tokenizer.json" if path.is_dir() else path
        rules = _read_json(path)
        end = end_token or _named_end(path.parent) or _usual_end(rules, path)
        return cls(rules, end, where=str(path))

    @classmethod
    def raw_bytes(cls) -> "Tokenizer":
        """256 bytes and the end token: no training, the longest sequences."""
        inner = tokenizers.Tokenizer(models.BPE(vocab=dict(_BYTES_BY_CHARACTER), merges=[]))
        inner.pre_tokenizer = _bytes_as_characters()
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens([tokenizers.AddedToken(END_TOKEN, special=True)])
        return cls(json.loads(inner.to_str()), END_TOKEN)

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Byte-level BPE: any text comes back exactly, and the same texts give the same tokens.

        Args:
            texts: what the vocabulary is made for.
            vocab_size: tokens wanted, with the 256 bytes and the end token; fewer come out of a
                text that has fewer repeated pairs.
        """
        inner = tokenizers.Tokenizer(models.BPE())
        words = pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([words, _bytes_as_characters()])
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_TOKEN],
            initial_alphabet=list(_BYTES_BY_CHARACTER),
            show_progress=False,
        )
        inner.train_from_iterator((p for text in texts for p in _cut(text)), trainer)
        return cls(json.loads(inner.to_str()), END_TOKEN)

    def _pieces(self, text: str) -> Iterator[str]:
        """`text` in pieces that are short enough and do not hold the end token.

        The library takes special tokens as text when told to, except those that a vocabulary also
        holds as an ordinary word; cutting inside the name is what always works.
        """
        within = max(1, len(self._end_token) // 2)
        for piece in _cut(text) if len(text) > _LONGEST_TEXT else (text,):
            start = 0
            while (found := piece.find(self._end_token, start)) >= 0:
                yield piece[start : found + within]
                start = found + within
            yield piece[start:]


def configured_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a config that needs no training: raw bytes, or the user's file.

    Raises:
        ConfigError: type `file` without a path.
        DataError: the file is missing or broken, or no end token is found.
    """
    assert config.type != "bpe", "a trained tokenizer comes from a corpus"
    if config.type == "bytes":
        return Tokenizer.raw_bytes()
    if not config.path:
        raise ConfigError(
            "data_pipeline.tokenizer.path", "type file needs one.", "Name a tokenizer.json."
        )
    path = expand_path(config.path, "data_pipeline.tokenizer.path")
    return Tokenizer.from_file(path, end_token=config.end_token)


@contextlib.contextmanager
def tokenizer_threads(*, many: bool) -> Iterator[None]:
    """Whether the tokenizer may use all cores inside the block; a user's own setting wins.

    Afterwards it may not: threads that have run once make the library warn, or hang, in a process
    that is forked later.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = before or ("true" if many else "false")
    try:
        yield
    finally:
        os.environ[name] = before or "false"


def _bytes_as_characters() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _cut(text: str) -> Iterator[str]:
    """`text` in pieces of at most `_LONGEST_TEXT` characters, which end where a line does.

    A line end before a character that is no white space is a boundary of `_WORDS` in any context,
    so the pieces' tokens are the text's. Without one, a space is the next best.
    """
    start = 0
    while len(text) - start > _LONGEST_TEXT:
        window = text[start : start + _LONGEST_TEXT]
        ends = [m.end() - 1 for m in re.finditer(r"\n\S", window[len(window) // 2 :])]
        cut = len(window) // 2 + ends[-1] if ends else window.rfind(" ")
        cut = cut if cut > 0 else len(window)
        yield window[:cut]
        start += cut
    yield text[start:]


def _groups(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Numbered texts in groups that are large enough for threads and small enough for memory."""
    group: list[tuple[int, str]] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece[1])
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _without_traps(rules: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The rules without what serves inference only and would lose or blur training text."""
    if not isinstance(rules.get("model"), dict):
        raise _no_tokenizer(where, "it has no model")
    return {
        **rules,
        "truncation": None,
        "padding": None,
        "model": rules["model"] | ({"dropout": None} if "dropout" in rules["model"] else {}),
    }


def _build(rules: Mapping[str, Any], where: str) -> Any:
    try:
        inner = tokenizers.Tokenizer.from_str(json.dumps(rules))
    except Exception as error:  # the library raises nothing narrower
        raise _no_tokenizer(where, str(error)) from None
    inner.encode_special_tokens = True
    return inner


def _no_tokenizer(where: str, problem: str) -> DataError:
    return DataError(
        where,
        f"this is not a tokenizer ({problem}).",
        "Give a tokenizer.json as the Hugging Face tokenizers library writes it.",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(str(path), "there is no such file.", "Check the path.") from None
    except OSError as error:
        raise DataError(
            str(path), f"it cannot be read ({error.strerror}).", "Check the path."
        ) from None
    except (ValueError, RecursionError) as error:
        raise _no_tokenizer(str(path), f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise _no_tokenizer(str(path), "it is not an object")
    return value


def _special(rules: Mapping[str, Any]) -> list[str]:
    return [str(t["content"]) for t in rules.get("added_tokens", ()) if t.get("special")]


def _named_end(folder: Path) -> str | None:
    """The end token that a `tokenizer_config.json` names, as Hugging Face models have it."""
    path = folder / "tokenizer_config.json"
    named = _read_json(path).get("eos_token") if path.is_file() else None
    name = named.get("content") if isinstance(named, dict) else named
    return name if isinstance(name, str) else None


def _usual_end(rules: Mapping[str, Any], path: Path) -> str:
    vocabulary = _build(_without_traps(rules, str(path)), str(path)).get_vocab()
    for name in _USUAL_END_TOKENS:
        if name in vocabulary:
            return name
    there = ", ".join(_special(rules)[:8]) or "none"
    raise DataError(
        "data_pipeline.tokenizer.end_token",
        f"{path} has none of the usual tokens that end a document.",
        f"Name the one it has (its special tokens: {there}).",
    )


def _is_raw_bytes(rules: Mapping[str, Any]) -> bool:
    """Whether tokens are bytes and nothing else, so that numpy can do the work."""
    model = rules["model"]
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return (
        model.get("vocab") == _BYTES_BY_CHARACTER
        and not model.get("merges")
        and rules.get("normalizer") is None
        and plain.items() <= (rules.get("pre_tokenizer") or {}).items()
    )


def _text_bytes(token: str) -> int:
    """Bytes of text for a token of a tokenizer that is not byte-level."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return 1
    return len(token.removeprefix("##").replace("\u2581", " ").encode())
