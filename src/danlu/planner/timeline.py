"""A simulated pipeline step as one HTML page: who computes what and when, and who waits.

The page needs nothing from elsewhere: its style, drawing and data are inside.
"""

import math
from collections.abc import Sequence
from html import escape
from statistics import median

from danlu.planner.schedule import Event, Timeline

__all__ = ["timeline_html"]

_ROW, _BOX = 34, 24  # pixels: distance of rows, height of a box
_BOX_WIDTH = 13  # pixels that a usual box should have, for its number to be read
_NARROWEST, _WIDEST = 860, 4800  # pixels of the drawing; where the window is narrower, it scrolls
_DIGIT, _GAP = 6.0, 2.0  # pixels of a digit in a box, and around a number
_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the inputs",
    "W": "backward for the weights",
}
_STEPS = (1, 2, 5, 10)


def timeline_html(timeline: Timeline, title: str, notes: Sequence[str] = ()) -> str:
    """The page.

    Args:
        timeline: from `simulate`.
        title: its heading, as plain text.
        notes: sentences below the drawing, as plain text.
    """
    drawing = _Drawing(timeline)
    return _PAGE.format(
        title=escape(title),
        style=_STYLE,
        tiles=_tiles(timeline),
        legend=_legend(timeline),
        names="".join(f"<div>rank {rank}</div>" for rank in range(len(timeline.busy))),
        svg=drawing.svg(),
        shares="".join(f"<div>{_share(timeline, rank)}</div>" for rank in _ranks(timeline)),
        held="".join(f"<div>{_held(timeline, rank)}</div>" for rank in _ranks(timeline)),
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in notes),
    )


def _ranks(timeline: Timeline) -> range:
    return range(len(timeline.busy))


