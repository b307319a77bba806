import pytest
from hypothesis import given
from hypothesis import strategies as st

from danlu.base.units import (
    Bound,
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    parse_bound,
    parse_bytes,
    parse_count,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("4GiB", 4 * 2**30), ("1.5 MB", 1_500_000), ("512", 512), (7, 7), ("2kib", 2048)],
)
def test_bytes_are_read_with_their_unit(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("10min", 600), ("1h 30min", 5400), ("90s", 90), (5, 5), ("2 days", 172800), ("250ms", 0.25)],
)
def test_durations_are_read_with_their_unit(text, value):
    assert parse_duration(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"), [("300k", 300_000), ("2M", 2_000_000), ("1e6", 10**6), (12, 12), (3.0, 3)]
)
def test_counts_are_read_with_their_unit(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize("parse", [parse_bytes, parse_duration, parse_count])
@pytest.mark.parametrize("wrong", ["ten", "-4", "4 parsecs", None, True, [1], "", float("nan"), -1])
def test_what_is_not_an_amount_is_refused_in_words(parse, wrong):
    with pytest.raises(ValueError, match="write for example|is not a"):
        parse(wrong)


def test_the_articles_spelling_of_a_bound_parses():
    assert parse_bound("<0.05") == Bound("<", 0.05)
    assert parse_bound(">= 1.8").holds(1.8)
    assert not parse_bound("<0.05").holds(0.05)
    assert str(parse_bound("<0.05")) == "<0.05"
    with pytest.raises(ValueError, match="write for example <0.05"):
        parse_bound("0.05")


@given(st.integers(min_value=0, max_value=2**60))
def test_formatted_bytes_read_back_within_their_digits(amount):
    assert parse_bytes(format_bytes(amount)) == pytest.approx(amount, rel=0.01, abs=0.6)


def test_numbers_are_shown_as_people_write_them():
    assert format_count(10_621_184) == "10.6 M"
    assert format_rate(4.3e11) == "430 GFLOP/s"
    assert format_rate(1.15e12) == "1.15 TFLOP/s"
    assert [format_duration(s) for s in (0.12, 4.26, 200, 7500, 90000, float("inf"))] == [
        "120ms", "4.3s", "3min 20s", "2h 05min", "1d 01h", "?",
    ]  # fmt: skip
