"""Pipeline parallelism on torch.distributed.pipelining.

The stages that a rank holds become PyTorch's pipeline stages, and one of PyTorch's schedules runs
their forward and backward passes over the micro-batches of a step. A stage is handed the residual
stream of the one before; token ids, targets and document starts are known to every rank (they read
the same samples), so nothing else travels.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    _Action,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)

from danlu.parallel.mesh import Ranks

__all__ = ["Pipeline"]

_ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}


class _Stage(PipelineStage):
    """A stage that tells how long it computes, while `timed`.

    Attributes:
        seconds: of its passes so far; time in which it waits for other stages is not among them.
    """

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self.timed, self.seconds = False, 0.0

    def forward_one_chunk(self, *args: Any, **words: Any) -> Any:
        with self._clock():
            return super().forward_one_chunk(*args, **words)

    def backward_one_chunk(self, *args: Any, **words: Any) -> Any:
        with self._clock():
            return super().backward_one_chunk(*args, **words)

    def backward_weight_one_chunk(self, *args: Any, **words: Any) -> Any:
        with self._clock():
            return super().backward_weight_one_chunk(*args, **words)

    @contextlib.contextmanager
    def _clock(self) -> Iterator[None]:
        if not self.timed:
            yield
            return
        self._compute()
        began = time.perf_counter()
        yield
        self._compute()
        self.seconds += time.perf_counter() - began

    def _compute(self) -> None:
        """Waits for what this rank has been given to compute, and for what that needs."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class Pipeline:
    """This rank's part of a pipeline.

    Args:
        segments: stage number → module, called with (ids or residual stream, targets, document
            starts, scale); the last one returns a loss.
        ranks: the mesh and the layout.
        micro_batches: of a step.
        device: of this rank.
    """

    def __init__(
        self, segments: dict[int, nn.Module], ranks: Ranks, micro_batches: int, device: torch.device
    ) -> None:
        self.micro_batches = micro_batches
        self._layout = ranks.layout
        self._has_first = 0 in segments
        self._has_last = len(ranks.layout.stages) - 1 in segments
        self._stages = partial(_stages, segments, ranks, device)
        self._computing = self._stages()
        self._training = self._schedule(self._computing)
        self._forward_only: _PipelineSchedule | None = None

    def time(self, *, wanted: bool) -> float:
        """Says whether the next step is timed; seconds that this rank's stages computed till now.

        On a GPU a timed step waits for each pass.
        """
        seconds = sum(stage.seconds for stage in self._computing)
        for stage in self._computing:
            stage.timed, stage.seconds = wanted, 0.0
        return seconds

    def _schedule(self, stages: Sequence[_Stage]) -> _PipelineSchedule:
        name = self._layout.schedule
        if name in _ONE_STAGE:
            return _ONE_STAGE[name](stages[0], self.micro_batches, loss_fn=_loss, scale_grads=False)
        return _SEVERAL[name](list(stages), self.micro_batches, loss_fn=_loss, scale_grads=False)

    def _forward_schedule(self) -> _PipelineSchedule:
        """Forward passes only, each stage's micro-batches one after another.

        PyTorch's V-shaped schedules fail where backward is left out (2.13), so evaluation has an
        order and stages of its own; the stages share their modules with the training ones.
        """
        layout, stages = self._layout, self._stages()
        schedule = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            list(stages), self.micro_batches, loss_fn=_loss, scale_grads=False
        )
        owners = {s: r for r in range(layout.pipeline) for s in layout.stage_numbers(r)}
        schedule.stage_index_to_group_rank = owners
        actions: list[_Action] = []
        for stage in stages:
            stage.stage_index_to_group_rank = owners
            number, mine = stage.stage_index, owners[stage.stage_index]
            received = number > 0 and owners[number - 1] != mine
            sent = number + 1 < len(owners) and owners[number + 1] != mine
            actions.append(_Action(number, _ComputationType.UNSHARD))
            for m in range(self.micro_batches):
                if received:
                    actions.append(_Action(number, _ComputationType.RECV_F, m))
                actions.append(_Action(number, _ComputationType.FORWARD, m))
                if sent:
                    actions.append(_Action(number, _ComputationType.SEND_F, m))
            actions.append(_Action(number, _ComputationType.RESHARD))
        schedule.pipeline_order_with_comms = {schedule.rank: actions}
        return schedule

    def run(self, batches: Sequence[tuple[Tensor, Tensor, Tensor | None]], scale: float) -> Tensor:
        """Forward and backward of a step; its loss on the ranks that hold the last stage, else 0.

        Args:
            batches: ids, targets and document starts of each micro-batch, as many as a step has.
            scale: factor on the sum of losses.
        """
        losses: list[Tensor] = []
        self._training.step(*self._ids(batches), **self._keywords(batches, scale, losses))
        return _total(losses, batches)

    @torch.no_grad()
    def evaluate(
        self, batches: Sequence[tuple[Tensor, Tensor, Tensor | None]], scale: float
    ) -> Tensor:
        """As `run`, forward only."""
        if self._forward_only is None:
            self._forward_only = self._forward_schedule()
        losses: list[Tensor] = []
        self._forward_only.eval(*self._ids(batches), **self._keywords(batches, scale, losses))
        return _total(losses, batches)

    def _ids(self, batches: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> tuple[Tensor, ...]:
        return (torch.cat([ids for ids, _, _ in batches]),) if self._has_first else ()

    def _keywords(
        self,
        batches: Sequence[tuple[Tensor, Tensor, Tensor | None]],
        scale: float,
        losses: list[Tensor],
    ) -> dict[str, Any]:
        assert len(batches) == self.micro_batches, "a schedule has a fixed number of micro-batches"
        targets = torch.cat([targets for _, targets, _ in batches])
        starts = [starts for _, _, starts in batches if starts is not None]
        return {
            "targets_bt": targets,
            "starts_bt": torch.cat(starts) if starts else None,
            "scale": scale,
            "target": targets if self._has_last else None,
            "losses": losses if self._has_last else None,
            "return_outputs": False,
        }


def _stages(segments: dict[int, nn.Module], ranks: Ranks, device: torch.device) -> list[_Stage]:
    group, count = ranks.group("pipeline"), len(ranks.layout.stages)
    return [
        _Stage(module, number, count, device, group=group) for number, module in segments.items()
    ]


def _loss(output: Tensor, _target: Tensor) -> Tensor:
    """The last stage has computed it."""
    return output


def _total(
    losses: Sequence[Tensor], batches: Sequence[tuple[Tensor, Tensor, Tensor | None]]
) -> Tensor:
    total = torch.zeros((), device=batches[0][0].device)
    for loss in losses:
        total += loss.detach()
    return total
