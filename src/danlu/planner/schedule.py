"""Pipeline schedules as data: which rank computes what in which order, and how long that takes.

A pipeline cuts the model into stages and the batch into micro-batches. A schedule is the order in
which a rank computes its stages' forward and backward passes. Here an order is plain data
(`order`), its time comes from a simulation with a cost for each stage (`simulate`), and its memory
from the order alone (`peak_activations`). Orders are generated from the published algorithms and
equal, action by action, the tables that `torch.distributed.pipelining` (2.13) executes; the tests
hold them to that.

Sources: GPipe arXiv 1811.06965; 1F1B and interleaved 1F1B arXiv 2104.04473; ZB-V arXiv 2401.10241
section 6 and 2405.15362; DualPipe-V github.com/deepseek-ai/DualPipe.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from types import MappingProxyType
from typing import Literal, NamedTuple

from danlu.base.errors import closest

__all__ = [
    "SCHEDULES",
    "Action",
    "Event",
    "Kind",
    "Order",
    "Schedule",
    "StageCost",
    "Timeline",
    "order",
    "peak_activations",
    "problem",
    "share_cores",
    "simulate",
]

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One computation of a rank; as text `3F0` (stage, kind, micro-batch), as torch writes it.

    Attributes:
        kind: `F` forward, `B` full backward, `I` backward for the inputs (the stage before waits
            for it), `W` backward for the weights (nobody waits for it).
        stage: piece of the model, counted from the embedding.
        micro_batch: piece of the batch.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = tuple[tuple[Action, ...], ...]
"""For each rank its actions, in the order in which it computes them."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a schedule is and what torch demands of it.

    Attributes:
        name: as in the config.
        torch_class: the class in `torch.distributed.pipelining` that runs it.
        rank_order: (rank, ranks, micro-batches, chunks) -> the rank's actions.
        chunks: stages that a rank holds; the fewest where `more_chunks`.
        more_chunks: whether a rank may hold more than `chunks`.
        placement: `loop`, stage s is on rank s % ranks; `v`, rank r has r and 2 * ranks - 1 - r.
        fewest_per_rank: fewest micro-batches as a multiple of the ranks; 0 where one will do.
        even_rounds: whether micro-batches must divide into `micro_batches // ranks` equal rounds.
        compiles: whether stages may use torch.compile (a backward split into I and W cannot).
        pairs: whether torch runs an F and the B behind it as one action (see `simulate`).
    """

    name: str
    torch_class: str
    rank_order: Callable[[int, int, int, int], list[Action]]
    chunks: int = 1
    more_chunks: bool = False
    placement: Literal["loop", "v"] = "loop"
    fewest_per_rank: int = 0
    even_rounds: bool = False
    compiles: bool = True
    pairs: bool = False

    def owners(self, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
        """The rank of each stage, in the order of the stages."""
        there = tuple(range(ranks))
        return there + there[::-1] if self.placement == "v" else there * (chunks or self.chunks)


def problem(schedule: str, ranks: int, micro_batches: int, chunks: int | None = None) -> str | None:
    """Why torch would refuse to run a schedule, as one sentence; None if it would not.

    Args:
        schedule: a name in `SCHEDULES`.
        ranks: of the pipeline.
        micro_batches: of one optimizer step.
        chunks: stages on each rank; None for the schedule's own number.
    """
    if schedule not in SCHEDULES:
        return f"There is no schedule {schedule!r}. {closest(schedule, SCHEDULES)}"
    its, fewest = SCHEDULES[schedule], max(1, SCHEDULES[schedule].fewest_per_rank * ranks)
    chunks = its.chunks if chunks is None else chunks
    if ranks < 1:
        return f"A pipeline of {ranks} ranks cannot be; use 1 or more."
    if chunks < its.chunks or (chunks > its.chunks and not its.more_chunks):
        above = " or more" if its.more_chunks else ""
        noun = "stage" if its.chunks == 1 else "stages"
        return f"{schedule} needs {its.chunks}{above} {noun} on each rank, not {chunks}."
    if micro_batches < fewest:
        needed = f"{fewest} or more micro-batches"
        return f"{schedule} on {ranks} ranks needs {needed}, not {micro_batches}."
    if its.even_rounds and not _even_rounds(micro_batches, ranks):
        less = next(n for n in range(micro_batches, 0, -1) if _even_rounds(n, ranks))
        more = next(n for n in count(micro_batches) if _even_rounds(n, ranks))
        return (
            f"{schedule} on {ranks} ranks does not divide {micro_batches} micro-batches into"
            f" {micro_batches // ranks} equal rounds; use {less} or {more}."
        )
    return None


@lru_cache(maxsize=64)
def order(schedule: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Order:
    """What each rank computes, in order; the arguments are those of `problem`.

    DualPipe-V's overlapped pairs (torch: OVERLAP_F_B) are here their two actions back to back,
    forward first, which is how torch executes them where no fused function is registered.

    Raises:
        ValueError: the schedule cannot run with these numbers.
    """
    if wrong := problem(schedule, ranks, micro_batches, chunks):
        raise ValueError(wrong)
    its = SCHEDULES[schedule]
    stages = its.chunks if chunks is None else chunks
    return tuple(tuple(its.rank_order(rank, ranks, micro_batches, stages)) for rank in range(ranks))


def _even_rounds(micro_batches: int, ranks: int) -> bool:
    return micro_batches % max(1, micro_batches // ranks) == 0


def _gpipe(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """All forward passes, then all backward passes."""
    forward = [Action("F", rank, m) for m in range(micro_batches)]
    backward = [Action("B", rank, m) for m in range(micro_batches)]
    return forward + backward


def _one_forward_one_backward(
    rank: int, ranks: int, micro_batches: int, chunks: int
) -> list[Action]:
    """As many forward passes as there are ranks behind, then one forward, one backward."""
    forward = [Action("F", rank, m) for m in range(micro_batches)]
    backward = [Action("B", rank, m) for m in range(micro_batches)]
    return _alternate(forward, backward, warmup=ranks - 1 - rank)


def _interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """1F1B in rounds: every chunk takes a round's micro-batches before the next round begins."""
    size = micro_batches // max(1, micro_batches // ranks)
    turns = [
        (chunk, m)
        for start in range(0, micro_batches, size)
        for chunk in range(chunks)
        for m in range(start, start + size)
    ]
    forward = [Action("F", chunk * ranks + rank, m) for chunk, m in turns]
    backward = [Action("B", (chunks - 1 - chunk) * ranks + rank, m) for chunk, m in turns]
    return _alternate(forward, backward, warmup=(chunks - 1) * size + 2 * (ranks - 1 - rank))


