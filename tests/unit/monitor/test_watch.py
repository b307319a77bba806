import io
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from danlu.base.errors import UserError
from danlu.monitor import watch as module
from danlu.monitor.watch import watch

MakeRun = Callable[..., Path]
Append = Callable[..., None]


def frame(folder: Path, *, width: int = 80, terminal: bool = False) -> str:
    file = io.StringIO()
    watch(folder, once=True, console=Console(file=file, width=width, force_terminal=terminal))
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def test_one_frame_says_how_the_run_stands(make_run: MakeRun) -> None:
    text = frame(make_run(400))
    for words in (
        "tiny-python   finished", "10.6 M parameters", "step 400/400", "bits/byte", "tokens/s 12",
        "MFU 30", "memory 1.8", "learning rate", "checkpoints/step-000400", "loss  2.",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_frame_fits_the_width(make_run: MakeRun, width: int) -> None:
    assert max(map(len, frame(make_run(200), width=width).splitlines())) <= width


def test_a_silent_run_is_called_silent(make_run: MakeRun) -> None:
    assert "silent for" in frame(make_run(20, stop=None))


def test_a_stopped_run_says_why(make_run: MakeRun, append_lines: Append) -> None:
    folder = make_run(20, stop=None)
    event = {"kind": "stop", "time": 2e9, "reason": "nan", "message": "the loss of step 21"}
    append_lines(folder / "events.jsonl", event)
    text = frame(folder)
    assert "the loss is not finite" in text
    assert "the loss of step 21" in text
    assert "ETA" not in text


def test_unknown_kinds_of_events_are_shown(make_run: MakeRun, append_lines: Append) -> None:
    folder = make_run(20, stop=None)
    append_lines(folder / "events.jsonl", {"kind": "format_change", "layer": 3, "to": "fp8"})
    assert "layer 3, to fp8" in frame(folder)


def test_what_the_files_hold_cannot_act_on_the_terminal(
    make_run: MakeRun, append_lines: Append
) -> None:
    folder = make_run(20)
    (folder / "config.yaml").write_text('name: "a\\e[2J[red]b"\n')
    append_lines(folder / "events.jsonl", {"kind": "\x1b[2J", "text": "[bold]\x1b]0;x\x07"})
    text = frame(folder)
    assert "\x1b" not in text
    assert "␛[2J[red]b" in text


@pytest.mark.parametrize("file", ["config.yaml", "plan.json", "metrics.jsonl", "events.jsonl"])
def test_a_run_that_has_not_begun_is_shown(tmp_path: Path, file: str) -> None:
    (tmp_path / file).touch()
    assert "no step yet" in frame(tmp_path)


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no run in this folder"):
        frame(tmp_path)


def test_following_ends_with_the_run(
    make_run: MakeRun, append_lines: Append, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.02)
    folder, file = make_run(20, stop=None), io.StringIO()
    console = Console(file=file, width=80, height=40, force_terminal=True)
    follower = threading.Thread(target=lambda: watch(folder, console=console))
    follower.start()
    time.sleep(0.2)
    assert follower.is_alive()
    append_lines(folder / "events.jsonl", {"kind": "stop", "time": 2e9, "reason": "done"})
    follower.join(5)
    assert not follower.is_alive()
    assert "finished" in file.getvalue()
    assert file.getvalue().rindex("\x1b[?1049l") > file.getvalue().rindex("\x1b[?1049h")


def test_ctrl_c_leaves_quietly(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", interrupt)
    file = io.StringIO()
    console = Console(file=file, width=80, height=40, force_terminal=True)
    watch(make_run(20, stop=None), console=console)
    assert file.getvalue().endswith("\x1b[?25h\x1b[?1049l")  # cursor and screen are back
