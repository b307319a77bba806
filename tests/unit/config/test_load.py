import json

import pytest

from danlu.base.errors import ConfigError, NotAvailableError
from danlu.config.describe import reference, schema
from danlu.config.load import expand_path, load, require_available, split_words
from danlu.config.model import PRESETS

LAYOUT = {
    "tensor_parallel": {"degree": 8, "split_layers": [17, 23, 29]},
    "pipeline_parallel": {"stages": 5, "micro_batches": 16},
    "zero_optimization": {"stage": 3, "offload_ratio": 0.3},
}
DATA = """
data_pipeline:
  sampling: {strategy: "difficulty_aware", difficulty_threshold: 0.7}
  augmentation:
    text: ["synonym_replacement", "back_translation"]
    image: ["color_jitter", "random_crop"]
  quality_checks: {entropy_threshold: 1.8, duplication_rate: <0.05}
"""


def test_three_lines_are_a_whole_run(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {preset: tiny}\n"
        "data_pipeline: {sources: [{type: files, path: books/}]}\n"
        "train: {steps: 1000}\n"
    )
    config = load(path)
    assert (config.name, config.train.steps, config.model.preset) == ("run", 1000, "tiny")


def test_the_articles_texts_load_word_for_word(tmp_path):
    config = load(json.loads(json.dumps(LAYOUT)))
    assert config.tensor_parallel.split_layers == (17, 23, 29)
    assert (config.pipeline_parallel.stages, config.zero_optimization.offload_ratio) == (5, 0.3)
    path = tmp_path / "data.yaml"
    path.write_text(DATA)
    pipeline = load(path).data_pipeline
    assert pipeline.sampling.difficulty_threshold == 0.7
    assert pipeline.augmentation.image == ("color_jitter", "random_crop")
    assert pipeline.quality_checks.duplication_rate.holds(0.04)


def test_what_is_not_built_yet_is_refused_not_ignored(tmp_path):
    with pytest.raises(NotAvailableError, match=r"precision.format: fp16 is not available yet"):
        require_available(load(None, "precision.format=fp16"))
    path = tmp_path / "data.yaml"
    path.write_text(DATA)
    with pytest.raises(NotAvailableError, match=r"sampling.strategy: difficulty_aware .* uniform"):
        require_available(load(path))
    require_available(load())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.stps=3", "train.stps: there is no such key. Did you mean steps?"),
        ("trian.steps=3", "trian: there is no such key. Did you mean train?"),
        ("train.steps=abc", "train.steps: 'abc' is not understood"),
        ("train.steps=0", "train.steps: 0 is not possible. Write at least 1 or auto."),
        ("train.steps=-5", "train.steps: -5 is not a whole number of 0 or more, or auto."),
        ("train.duration=10 parsecs", "train.duration: '10 parsecs' is not understood"),
        ("train=3", "train: 3 is not possible. Write a block of keys."),
        ("optimizer.learning_rate=x", "optimizer.learning_rate: 'x' is not possible. Write a num"),
        ("optimizer.beta1=1.5", "optimizer.beta1: 1.5 is not possible. Write less than 1.0."),
        ("data_pipeline.sources=[]", "data_pipeline.sources: [] is not possible."),
        ("data_pipeline.sources=[{pth: x}]", "sources[0].pth: there is no such key. Did you mea"),
        ("model.preset=smal", "model.preset: there is no preset 'smal'. Did you mean small?"),
        ("precision.format=fp99", "Write auto, fp32, bf16, fp16 or fp8."),
        ("kernels.compile=maybe", "kernels.compile: 'maybe' is not possible. Write true or fal"),
        ("data_pipeline.quality_checks.duplication_rate=0.05", "write for example <0.05"),
        ("train.steps.x=3", "train.steps: {'x': 3} is not understood"),
        ("data_pipeline.sources[4].path=x", "there is no entry '4'"),
        ("nonsense", "nonsense: this is not key=value."),
        ("train.seed={", "train.seed: "),
        ("train.steps=", "train.steps: an empty value is not understood; write for example 1000"),
        ("folder=", "folder: an empty value is not possible. Write text or auto."),
        ('folder=""', "folder: '' is not possible. Write at least one character or auto."),
        ("...=1", "...: this is not a key."),
        ("data_pipeline.sources[].path=x", "Write data_pipeline.sources[0].path=… for the first"),
        ("data_pipeline.sources[²].path=x", "there is no entry '²'"),
        ("data_pipeline.sources[" + "9" * 5000 + "].path=x", "there is no entry"),
    ],
)
def test_a_wrong_key_or_value_is_one_clear_line(word, message):
    with pytest.raises(ConfigError) as caught:
        load({"data_pipeline": {"sources": [{"type": "files"}]}}, word)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_file_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no such file. Did you mean run.yaml\?"):
        (tmp_path / "run.yaml").write_text("train: {steps: 1}")
        load(tmp_path / "rum.yaml")
    for text, message in [
        ("train: {steps: 1", "line 1"),
        ("train: {steps: 1}\ntrain: {seed: 2}", "'train' is written twice"),
        ("- a", "holds no keys"),
        ("", "the file is empty"),
        ("# nothing yet\n", "the file is empty"),
        ("? [a]\n: 1", "line 1, column 3: a key cannot be a list or a block"),
        ("train: {1: 2, true: 3}", "train: the key 1 is not text"),
        ("name: 2024-13-45", "a value cannot be read .month must be in 1..12."),
        ("name: " + "[" * 3000, "nested too deeply"),
        ('monitor: {sample_prompts: ["\\ud800"]}', r"sample_prompts\[0\]: .* is not valid text"),
    ]:
        path = tmp_path / "broken.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(path)
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path)