def _alternate(forward: list[Action], backward: list[Action], *, warmup: int) -> list[Action]:
    """The first `warmup` forward actions, then one of each in turn, then what is left."""
    ahead, rest = forward[:warmup], forward[warmup:]
    pairs = [action for pair in zip(rest, backward, strict=False) for action in pair]
    return ahead + pairs + backward[len(rest) :]


class _Pen:
    """Writes the actions of a rank that holds two stages, `0` the earlier and `1` the later one.

    A word such as `F0` or `I1` is the stage's next micro-batch of that kind; `W0` is the oldest
    weight gradient still owed by stage 0, `W` that of either stage. Micro-batches beyond the last
    are left out, as is a `W` when nothing is owed.
    """

    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self.actions: list[Action] = []
        self._stages = {"0": rank, "1": 2 * ranks - 1 - rank}
        self._micro_batches = micro_batches
        self._next: Counter[tuple[bool, int]] = Counter()
        self._owed: list[Action] = []

    def write(self, words: str, *, times: int = 1) -> None:
        """The actions of `words`, `times` over."""
        for word in words.split() * times:
            if word[0] == "W":
                self._weights(word[1:])
            else:
                self._step(word)

    def _step(self, word: str) -> None:
        kind: Kind = "F" if word[0] == "F" else "B" if word[0] == "B" else "I"
        stage = self._stages[word[1]]
        micro_batch = self._next[kind == "F", stage]
        self._next[kind == "F", stage] += 1
        if micro_batch < self._micro_batches:
            self.actions.append(Action(kind, stage, micro_batch))
            if kind == "I":
                self._owed.append(Action("W", stage, micro_batch))

    def _weights(self, which: str) -> None:
        for action in self._owed:
            if not which or action.stage == self._stages[which]:
                self._owed.remove(action)
                self.actions.append(action)
                return


