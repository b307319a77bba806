import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.base.errors import DataError
from danlu.data.tokenizer import END_TOKEN, Tokenizer

CORPUS = ["def forge(pill):\n    return [pill] * 1234\n", "naïve 漢字 😀\r\n\t" * 5, "a" * 50] * 20
TRAINED = Tokenizer.train_bpe(CORPUS, 400)
RAW = Tokenizer.raw_bytes()


@pytest.fixture(params=["trained", "raw"])
def tokenizer(request) -> Tokenizer:
    return {"trained": TRAINED, "raw": RAW}[request.param]


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_exactly(text):
    for tokenizer in (TRAINED, RAW):
        (ids,) = tokenizer.encode_batch([text])
        assert tokenizer.decode(ids) == text
        assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())


@settings(deadline=None)
@given(st.lists(st.sampled_from([END_TOKEN, "<|endof", "text|>", " ", "<|", "\n"])))
def test_the_end_token_never_comes_out_of_text(parts):
    for tokenizer in (TRAINED, RAW):
        (ids,) = tokenizer.encode_batch(["".join(parts)])
        assert tokenizer.end not in ids.tolist()
        assert tokenizer.decode(ids) == "".join(parts)


def test_the_end_token_is_not_shown_and_stands_for_no_bytes(tokenizer):
    (ids,) = tokenizer.encode_batch(["ab"])
    assert tokenizer.decode([*ids, tokenizer.end, *ids]) == "abab"
    assert tokenizer.byte_lengths()[tokenizer.end] == 0
    assert tokenizer.byte_lengths().shape == (tokenizer.size,)


def test_the_same_texts_train_the_same_tokenizer():
    again, other = Tokenizer.train_bpe(CORPUS, 400), Tokenizer.train_bpe(CORPUS[1:2], 400)
    assert again.fingerprint == TRAINED.fingerprint != other.fingerprint


def test_the_vocabulary_is_no_larger_than_asked():
    assert TRAINED.size <= 400
    assert Tokenizer.train_bpe(CORPUS, 257).size == 257
    assert RAW.size == 257
    assert RAW.end == 256


def test_a_saved_tokenizer_is_the_same_one(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.size, loaded.end, loaded.dtype) == (tokenizer.size, tokenizer.end, "<u2")
    assert np.array_equal(loaded.encode_batch(CORPUS)[1], tokenizer.encode_batch(CORPUS)[1])


def test_raw_bytes_are_the_bytes_and_open_in_the_library_too(tmp_path):
    from tokenizers import Tokenizer as Library

    RAW.save(tmp_path)
    text = "é\x00\n漢"
    (ids,) = RAW.encode_batch([text])
    assert ids.tolist() == list(text.encode())
    assert Library.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == ids.tolist()


def test_a_long_text_gives_the_tokens_of_the_whole(monkeypatch):
    text = "".join(CORPUS[:2]) * 40
    (whole,) = TRAINED.encode_batch([text])
    monkeypatch.setattr("danlu.data.tokenizer._LONGEST_TEXT", 100)
    (pieces,) = TRAINED.encode_batch([text])
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize("text", ["x" * 1000, "  " * 500, "one " * 250, "\n" * 1000])
def test_a_long_text_without_a_good_place_to_cut_still_comes_back(monkeypatch, text):
    monkeypatch.setattr("danlu.data.tokenizer._LONGEST_TEXT", 100)
    (ids,) = TRAINED.encode_batch([text])
    assert TRAINED.decode(ids) == text


def rules(**changes: object) -> dict[str, object]:
    words = {"<unk>": 0, "furnace": 1, "pill": 2, "the": 3, "</s>": 4, "<end>": 5}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    } | changes


def write(folder, value):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(value))
    return path


def test_a_file_is_found_by_itself_or_by_its_folder(tmp_path):
    path = write(tmp_path, rules())
    by_file, by_folder = Tokenizer.from_file(path), Tokenizer.from_file(tmp_path)
    assert by_file.fingerprint == by_folder.fingerprint
    assert by_file.encode_batch(["the pill"])[0].tolist() == [3, 2]


def test_the_end_token_is_the_named_one_else_the_models_else_a_usual_one(tmp_path):
    path = write(tmp_path, rules())
    assert Tokenizer.from_file(path).end == 4
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert Tokenizer.from_file(path).end == 5
    assert Tokenizer.from_file(path, end_token="pill").end == 2


def test_a_word_that_is_also_the_end_token_does_not_come_out_of_text(tmp_path):
    tokenizer = Tokenizer.from_file(write(tmp_path, rules()), end_token="pill")
    assert 2 not in tokenizer.encode_batch(["the pill the"])[0].tolist()


def test_a_files_limit_on_length_does_not_eat_text(tmp_path):
    limit = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.from_file(write(tmp_path, rules(truncation=limit)))
    assert len(tokenizer.encode_batch(["the pill the pill the"])[0]) == 5


def test_dropout_of_a_file_does_not_blur_tokens(tmp_path):
    TRAINED.save(tmp_path)
    value = json.loads((tmp_path / "tokenizer.json").read_text())
    value["model"]["dropout"] = 0.9
    noisy = Tokenizer.from_file(write(tmp_path, value))
    assert np.array_equal(noisy.encode_batch(CORPUS)[0], TRAINED.encode_batch(CORPUS)[0])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file"),
        ("{", "not a tokenizer"),
        ("[1]", "not a tokenizer"),
        ('{"model": 3}', "not a tokenizer"),
        ('{"model": {"type": "BPE"}}', "not a tokenizer"),
        (json.dumps(rules(pre_tokenizer={"type": "Nonsense"})), "not a tokenizer"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_one_clear_line(tmp_path, content, problem):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=problem) as caught:
        Tokenizer.from_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_an_end_token_says_how_to_name_one(tmp_path):
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, "<fin>": 1}, "unk_token": "<unk>"}
    path = write(tmp_path, rules(model=model))
    with pytest.raises(DataError, match=r"data_pipeline\.tokenizer\.end_token"):
        Tokenizer.from_file(path)
    with pytest.raises(DataError, match="there is no token '<fine>'"):
        Tokenizer.from_file(path, end_token="<fine>")


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    words = {f"w{i}": i for i in range(70_000)} | {"<unk>": 70_000, "</s>": 70_001}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    tokenizer = Tokenizer.from_file(write(tmp_path, rules(model=model)))
    (ids,) = tokenizer.encode_batch(["w69999 w1"])
    assert ids.dtype == "<u4"
    assert ids.tolist() == [69_999, 1]