def _time(seconds: float) -> str:
    """Three digits and a unit that suits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            break
    amount = seconds / size
    return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"


def _many(amount: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{amount} {noun}{'' if amount == 1 else plural}"


def _share(timeline: Timeline, rank: int) -> str:
    share = timeline.busy[rank] / timeline.seconds if timeline.seconds else 1.0
    return f'<span class="meter"><i style="width:{share:.1%}"></i></span>{share:.0%}'


def _held(timeline: Timeline, rank: int) -> str:
    return " + ".join(str(most) for most in timeline.peaks[rank].values())


def _tiles(timeline: Timeline) -> str:
    idle = timeline.seconds - sum(timeline.busy) / len(timeline.busy)
    work = {(e.action.stage, e.action.micro_batch) for e in timeline.events}
    stages = _many(len({stage for stage, _ in work}), "stage")
    micro_batches = _many(len({micro_batch for _, micro_batch in work}), "micro-batch")
    tiles = [
        ("Step", _time(timeline.seconds), "predicted, without the optimizer"),
        ("Computing", f"{timeline.utilisation:.1%}", "of the time, mean of the ranks"),
        ("Idle", _time(idle), "a rank, on average"),
        ("Pipeline", _many(len(timeline.busy), "rank"), f"{stages}, {micro_batches}"),
    ]
    return "".join(
        f'<div class="tile{" first" if n == 0 else ""}">'
        f"<h3>{name}</h3><p>{value}</p><div>{note}</div></div>"
        for n, (name, value, note) in enumerate(tiles)
    )


def _legend(timeline: Timeline) -> str:
    used = {event.action.kind for event in timeline.events}
    items = [(f"kind-{kind}", word) for kind, word in _WORDS.items() if kind in used]
    items.append(("idle", "idle"))
    text = "".join(f'<span><i class="{name}"></i>{word}</span>' for name, word in items)
    several = any(len(peaks) > 1 for peaks in timeline.peaks)
    return text + ("<span>paler: the later stages of a rank</span>" if several else "")


class _Drawing:
    """The boxes. Across in percent, so that they follow the width of the window."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._total = timeline.seconds or 1.0
        usual = median(e.end - e.start for e in timeline.events) if timeline.events else 0.0
        wanted = _BOX_WIDTH * self._total / usual if usual else _NARROWEST
        self._width = min(max(wanted, _NARROWEST), _WIDEST)
        self._chunk = {
            stage: chunk for peaks in timeline.peaks for chunk, stage in enumerate(sorted(peaks))
        }

    def svg(self) -> str:
        height = _ROW * len(self._timeline.busy)
        rows = "".join(
            f'<rect class="idle" width="100%" y="{self._top(rank)}" height="{_BOX}" rx="4"/>'
            for rank in _ranks(self._timeline)
        )
        boxes = "".join(self._box(event) for event in self._timeline.events)
        return (
            f'<svg role="img" aria-label="Timeline of the ranks" width="100%"'
            f' height="{height + 26}" style="min-width:{self._width:.0f}px">'
            f"{self._axis(height)}{rows}{boxes}</svg>"
        )

    def _top(self, rank: int) -> int:
        return rank * _ROW + (_ROW - _BOX) // 2

    def _percent(self, seconds: float) -> str:
        return f"{100 * seconds / self._total:.3f}".rstrip("0").rstrip(".") + "%"

    def _box(self, event: Event) -> str:
        action, length, top = event.action, event.end - event.start, self._top(event.rank)
        name = f"kind-{action.kind}"
        if chunk := self._chunk[action.stage]:
            name += f" pale-{min(chunk, 3)}"
        tip = (
            f"{_WORDS[action.kind]}, micro-batch {action.micro_batch}, stage {action.stage}:"
            f" {_time(event.start)} to {_time(event.end)}"
        )
        box = (
            f'<rect class="{name}" x="{self._percent(event.start)}" y="{top}"'
            f' width="{self._percent(length)}" height="{_BOX}"><title>{tip}</title></rect>'
        )
        number = str(action.micro_batch)
        if length / self._total * self._width < _DIGIT * len(number) + _GAP:
            return box
        middle = self._percent(event.start + length / 2)
        return box + f'<text class="on {name}" x="{middle}" y="{top + 16}">{number}</text>'

    def _axis(self, height: int) -> str:
        """Vertical lines at round times, with the times below."""
        wanted = self._total / max(self._width / 110, 1)
        size = 10.0 ** math.floor(math.log10(wanted))
        step = next(size * n for n in _STEPS if size * n >= wanted * 0.999)
        marks = []
        for n in range(int(self._total / step * 1.0001) + 1):
            at = self._percent(n * step)
            near_end = n * step > self._total * (1 - 30 / self._width)
            anchor = "start" if n == 0 else "end" if near_end else "middle"
            text = _time(n * step) if n else "0"
            marks.append(
                f'<line x1="{at}" x2="{at}" y2="{height + 5}"/>'
                f'<text x="{at}" y="{height + 20}" text-anchor="{anchor}">{text}</text>'
            )
        return f'<g class="axis">{"".join(marks)}</g>'