def _zero_bubble(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """ZB-V: down the ranks and up again; weight gradients fill the gaps at the end.

    The pattern is made for 2 * ranks - 1 micro-batches or more; of fewer the surplus is left out.
    """
    pen, behind = _Pen(rank, ranks, micro_batches), ranks - rank
    full = max(micro_batches, 2 * ranks - 1)
    pen.write("F0", times=2 * behind - 1)
    pen.write("F1 F0", times=rank)
    pen.write("F1 I1 W1", times=behind)
    # The forward passes of the first stage run out earlier; the pen leaves those out.
    pen.write("F0 I0 W0 F1 I1 W1", times=full - ranks)
    pen.write("I0 I1", times=rank)
    pen.write("I0 W0", times=behind)
    pen.write("W1", times=rank)
    pen.write("W0", times=rank)
    return pen.actions


def _dualpipe_v(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """DualPipe-V in its eight steps, numbered as in DeepSeek's code."""
    pen, behind = _Pen(rank, ranks, micro_batches), ranks - 1 - rank
    pen.write("F0", times=2 * behind)  # 1
    pen.write("F0 F1", times=rank + 1)  # 2
    pen.write("I1 W F1", times=behind)  # 3
    pen.write("F0 B1 F1 B0", times=micro_batches - 2 * ranks + rank + 1)  # 4
    pen.write("B1 F1 B0", times=behind)  # 5
    for n in range(2 * (rank + 1)):  # 6: the second half splits its backward passes
        pen.write(("B" if n <= rank else "I") + ("0" if n % 2 else "1"))
    pen.write("W I0", times=behind)  # 7
    pen.write("W", times=rank + 1)  # 8
    return pen.actions


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "gpipe": Schedule("gpipe", "ScheduleGPipe", _gpipe),
        "1f1b": Schedule("1f1b", "Schedule1F1B", _one_forward_one_backward, fewest_per_rank=1),
        "interleaved": Schedule(
            "interleaved",
            "ScheduleInterleaved1F1B",
            _interleaved,
            chunks=2,
            more_chunks=True,
            even_rounds=True,
        ),
        "zero_bubble": Schedule(
            "zero_bubble",
            "ScheduleZBVZeroBubble",
            _zero_bubble,
            chunks=2,
            placement="v",
            compiles=False,
        ),
        "dualpipe_v": Schedule(
            "dualpipe_v",
            "ScheduleDualPipeV",
            _dualpipe_v,
            chunks=2,
            placement="v",
            fewest_per_rank=2,
            compiles=False,
            pairs=True,
        ),
    }
)
"""By name. The limits are those of torch 2.13, which the tests ask."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds that a stage takes for one micro-batch; a full backward is the sum of its two.

    Where backward is split, torch does all of it for the first stage in `W` (its inputs need no
    gradient): give that stage `backward_input=0` and its whole backward as `backward_weight`.
    """

    forward: float
    backward_input: float
    backward_weight: float

    def seconds(self, kind: Kind) -> float:
        """Of one action."""
        return {
            "F": self.forward,
            "B": self.backward_input + self.backward_weight,
            "I": self.backward_input,
            "W": self.backward_weight,
        }[kind]


