"""The Plan: every number a run needs, decided before it starts, as one frozen value.

It is printed, hashed, saved in the run's folder and read back. Nothing below the planner asks what
the user configured, and nothing above it decides again.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from danlu.base.errors import CheckpointError
from danlu.base.facts import ClusterFacts, ModelShape
from danlu.base.files import write_json
from danlu.planner.explain import explain

__all__ = ["Decision", "Plan", "Prediction"]


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
        memory: bytes of a rank by part.
    """

    step_seconds: float
    tokens_per_second: float
    mfu: float
    seconds: Mapping[str, float]
    memory: Mapping[str, int]

    @property
    def memory_bytes(self) -> int:
        """Bytes of a rank."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """A run in numbers.

    Attributes:
        model: the transformer.
        parameters: its weights.
        flops_per_token: of training.
        cluster: the machines it was made for.
        data_parallel: copies of the model (and ranks).
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
    """

    model: ModelShape
    parameters: int
    flops_per_token: float
    cluster: ClusterFacts
    data_parallel: int
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

    @property
    def batch_sequences(self) -> int:
        """Sequences of an optimizer step, over all ranks."""
        return self.data_parallel * self.micro_batch * self.accumulation

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of all devices that the run uses, in its format."""
        devices = 1 if self.cluster.device.kind == "cpu" else self.data_parallel
        nodes = self.cluster.nodes if self.cluster.device.kind == "cpu" else 1
        return self.cluster.device.peak_flops[self.format] * devices * nodes

    @property
    def hash(self) -> str:
        """Twelve hex digits over everything that is decided (not over what is predicted)."""
        values = self.to_dict()
        for name in ("hash", "predicted", "decisions", "cluster"):
            values.pop(name, None)
        text = json.dumps(values, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values, without its hash."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["model"] = asdict(self.model)
        values["cluster"] = self.cluster.to_dict()
        values["predicted"] = asdict(self.predicted)
        values["decisions"] = [asdict(d) for d in self.decisions]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; unknown keys are passed over."""
        known = {f.name for f in fields(cls)}
        chosen = {k: v for k, v in values.items() if k in known}
        chosen["model"] = ModelShape(**values["model"])
        chosen["cluster"] = ClusterFacts.from_dict(values["cluster"])
        chosen["predicted"] = Prediction(**values["predicted"])
        chosen["decisions"] = tuple(Decision(**d) for d in values["decisions"])
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
            return cls.from_dict(values)
        except FileNotFoundError:
            raise CheckpointError(str(path), "there is no plan.", "Is this a run folder?") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                str(path), f"the plan cannot be read ({error}).", "Delete it to plan again."
            ) from None