def test_a_path_that_cannot_be_looked_at_is_one_clear_line(tmp_path):
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(ConfigError, match="cannot be read|no such file"):
            load(tmp_path / name)


def test_keys_merged_from_an_anchor_yield_to_those_written_in_place(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: {<<: {steps: 5, seed: 1}, seed: 2}")
    assert (load(path).train.steps, load(path).train.seed) == (5, 2)


def test_overrides_win_over_the_file_and_read_units(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 1, seed: 2}")
    config = load(path, "train.steps=2k", "memory.limit=4GiB", "train.duration=1h 30min")
    assert (config.train.steps, config.train.seed) == (2000, 2)
    assert (config.memory.limit, config.train.duration) == (4 * 2**30, 5400)


def test_a_config_is_frozen_and_its_fingerprint_follows_its_content():
    config = load()
    with pytest.raises(Exception, match="frozen"):
        config.train.seed = 3
    assert config.fingerprint() == load().fingerprint()
    assert config.fingerprint() != load(None, "train.seed=1").fingerprint()


def test_the_config_survives_its_own_file():
    config = load(DATA and {"name": "x"}, "data_pipeline.quality_checks.duplication_rate=<0.05")
    assert load(config.to_dict()) == config


def test_words_are_one_file_and_overrides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert split_words(["a=1", "run.yaml", "b=2"]) == ("run.yaml", ["a=1", "b=2"])
    assert split_words([]) == (None, [])
    with pytest.raises(ConfigError, match=r"train.steps: this key has no value. Write train.steps"):
        split_words(["run.yaml", "train.steps"])
    with pytest.raises(ConfigError, match=r"b.yaml: this is a second config file"):
        split_words(["a.yaml", "b.yaml"])
    (tmp_path / "model.yaml").write_text("")
    assert split_words(["model.yaml"]) == ("model.yaml", [])


def test_variables_and_home_folders_in_a_path_are_replaced_or_refused(monkeypatch):
    monkeypatch.setenv("PLACE", "/there")
    assert str(expand_path("$PLACE/${PLACE}/5$/$", "folder")) == "/there/there/5$/$"
    for text, message in [
        ("$NOT_SET/x", r"needs \$NOT_SET, which is not set. export NOT_SET=…"),
        ("${NOT_SET}/x", r"needs \$NOT_SET, which is not set"),
        ("~nobody-of-that-name/x", "the home folder in .* is not known"),
        ("a\0b", "holds a zero byte"),
    ]:
        with pytest.raises(ConfigError, match=message):
            expand_path(text, "folder")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_model_of_about_its_name_s_size(preset):
    shape = load({"model": {"preset": preset}}).model.shape(32_000)
    assert shape.heads % shape.kv_heads == 0
    assert shape.hidden_size == shape.heads * shape.head_size
    if preset[:-1].isdigit():
        size = int(preset[:-1]) * {"m": 1e6, "b": 1e9}[preset[-1]]
        assert 0.7 * size < shape.parameters < 2.0 * size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.hidden_size=1",), r"model.hidden_size: 1 cannot be cut into heads of an even"),
        (("model.hidden_size=1e12", "model.heads=7"), r"model.heads: 7 does not divide"),
        (("model.heads=5",), r"model.heads: 5 does not divide hidden_size 256. Use one of"),
        (("model.kv_heads=3",), r"model.kv_heads: 3 does not divide 4 heads. Use 1, 2, 4."),
        (("model.head_size=33",), r"model.head_size: 33 is odd."),
        (("model.vocab_size=100",), r"model.vocab_size: 100 is smaller than the tokenizer's"),
        (("model.sequence_length=1",), r"model.sequence_length: 1 is too short."),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        load(None, *words).model.shape(8192)


def test_the_schema_and_the_reference_cover_every_block():
    tree = schema()
    assert tree["$schema"].startswith("https://json-schema.org")
    page = reference()
    for block in load().to_dict():
        assert f"`{block}`" in page
        assert block in tree["properties"]
    assert "*Not yet.*" in page