class Event(NamedTuple):
    """An action with its time, in seconds from the start of the step."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step.

    Attributes:
        seconds: from the first action's start to the last one's end.
        busy: seconds that each rank computes.
        events: rank by rank, each in the order of time.
        peaks: for each rank, by stage: most micro-batches whose activations it holds at once.
            The stages of a rank need not peak together: `peak_activations` adds them up in time.
    """

    seconds: float
    busy: tuple[float, ...]
    events: tuple[Event, ...]
    peaks: tuple[Mapping[int, int], ...]

    @property
    def utilisation(self) -> float:
        """Share of the time that a rank computes, on average."""
        return sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 1.0


def peak_activations(order: Order, sizes: Sequence[float]) -> tuple[float, ...]:
    """The most activations that each rank holds at once, in the unit of `sizes`.

    They exist from the start of a stage's F to the end of its B, of its W where backward is split.
    A rank computes one action at a time, so that this follows from the order, whatever the times.

    Args:
        order: as from `order`.
        sizes: of the activations of one micro-batch, by stage.
    """
    peaks = []
    for actions in order:
        held = peak = 0.0
        for action in actions:
            held += _holds(action) * sizes[action.stage]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def simulate(
    order: Order, costs: Sequence[StageCost], *, send_seconds: float = 0.0, pairs: bool = False
) -> Timeline:
    """How a step goes when every rank computes its actions in order, one at a time.

    A stage's F waits for the F of the stage before, its B or I for the B or I of the stage behind,
    both of the same micro-batch; W follows its I. A result reaches another rank `send_seconds`
    after it is there; sending costs the ranks no time, and links are never full.

    Args:
        order: as from `order`, or any other.
        costs: by stage; they may differ.
        send_seconds: to hand one micro-batch's activations or gradients to another rank.
        pairs: an F with a B directly behind it sends its result only when the B has ended, as
            torch does in DualPipe-V (`Schedule.pairs`).

    Raises:
        ValueError: the order has a stage without a cost, or ranks that wait for one another.
    """
    run = _Simulation(order, costs, send_seconds, pairs=pairs)
    run.finish()
    return Timeline(
        seconds=max(run.clock, default=0.0),
        busy=tuple(sum(e.end - e.start for e in events) for events in run.events),
        events=tuple(event for events in run.events for event in events),
        peaks=tuple(_peaks_by_stage(actions) for actions in order),
    )


def share_cores(timeline: Timeline, crowd: float) -> Timeline:
    """The step where ranks share cores: who waits leaves its core to the others.

    All ranks that compute at a time go equally fast, so that what begins and ends in which order
    stays as it is; only the clock runs faster while few compute.

    Args:
        timeline: of ranks that have `1 / crowd` of a core each all the time.
        crowd: ranks to a core, at least 1.
    """
    ranks = len(timeline.busy)
    changes = sorted(
        [(e.start, 1) for e in timeline.events] + [(e.end, -1) for e in timeline.events]
    )
    clock, before, now, computing = {0.0: 0.0}, 0.0, 0.0, 0
    for time, change in changes:
        pace = max(1.0, computing * crowd / ranks) / crowd if computing else 1.0
        now += (time - before) * pace
        clock[time], before = now, time
        computing += change
    events = tuple(e._replace(start=clock[e.start], end=clock[e.end]) for e in timeline.events)
    busy = [0.0] * ranks
    for event in events:
        busy[event.rank] += event.end - event.start
    return replace(timeline, seconds=now, busy=tuple(busy), events=events)


def _holds(action: Action) -> int:
    """Change in the number of micro-batches held: at the start of F, at the end of B and W."""
    return {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]