_STYLE = """\
:root {
  color-scheme: light dark;
  --paper: #f5f3ef; --card: #fffefc; --ink: #23211e; --soft: #6f6a62; --line: #e6e1d8;
  --grid: #eeeae3; --ember: #c2452d; --F: #1f7a6d; --B: #c2452d; --I: #d3733c; --W: #a98b4f;
  --shadow: 0 1px 2px rgb(60 50 30 / 6%), 0 4px 16px rgb(60 50 30 / 4%);
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #131416; --card: #1b1d20; --ink: #e9e6e1; --soft: #9d978d; --line: #2d3034;
    --grid: #26292d; --ember: #ff8163; --F: #58c9b3; --B: #ff8163; --I: #f0a566; --W: #cdb47c;
    --shadow: none;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1240px; margin: 0 auto; padding: 40px 20px 64px; }
h1 {
  font-size: 30px; line-height: 1.2; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere;
}
h2 { font-size: 17px; margin: 0; letter-spacing: -0.005em; }
h3 { font-size: 13px; font-weight: 500; margin: 0; color: var(--soft); }
p { margin: 0; }
.brand {
  font-size: 12px; letter-spacing: 0.08em; text-transform: uppercase; color: var(--soft);
  margin-bottom: 10px; display: flex; align-items: center; gap: 8px;
}
.brand i { width: 9px; height: 9px; border-radius: 50%; background: var(--ember); }
.tiles {
  display: grid; gap: 12px; margin: 20px 0; grid-template-columns: repeat(4, minmax(0, 1fr));
}
.tile, .card {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  box-shadow: var(--shadow);
}
.tile { padding: 14px 16px; min-width: 0; overflow: hidden; }
.tile p {
  font-size: 26px; line-height: 1.25; font-weight: 600; letter-spacing: -0.015em; margin: 2px 0;
}
.tile div { font-size: 13px; line-height: 1.4; color: var(--soft); }
.tile.first { border-color: var(--ember); }
.tile.first p { color: var(--ember); }
.card { padding: 20px 22px; margin: 16px 0; }
.head { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 18px; margin-bottom: 14px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 12.5px; color: var(--soft); }
.legend span { display: inline-flex; align-items: center; gap: 6px; white-space: nowrap; }
.legend i { width: 12px; height: 12px; border-radius: 3px; background: var(--fill); }
.legend i.idle { background: var(--grid); box-shadow: inset 0 0 0 1px var(--line); }
.rows { display: grid; grid-template-columns: max-content minmax(0, 1fr) max-content max-content; }
.rows > * > header { height: 24px; font-size: 12.5px; color: var(--soft); white-space: nowrap; }
.side { font-size: 13.5px; white-space: nowrap; }
.side div { height: 34px; line-height: 34px; }
.side.name { padding-right: 14px; color: var(--soft); }
.side.number { padding-left: 22px; text-align: right; }
.meter {
  display: inline-block; width: 44px; height: 5px; border-radius: 3px; background: var(--grid);
  overflow: hidden; vertical-align: 2px; margin-right: 9px;
}
.meter i { display: block; height: 100%; border-radius: 3px; background: var(--F); }
.scroll {
  overflow-x: auto; padding-top: 24px; scrollbar-width: thin;
  scrollbar-color: var(--line) transparent;
}
svg { display: block; }
svg rect { fill: var(--fill); stroke: var(--card); stroke-width: 1px; rx: 2px; }
svg rect.idle { fill: var(--grid); stroke: none; }
svg rect:not(.idle):hover { stroke: var(--ink); }
svg text { font-size: 10.5px; pointer-events: none; }
svg text.on { fill: var(--card); text-anchor: middle; }
.axis line { stroke: var(--line); }
.axis text { fill: var(--soft); font-size: 12px; }
.kind-F { --fill: var(--F); }
.kind-B { --fill: var(--B); }
.kind-I { --fill: var(--I); }
.kind-W { --fill: var(--W); }
rect.pale-1 { fill: color-mix(in srgb, var(--fill) 48%, var(--card)); }
rect.pale-2 { fill: color-mix(in srgb, var(--fill) 32%, var(--card)); }
rect.pale-3 { fill: color-mix(in srgb, var(--fill) 20%, var(--card)); }
text:is(.pale-1, .pale-2, .pale-3).on { fill: var(--ink); }
.note { text-wrap: pretty; font-size: 13px; color: var(--soft); margin-top: 10px; }
@media (max-width: 640px) {
  main { padding: 24px 12px 40px; }
  h1 { font-size: 24px; }
  .card { padding: 16px 14px; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .tile { padding: 10px 12px; }
  .tile p { font-size: 21px; }
  .meter, .side.held { display: none; }
  .side.number { padding-left: 12px; }
}
@media print {
  body { background: none; }
  .tile, .card { box-shadow: none; break-inside: avoid; }
}
"""

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="danlu">
<title>{title} &ndash; danlu</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
<header>
  <div class="brand"><i></i>danlu pipeline schedule</div>
  <h1>{title}</h1>
</header>
<section class="tiles">{tiles}</section>
<section class="card">
  <div class="head"><h2>One step</h2><div class="legend">{legend}</div></div>
  <div class="rows">
    <div class="side name"><header></header>{names}</div>
    <div class="scroll">{svg}</div>
    <div class="side number"><header>computing</header>{shares}</div>
    <div class="side number held"><header>most in flight</header>{held}</div>
  </div>
  <p class="note">Numbers in boxes are micro-batches. In flight are those whose activations a rank
  keeps for the backward pass, for each of its stages.</p>
  {notes}
</section>
</main>
</body>
</html>
"""
