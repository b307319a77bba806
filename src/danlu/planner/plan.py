"""The Plan: every number a run needs, decided before it starts, as one frozen value.

It is printed, hashed, saved in the run's folder and read back. Nothing below the planner asks what
the user configured, and nothing above it decides again.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from danlu.base.errors import CheckpointError
from danlu.base.facts import ClusterFacts, ModelShape
from danlu.base.files import write_json
from danlu.planner.explain import explain
from danlu.planner.layout import Layout

__all__ = ["Alternative", "Decision", "Plan", "Prediction"]


_RESUMED: Mapping[str, type] = MappingProxyType(
    {"steps": int, "batch_tokens": int, "warmup_steps": int, "learning_rate": float, "format": str}
)
"""What a resumed run takes from the plan it had before."""


@dataclass(frozen=True)
class Decision:
    """One number with its reason."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True)
class Prediction:
    """What the planner expects of a step, to be held against what is measured.

    Attributes:
        step_seconds: of one optimizer step.
        tokens_per_second: over all ranks.
        mfu: model FLOP over what the used devices could do at their peak in the same time.
        seconds: the step by part.
        memory: bytes by part of the rank that needs most.
        ranks_memory: the same of each pipeline rank.
        utilisation: share of the time that a pipeline's ranks compute; None without a pipeline.
    """

    step_seconds: float
    tokens_per_second: float
    mfu: float
    seconds: Mapping[str, float]
    memory: Mapping[str, int]
    ranks_memory: tuple[Mapping[str, int], ...] = ()
    utilisation: float | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of a rank."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Alternative:
    """A layout that was weighed, with what it should cost.

    `bubble` is the share of the step in which the busiest rank waits for others.
    """

    layout: Layout
    micro_batch: int
    micro_batches: int
    step_seconds: float
    tokens_per_second: float
    memory_bytes: int
    bubble: float


@dataclass(frozen=True)
class Plan:
    """A run in numbers.

    Attributes:
        model: the transformer.
        parameters: its weights.
        flops_per_token: of training.
        cluster: the machines it was made for.
        layout: how the model lies over ranks.
        threads: CPU threads of a rank.
        format: of activations and matrix products.
        backend: `native` or `torch` operations.
        compile: whether torch.compile is used.
        batch_tokens: tokens of an optimizer step, over all ranks.
        micro_batch: sequences a rank computes at once.
        accumulation: micro-batches of a rank in a step.
        steps: optimizer steps.
        warmup_steps: of the learning rate's rise.
        learning_rate: its peak.
        evaluate_every, checkpoint_every: steps between two.
        evaluate_tokens: held-out tokens of an evaluation.
        predicted: what a step should cost.
        decisions: how each number came about.
        alternatives: the layouts that are predicted to be fastest, this one first.
        rejected: families of layouts that were not chosen, and why.
    """

    model: ModelShape
    parameters: int
    flops_per_token: float
    cluster: ClusterFacts
    layout: Layout
    threads: int
    format: str
    backend: str
    compile: bool
    batch_tokens: int
    micro_batch: int
    accumulation: int
    steps: int
    warmup_steps: int
    learning_rate: float
    evaluate_every: int
    evaluate_tokens: int
    checkpoint_every: int
    predicted: Prediction
    decisions: tuple[Decision, ...]
    alternatives: tuple[Alternative, ...] = ()
    rejected: tuple[Decision, ...] = ()

    @property
    def batch_sequences(self) -> int:
        """Sequences of an optimizer step, over all ranks."""
        return self.layout.data * self.micro_batch * self.accumulation

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of all devices that the run uses, in its format."""
        devices = 1 if self.cluster.device.kind == "cpu" else self.layout.ranks
        nodes = self.cluster.nodes if self.cluster.device.kind == "cpu" else 1
        return self.cluster.device.peak_flops[self.format] * devices * nodes

    @property
    def hash(self) -> str:
        """Twelve hex digits over everything that is decided (not over what is predicted)."""
        values = self.to_dict()
        for name in ("hash", "predicted", "decisions", "cluster", "alternatives", "rejected"):
            values.pop(name, None)
        text = json.dumps(values, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values, without its hash."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["model"] = asdict(self.model)
        values["layout"] = self.layout.to_dict()
        values["cluster"] = self.cluster.to_dict()
        values["predicted"] = asdict(self.predicted)
        for name in ("decisions", "alternatives", "rejected"):
            values[name] = [asdict(item) for item in getattr(self, name)]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; unknown keys are passed over."""
        known = {f.name for f in fields(cls)}
        chosen = {k: v for k, v in values.items() if k in known}
        chosen["model"] = ModelShape(**values["model"])
        chosen["layout"] = Layout.from_dict(values["layout"])
        chosen["cluster"] = ClusterFacts.from_dict(values["cluster"])
        chosen["predicted"] = Prediction(
            **{**values["predicted"], "ranks_memory": tuple(values["predicted"]["ranks_memory"])}
        )
        for name in ("decisions", "rejected"):
            chosen[name] = tuple(Decision(**d) for d in values[name])
        chosen["alternatives"] = tuple(
            Alternative(**{**a, "layout": Layout.from_dict(a["layout"])})
            for a in values["alternatives"]
        )
        return cls(**chosen)

    def explain(self) -> str:
        """What was decided and why, what it should cost, as text."""
        return explain(self)

    def save(self, path: Path) -> None:
        """Writes the plan as JSON, with its hash."""
        write_json(path, {"hash": self.hash, **self.to_dict()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a saved plan.

        Raises:
            CheckpointError: a file that is missing, broken, or was edited into something else.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise TypeError("it holds no keys")
            plan = cls.from_dict(values)
            for name, kind in _RESUMED.items():
                if type(value := getattr(plan, name)) is not kind:
                    raise TypeError(f"{name} is {value!r}")
            return plan
        except FileNotFoundError:
            raise CheckpointError(str(path), "there is no plan.", "Is this a run folder?") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                str(path), f"the plan cannot be read ({error}).", "Delete it to plan again."
            ) from None
