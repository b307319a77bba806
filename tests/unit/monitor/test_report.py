import base64
import errno
import gzip
import json
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from danlu.base.errors import UserError
from danlu.monitor.report import write_report

MakeRun = Callable[..., Path]
Append = Callable[..., None]

NASTY = (
    "</script></pre><script>alert('x')</script>\"'&<img src=x onerror=alert(1)>\x00\x1b[2J\ud800"
)


class _Page(HTMLParser):
    """Takes a page apart: elements, their attributes, text outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "br"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._inside[-1:] == ["script"]:
            self.scripts.append(data)
        elif "style" not in self._inside:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


_PACKED = re.compile('(id="plotly">)([A-Za-z0-9+/=]+)')


def page_of(folder: Path) -> _Page:
    text = write_report(folder).read_text(encoding="utf-8")
    return _Page(_PACKED.sub(r"\1packed", text))  # its megabytes are slow to parse


def charts_of(page: _Page) -> dict[str, Any]:
    return {chart["name"]: chart for chart in json.loads(page.scripts[0])}


def test_the_report_tells_the_run(make_run: MakeRun) -> None:
    page = page_of(make_run(400))
    for words in (
        "tiny-python", "done", "10.6 M parameters", "AMD EPYC 7B13", "bits/byte", "k tokens/s",
        "of 210 GFLOP/s (fp32, measured)", "Peak memory", "6.55 M", "in 2 starts", "step time",
        "1.23 s", "matrix products", "activations", "compiling takes 38 s", "train.batch_tokens",
        "def", "_read_chunk", "goes on from step 240", "checkpoints/step-000400", "vocab_size",
        "Resumed from step 240",
    ):  # fmt: skip
        assert words in page.text
    assert set(charts_of(page)) == {
        "loss", "bits-per-byte", "throughput", "step-time", "memory", "learning-rate",
        "gradient-norm",
    }  # fmt: skip


def test_the_page_loads_nothing(make_run: MakeRun) -> None:
    page = page_of(make_run(40))
    assert not [tag for tag, _ in page.elements if tag in ("img", "iframe", "object", "base")]
    for _, attributes in page.elements:
        assert not attributes.keys() & {"src", "srcset", "action", "poster", "background"}
        assert (attributes.get("href") or "data:").startswith("data:")
    style = re.search(r"<style>(.*?)</style>", write_report(make_run(40)).read_text(), re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_the_page_may_load_nothing_and_run_no_script_but_its_own(make_run: MakeRun) -> None:
    folder = make_run(40)
    policies = []
    for _ in range(2):
        page = page_of(folder)
        (policy,) = (a["content"] for _, a in page.elements if "http-equiv" in a)
        assert policy is not None
        assert policy.startswith("default-src 'none'; script-src 'nonce-")
        (nonce,) = (a["nonce"] for tag, a in page.elements if tag == "script" and "nonce" in a)
        assert f"'nonce-{nonce}'" in policy
        policies.append(policy)
    assert policies[0] != policies[1]  # a sample cannot know it


def test_plotly_is_inside_once_and_whole(make_run: MakeRun) -> None:
    packed = _PACKED.findall(write_report(make_run(40)).read_text(encoding="utf-8"))
    assert len(packed) == 1
    assert b"Plotly" in gzip.decompress(base64.b64decode(packed[0][1]))


@pytest.mark.parametrize("where", ["sample", "event", "config", "plan", "name", "extra"])
def test_nothing_that_a_run_holds_becomes_markup(
    make_run: MakeRun, append_lines: Append, where: str
) -> None:
    folder = make_run(40)
    clean = page_of(folder)
    poison(folder, where, append_lines)
    page = page_of(folder)
    assert count(page, "script") == count(clean, "script")
    assert count(page, "img") == 0
    assert not [a for _, a in page.elements if any(name.startswith("on") for name in a)]
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f]", text)
    if where not in ("extra",):
        assert "alert" in page.text  # shown, not lost


def count(page: _Page, tag: str) -> int:
    return sum(name == tag for name, _ in page.elements)


def poison(folder: Path, where: str, append_lines: Append) -> None:
    if where == "sample":
        sample = {"kind": "sample", "step": 40, "prompt": NASTY, "text": NASTY, "time": 2e9}
        append_lines(folder / "events.jsonl", sample)
    elif where == "event":
        event = {"kind": NASTY, "step": NASTY, "time": NASTY, "text": NASTY, NASTY: NASTY}
        append_lines(folder / "events.jsonl", event)
    elif where == "config":
        (folder / "config.yaml").write_text(f"{NASTY}: x\nkey: {NASTY}\n", errors="replace")
    elif where == "name":
        (folder / "config.yaml").write_text(f"name: {json.dumps(NASTY)}\n")
    elif where == "extra":
        step = {"kind": "step", "step": 41, "loss": 1.0, NASTY: 4.0, "time": 2e9}
        append_lines(folder / "metrics.jsonl", step)
    else:
        plan = json.loads((folder / "plan.json").read_text())
        plan |= {"hash": NASTY, "format": NASTY, "backend": NASTY}
        plan["cluster"]["device"]["name"] = NASTY
        plan["predicted"]["seconds"][NASTY] = 1.0
        plan["predicted"]["memory"] = {NASTY: 1.0, "x": NASTY}
        plan["decisions"] += [{"key": NASTY, "value": {NASTY: 1}, "reason": [NASTY]}, 3, NASTY]
        (folder / "plan.json").write_text(json.dumps(plan))


def test_a_loss_that_is_not_finite_is_a_gap_with_a_cross(
    make_run: MakeRun, append_lines: Append
) -> None:
    folder = make_run(40, stop=None)
    lines = [{"kind": "step", "step": s, "loss": math.nan, "time": 2e9 + s} for s in (41, 42)]
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)  # JSON that is none: NaN
    append_lines(folder / "events.jsonl", {"kind": "nan", "step": 41, "time": 2e9})
    append_lines(folder / "events.jsonl", {"kind": "stop", "reason": "nan", "time": 2e9})
    page = page_of(folder)
    assert "NaN" not in page.scripts[0]
    loss = charts_of(page)["loss"]
    assert [t["x"] for t in loss["traces"] if t["name"] == "not finite"] == [[41, 42]]
    assert "the loss is not finite" in page.text


@pytest.mark.parametrize(
    "files",
    [
        {"config.yaml": ""},
        {"plan.json": ""},
        {"plan.json": "[1"},
        {"metrics.jsonl": ""},
        {"events.jsonl": "\n\n{\n"},
        {"metrics.jsonl": '{"kind": "step", "step": 1}\n'},
        {"metrics.jsonl": '{"kind": "step", "step": 0, "loss": 1e308, "seconds": -1}\n'},
        {"metrics.jsonl": '{"kind": "evaluation", "step": 5, "loss": 2.0}\n'},
        {"metrics.jsonl": '{"kind": "step", "step": 1, "loss": 3.0, "time": 1e300}\n'},
        {"metrics.jsonl": '{"kind": "step", "step": 9007199254740000, "loss": 3.0}\n'},
        {"events.jsonl": '{"kind": "start", "time": -1e18}\n{"kind": "stop", "time": 1e18}\n'},
        {"config.yaml": "name: [a, {b: c}]\nmodel: 3\n", "plan.json": '{"predicted": 4}'},
        {"plan.json": '{"predicted": {"memory": 4, "seconds": "abc"}, "decisions": 1}'},
        {"plan.json": '{"model": [], "cluster": {"device": 3}, "device": [], "format": {}}'},
        {"plan.json": '{"steps": 1e300, "predicted": {"memory": {"a": 1e300, "b": -1}}}'},
    ],
)
def test_hardly_anything_is_enough_for_a_page(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    page = page_of(tmp_path)
    assert count(page, "h1") == 1
    assert not re.search(r"\b(nan|inf|None)\b", page.text)


@pytest.mark.parametrize("seed", range(12))
def test_a_run_whose_files_were_damaged_still_has_a_page(make_run: MakeRun, seed: int) -> None:
    folder, chance = make_run(60, evaluate_every=10, resume_at=30), random.Random(seed)
    odd = [None, True, -1, 0, 1e308, 10**400, math.nan, math.inf, "", "x", [], {}, {"a": 1}]

    def damage(value: Any) -> Any:
        if chance.random() < 0.05:
            return chance.choice(odd)
        if isinstance(value, dict):
            return {key: damage(inner) for key, inner in value.items()}
        return [damage(inner) for inner in value] if isinstance(value, list) else value

    for name in ("metrics.jsonl", "events.jsonl", "plan.json"):
        lines = (folder / name).read_text().splitlines()
        broken = [json.dumps(damage(json.loads(line))) for line in lines]
        broken[chance.randrange(len(broken))] += "}"
        (folder / name).write_text("\n".join(broken))
    assert count(page_of(folder), "h1") == 1


def test_a_page_without_steps_does_not_carry_plotly(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: new\n")
    path = write_report(tmp_path)
    assert path.stat().st_size < 50_000
    assert "No steps yet" in path.read_text()


def test_a_run_that_goes_on_gets_a_page_with_its_progress(make_run: MakeRun) -> None:
    folder = make_run(100, stop=None)
    plan = json.loads((folder / "plan.json").read_text()) | {"steps": 400}
    (folder / "plan.json").write_text(json.dumps(plan))
    page = page_of(folder)
    assert "100 of 400 steps" in page.text
    assert any(a.get("style") == "width: 25.0%" for _, a in page.elements)


def test_numbers_of_later_parts_get_a_chart_by_themselves(
    make_run: MakeRun, append_lines: Append
) -> None:
    folder = make_run(40)
    step = {"kind": "step", "time": 2e9, "step": 41, "loss": 3.0, "loss_scale": 1024.0}
    append_lines(folder / "metrics.jsonl", step)
    assert "extra-loss_scale" in charts_of(page_of(folder))


def test_an_evaluation_over_other_text_is_pointed_out(
    make_run: MakeRun, append_lines: Append
) -> None:
    folder = make_run(80)
    assert "The last point is over" not in page_of(folder).text
    last = {"kind": "evaluation", "time": 2e9, "step": 80, "loss": 2.0, "bits_per_byte": 1.0}
    append_lines(folder / "metrics.jsonl", last | {"tokens": 262_144})
    words = "The last point is over 262 k tokens, the one before over 65.5 k."
    assert words in page_of(folder).text


def test_the_first_step_does_not_squash_the_speed_charts(make_run: MakeRun) -> None:
    page = page_of(make_run(100, resume_at=None))
    chart = charts_of(page)["step-time"]
    assert chart["y"]["range"][1] < 4  # the first step took 22 s
    assert max(v for t in chart["traces"] for v in t["y"] if v is not None) < 4
    assert "The first step of each start is left out (22.3 s)" in page.text


def test_a_long_run_makes_a_small_page(make_run: MakeRun) -> None:
    folder = make_run(20_000, evaluate_every=10, resume_at=15_000)
    began = time.perf_counter()
    path = write_report(folder)
    assert time.perf_counter() - began < 5
    assert path.stat().st_size < 4_000_000
    page = page_of(folder)
    assert "events in the middle are left out" in page.text
    assert "more steps are in events.jsonl" in page.text
    for chart in charts_of(page).values():
        assert all(len(t["x"]) <= 1500 for t in chart["traces"])


def test_a_report_replaces_the_one_before_and_leaves_nothing_else(make_run: MakeRun) -> None:
    folder = make_run(20)
    before = {p.name for p in folder.iterdir()}
    write_report(folder)
    write_report(str(folder))
    assert {p.name for p in folder.iterdir()} == before | {"report.html"}


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_full_disk_is_one_clear_line(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = make_run(20)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="cannot be written .No space left on device"):
        write_report(folder)
    assert not list(folder.glob("*.part"))


def test_the_report_needs_no_torch() -> None:
    code = (
        "import sys, danlu.monitor.report, danlu.monitor.watch; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
