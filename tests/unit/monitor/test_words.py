import math

import pytest

from danlu.monitor.words import (
    ascii_text,
    countdown,
    describe_event,
    percent,
    rate,
    shorten,
    signed,
    small,
    step_time,
    visible,
)


def test_what_a_model_writes_cannot_act_on_the_terminal() -> None:
    nasty = "a\x1b[2J\x07\r\x00\x7f\x9b31m\u202eb\ud800\n\tc"
    shown = visible(nasty)
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)
    assert not any(c in shown for c in "\x7f\x9b\u202e\ud800")
    assert "␛[2J" in shown
    assert shown.endswith("\n\tc")
    shown.encode()  # no half of a surrogate pair is left


@pytest.mark.parametrize("text", ["def f():\n\treturn 1", "丹炉", "naïve — “x” 👩‍💻"])
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_shortening_keeps_one_line_of_the_length() -> None:
    assert shorten("a\n b\tc", 10) == "a b c"
    assert shorten("x" * 50, 10) == "x" * 9 + "…"


def test_ascii_text_keeps_the_length() -> None:
    assert ascii_text("\N{MINUS SIGN}0.3 → 丹 …") == "-0.3 > ? ."


def test_numbers_read_like_people_write_them() -> None:
    assert percent(0.4123) == "41.2%"
    assert percent(None) == percent(math.nan) == rate(math.nan) == step_time(math.nan)
    assert rate(12_345.0) == "12.3 k tokens/s"
    assert signed(-0.0312) == "\N{MINUS SIGN}0.031"
    assert small(0.00083) == "8.30e-4"
    assert small(0.42) == "0.42"
    assert step_time(0.1312) == "131 ms"
    assert step_time(1.3072) == "1.31 s"
    assert countdown(44.2) == "45s"
    assert countdown(59.5) == "1min 00s"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"kind": "resume", "step": 200}, "goes on from step 200"),
        (
            {"kind": "checkpoint", "step": 3, "path": "checkpoints/3", "seconds": 0.31},
            "checkpoints/3, in 310ms",
        ),
        ({"kind": "warning", "text": "slow disk"}, "slow disk"),
        ({"kind": "stop", "reason": "nan", "message": "step 7"}, "nan, step 7"),
        ({"kind": "sink_failed", "sink": "x", "reason": "OSError: full"}, "x, OSError: full"),
        ({"kind": "never seen", "degree": 4, "why": "slow rank"}, "degree 4, why slow rank"),
        ({"kind": "note"}, ""),
        ({}, ""),
    ],
)
def test_every_event_has_words(event: dict[str, object], text: str) -> None:
    assert describe_event(event) == text


@pytest.mark.parametrize("odd", [None, [], {"a": 1}, "\x1b", math.nan, 1e400, 10**400, True])
def test_an_event_may_hold_anything(odd: object) -> None:
    for kind in ("start", "resume", "checkpoint", "sample", "stop", "nan", odd):
        event = {"kind": kind, "step": odd, "seconds": odd, "text": odd, "path": odd, "time": odd}
        assert "\x1b" not in describe_event(event)
