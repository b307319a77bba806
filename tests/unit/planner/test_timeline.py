import re
from html.parser import HTMLParser

import pytest

from danlu.planner.schedule import SCHEDULES, StageCost, order, simulate
from danlu.planner.timeline import timeline_html

_VOID = {"meta", "link", "br"}


class Checker(HTMLParser):
    """Notes which elements there are, and that all of them are closed in turn."""

    def __init__(self, page):
        super().__init__()
        self.found, self.open = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page(name="zero_bubble", ranks=3, micro_batches=6, scale=0.01, notes=()):
    stages = len(SCHEDULES[name].owners(ranks))
    cost = StageCost(scale, scale, scale)
    made = simulate(order(name, ranks, micro_batches), [cost] * stages)
    return made, timeline_html(made, f"{name} <{ranks}>", notes)


@pytest.mark.parametrize("name", SCHEDULES)
def test_there_is_a_box_for_every_action_and_a_row_for_every_rank(name):
    made, html = page(name)
    checker = Checker(html)
    assert checker.open == []
    boxes = [a for tag, a in checker.found if tag == "rect" and a["class"] != "idle"]
    assert len(boxes) == len(made.events)
    assert sum(tag == "rect" for tag, _ in checker.found) == len(made.events) + 3
    assert all(f"rank {rank}</div>" in html for rank in range(3))


def test_boxes_stay_within_the_drawing():
    _, html = page()
    for tag, a in Checker(html).found:
        if tag == "rect" and "x" in a:
            left, width = (float(a[key].rstrip("%")) for key in ("x", "width"))
            assert left >= 0
            assert left + width <= 100.01


def test_the_legend_names_what_is_drawn_and_no_more():
    _, html = page("1f1b")
    assert "backward for the weights" not in html
    assert "paler" not in html
    _, html = page("zero_bubble")
    assert "backward for the weights" in html
    assert "paler" in html


def test_text_is_escaped_and_nothing_is_fetched():
    _, html = page(notes=["a & b <script>alert(1)</script>"])
    assert "<h1>zero_bubble &lt;3&gt;</h1>" in html
    assert "a &amp; b &lt;script&gt;" in html
    assert "<script" not in html
    assert not re.search(r"https?://", html)
    assert "default-src 'none'" in html


def test_the_numbers_on_the_page_are_the_timelines():
    made, html = page("1f1b", ranks=4, micro_batches=8)
    assert f"{made.utilisation:.1%}" == "72.7%"
    assert "<p>72.7%</p>" in html
    assert "<p>330 ms</p>" in html
    assert "<p>90 ms</p>" in html
    assert "4 stages, 8 micro-batches" in html


@pytest.mark.parametrize(("scale", "shown"), [(2e-6, "µs"), (3e-3, "ms"), (5.0, " s"), (0.0, "0")])
def test_times_have_a_unit_that_suits_them(scale, shown):
    assert shown in page(scale=scale)[1]


def test_numbers_of_micro_batches_are_written_where_they_fit():
    written = re.findall(r'<text class="on [^>]*>(\d+)</text>', page("gpipe", 2, 4)[1])
    assert sorted(written) == sorted("0123" * 4)
    _, long = page("gpipe", 2, 600)
    assert not re.search(r'<text class="on', long)


def test_a_step_of_one_rank_and_one_micro_batch_is_drawn():
    _, html = page("gpipe", 1, 1)
    assert "1 rank</p>" in html
    assert "1 stage, 1 micro-batch</div>" in html
