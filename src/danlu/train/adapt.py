"""A plan fitted to the machine: by what is measured before the first step, and while it runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from danlu.base.errors import ConfigError
from danlu.base.units import format_duration
from danlu.config.run import RunConfig
from danlu.hardware.comm import Comm
from danlu.planner.plan import Plan
from danlu.planner.schedule import SCHEDULES
from danlu.planner.search import pin_layout
from danlu.planner.stages import cut_per_rank
from danlu.train.balance import LayerSeconds, StageBalancer
from danlu.train.build import Learner
from danlu.train.measure import explained, fastest, measure_layers
from danlu.train.planning import layout_is_open, plan_run

__all__ = ["Adapter"]


class Adapter:
    """Replaces what a plan predicted by what the machine shows. All ranks call it together.

    Attributes:
        plan: the plan as it is now.

    Args:
        config: what the user wants.
        plan: as it was predicted to be best.
        comm: all ranks.
        scratch: as for `build`.
        phase: told what takes time.
        note: told, in a sentence, what was found.
        event: told the same for the run's event log: a kind, and fields.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        comm: Comm,
        *,
        scratch: Path,
        phase: Callable[[str], None],
        note: Callable[[str], None],
        event: Callable[..., None],
    ) -> None:
        self._config, self.plan, self._comm = config, plan, comm
        self._scratch = scratch
        self._phase, self._note, self._event = phase, note, event
        self._layers: LayerSeconds | None = None
        self._balancer: StageBalancer | None = None
        self._better: Plan | None = None

    def before_first_step(self) -> None:
        """Keeps the fastest of the best layouts, and cuts stages by the measured time of layers."""
        self._try_layouts()
        self._measure_stages()

    def watch(self, learner: Learner) -> None:
        """Begins to watch how long the ranks of a pipeline compute, where stages are `measured`."""
        self._balancer = None
        if learner.pipeline is not None and self._layers is not None:
            layers = self.plan.model.layers
            self._balancer = StageBalancer(learner.ranks, learner.pipeline, self._layers, layers)

    def after_step(self) -> bool:
        """Whether the ranks' speeds have drifted so far that another cut of the layers pays."""
        better = None if self._balancer is None else self._balancer.after_step()
        if better is None:
            return False
        self._balancer = None  # it holds the model, which makes room for the next one
        self._better = self._cut(better, "layers cut again by the ranks' speeds")
        return self._better is not None

    def cut_again(self) -> None:
        """Takes the cut that `after_step` has found."""
        assert self._better is not None, "after_step has found nothing"
        now, better = (_text(plan.layout.stages) for plan in (self.plan, self._better))
        self.plan = self._better
        self._event("replan", reason="stages", before=now, after=better)
        self._note(f"The ranks' speeds have drifted: layers were cut {now}, now {better}.")

    def _try_layouts(self) -> None:
        count = min(self._config.launch.measure_layouts, len(self.plan.alternatives))
        if self._comm.world == 1 or count < 2 or not layout_is_open(self._config):
            return
        self._phase(f"trying the {count} best layouts")
        found = fastest(self._config, self.plan, self._comm, scratch=self._scratch, count=count)
        self.plan = found[0].plan
        for plan, seconds in found:
            predicted = plan.predicted.step_seconds
            text = f"{plan.layout.text()}: {format_duration(seconds)} a step"
            self._event("layout", text=text, seconds=seconds, predicted=predicted, plan=plan.hash)
        self._note(f"Layout: {self.plan.layout.text()}, the fastest of {count} tried.")

    def _measure_stages(self) -> None:
        layout = self.plan.layout
        if layout.pipeline == 1 or self._config.pipeline_parallel.layers != "measured":
            return
        self._phase("measuring the layers")
        self._layers = measure_layers(self.plan, self._comm)
        first, block, last = self._layers
        owners = SCHEDULES[layout.schedule].owners(layout.pipeline, layout.chunks)
        sizes = cut_per_rank([block] * self.plan.model.layers, owners, first=first, last=last)
        better = self._cut(sizes, "layers cut by their measured time")
        if better is None:
            return
        self._note(
            f"Layers are cut {_text(sizes)}: embedding {first / block:.2f}, head"
            f" {last / block:.2f} times a layer, measured."
        )
        if sizes != layout.stages:
            self.plan = better

    def _cut(self, sizes: tuple[int, ...], reason: str) -> Plan | None:
        """The plan with the layers cut otherwise; None, and a note, where it is not possible."""
        choice = replace(self.plan.alternatives[0], layout=replace(self.plan.layout, stages=sizes))
        config = pin_layout(self._config, choice)
        try:
            plan = plan_run(config, self.plan.cluster, world=self._comm.world, before=self.plan)
        except ConfigError as error:
            now = _text(self.plan.layout.stages)
            self._note(f"Layers stay cut {now}: with {_text(sizes)}, {error.problem}")
            return None
        return explained(plan, self.plan, reason)


def _text(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