def _peaks_by_stage(actions: Sequence[Action]) -> Mapping[int, int]:
    held: Counter[int] = Counter()
    peaks: dict[int, int] = {}
    for action in actions:
        held[action.stage] += _holds(action)
        peaks[action.stage] = max(peaks.get(action.stage, 0), held[action.stage])
    return MappingProxyType(dict(sorted(peaks.items())))


class _Simulation:
    """A step in the making: each rank goes on until it lacks a result, and again once it is there.

    Results are named by the action that makes them; a B makes the same as an I.
    """

    def __init__(
        self, order: Order, costs: Sequence[StageCost], send_seconds: float, *, pairs: bool
    ) -> None:
        self.clock = [0.0] * len(order)
        self.events: list[list[Event]] = [[] for _ in order]
        self._order, self._send_seconds, self._pairs = order, send_seconds, pairs
        self._rank = {a.stage: rank for rank, actions in enumerate(order) for a in actions}
        if set(self._rank) != set(range(len(costs))):
            raise ValueError(f"{len(costs)} costs do not fit the stages {sorted(self._rank)}")
        kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
        self._seconds = {(k, s): cost.seconds(k) for s, cost in enumerate(costs) for k in kinds}
        self._last = len(costs) - 1
        self._here: dict[Action, float] = {}  # when a result is there for its own rank
        self._sent: dict[Action, float] = {}  # and for the others
        self._unsent: list[list[Action]] = [[] for _ in order]
        self._waiting: dict[Action, int] = {}  # result -> rank that lacks it
        self._able = list(range(len(order)))

    def finish(self) -> None:
        """Runs to the end."""
        while self._able:
            self._advance(self._able.pop())
        stuck = [r for r, actions in enumerate(self._order) if len(self.events[r]) < len(actions)]
        if stuck:
            rank = min(stuck, key=lambda r: self.clock[r])
            action = self._order[rank][len(self.events[rank])]
            lacking = next(need for need in self._needs(action) if self._there(need, rank) is None)
            raise ValueError(
                f"the order cannot be carried out: rank {rank} waits at {action} for {lacking},"
                " which never comes"
            )

    def _advance(self, rank: int) -> None:
        """Computes what the rank can, from where it stopped."""
        actions, events, unsent = self._order[rank], self.events[rank], self._unsent[rank]
        for place in range(len(events), len(actions)):
            action = actions[place]
            start = self._start(action, rank)
            if start is None:
                return
            end = start + self._seconds[action.kind, action.stage]
            events.append(Event(rank, action, start, end))
            self.clock[rank] = end
            result = action._replace(kind="I") if action.kind == "B" else action
            self._here[result] = end
            unsent.append(result)
            if not (self._pairs and action.kind == "F" and _is_backward(actions, place + 1)):
                self._send(unsent, end + self._send_seconds)

    def _start(self, action: Action, rank: int) -> float | None:
        """When the action can begin; None, and a note of what it lacks, if that is not known."""
        start = self.clock[rank]
        for need in self._needs(action):
            there = self._there(need, rank)
            if there is None:
                self._waiting[need] = rank
                return None
            start = max(start, there)
        return start

    def _there(self, need: Action, rank: int) -> float | None:
        return (self._here if self._rank[need.stage] == rank else self._sent).get(need)

    def _needs(self, action: Action) -> tuple[Action, ...]:
        kind, stage, micro_batch = action
        if kind == "F":
            return (Action("F", stage - 1, micro_batch),) if stage else ()
        if kind == "W":
            return (Action("I", stage, micro_batch),)
        own = Action("F", stage, micro_batch)
        return (own,) if stage == self._last else (own, Action("I", stage + 1, micro_batch))

    def _send(self, results: list[Action], there: float) -> None:
        for result in results:
            self._sent[result] = there
            if result in self._waiting:
                self._able.append(self._waiting.pop(result))
        results.clear()


def _is_backward(actions: Sequence[Action], place: int) -> bool:
    return place < len(actions) and actions[place].kind == "B"
