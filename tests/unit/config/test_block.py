"""Numbers that cannot be: not finite, not a number at all, or beyond what any run can use."""

import pytest

from danlu.base.errors import ConfigError
from danlu.config.load import load


@pytest.mark.parametrize(
    "key",
    [
        "optimizer.learning_rate",
        "optimizer.weight_decay",
        "optimizer.beta1",
        "optimizer.epsilon",
        "optimizer.gradient_clip",
        "model.rope_theta",
        "model.norm_epsilon",
        "schedule.final_factor",
        "data_pipeline.validation_fraction",
    ],
)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (".nan", "Write a finite number"),
        (".inf", "Write a finite number"),
        ("1e400", "Write a finite number"),
        ("true", "true is not a number; write it in digits."),
    ],
)
def test_a_number_is_finite_and_not_true(key, value, message):
    with pytest.raises(ConfigError) as caught:
        load(None, f"{key}={value}")
    assert str(caught.value).startswith(f"{key}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["train.steps", "train.seed", "zero_optimization.stage"])
def test_true_is_no_count_either(key):
    with pytest.raises(ConfigError, match=f"{key}: true is not a number"):
        load(None, f"{key}=true")


def test_true_stays_what_a_switch_takes():
    assert load(None, "kernels.compile=true").kernels.compile is True
    assert load(None, "model.tied_embeddings=false").model.tied_embeddings is False


@pytest.mark.parametrize(
    ("word", "bound"),
    [
        ("optimizer.learning_rate=0", "more than 0.0"),
        ("model.rope_theta=-1", "more than 0.0"),
        ("train.seed=-1", "at least 0"),
        ("train.seed=9223372036854775807", "at most 4,611,686,018,427,387,904"),
        ("train.steps=1e13", "at most 1,000,000,000,000"),
        ("train.duration=1e300", "at most"),
        ("schedule.warmup_steps=1e30", "at most 1,000,000,000,000"),
        ("monitor.sample_tokens=1e6", "at most 4,096"),
        ("data_pipeline.prefetch=1e9", "at most 1,024"),
        ("data_pipeline.workers=1e9", "at most 1,024"),
        ("launch.threads=1e6", "at most 1,024"),
        ("launch.timeout=1e300", "at most"),
        ("communication.bucket=1", "at least 65,536"),
    ],
)
def test_a_number_out_of_bounds_is_told_with_the_bound(word, bound):
    key = word.split("=")[0]
    with pytest.raises(ConfigError, match=rf"{key}: .* is not possible\. Write {bound}"):
        load(None, word)


def test_a_number_of_thousands_of_digits_is_one_short_line():
    for word in ("train.steps=" + "9" * 400, "train.seed=0x" + "f" * 5000, "name=" + "9" * 5000):
        with pytest.raises(ConfigError) as caught:
            load(None, word)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sinks", ["[]", "[tensorboard]", "[tensorboard, jsonl, jsonl]"])
def test_the_sink_that_the_report_reads_is_always_there_and_each_one_once(sinks):
    found = load(None, f"monitor.sinks={sinks}").monitor.sinks
    assert "jsonl" in found
    assert len(set(found)) == len(found)
