"""The whole config of a run: all blocks together."""

import hashlib
import json
from typing import Any

from pydantic import Field

from danlu.config._block import Auto, Block, Positive, Seconds, Seed, Text
from danlu.config.checkpoint import CheckpointConfig, ResilienceConfig
from danlu.config.data import DataConfig
from danlu.config.model import ModelConfig
from danlu.config.monitor import MonitorConfig
from danlu.config.optim import OptimizerConfig, ScheduleConfig
from danlu.config.parallel import (
    CommunicationConfig,
    DataParallelConfig,
    LaunchConfig,
    PipelineParallelConfig,
    TensorParallelConfig,
    ZeroConfig,
)
from danlu.config.precision import KernelConfig, MemoryConfig, PrecisionConfig
from danlu.config.tune import SimulateConfig, TuneConfig

__all__ = ["RunConfig", "TrainConfig"]


class TrainConfig(Block):
    """How long and in which steps."""

    steps: Positive | Auto = "auto"
    """Optimizer steps; `auto` is what fits into `duration` at the predicted speed."""
    duration: Seconds = Field(240.0, gt=0, le=10 * 365 * 86400)
    """Training time that `steps: auto` aims at."""
    batch_tokens: Positive | Auto = "auto"
    """Tokens in an optimizer step, over all ranks; `auto` follows the Step law (arXiv
    2503.04715)."""
    micro_batch: Positive | Auto = "auto"
    """Sequences that one rank computes at once; the rest of a step is accumulated."""
    seed: Seed = 0
    """Everything random comes from it; 0 to 2^62."""
    evaluate_every: Positive | Auto = "auto"
    """Steps between two evaluations on held-out text; `auto` is ten a run."""
    evaluate_tokens: Positive | Auto = "auto"
    """Held-out tokens of an evaluation, the same ones each time; `auto` spends about 4 % of the run
    on evaluations."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: a GPU where there is one."""


class RunConfig(Block):
    """A run. Every key has a default; a few lines are a whole run."""

    name: Text | None = None
    """Name of the run; the config file's name when left out."""
    folder: Text | Auto = "auto"
    """The run's folder; `auto` is `runs/NAME`."""
    model: ModelConfig = ModelConfig()
    """The transformer."""
    data_pipeline: DataConfig = DataConfig()
    """Text in, batches of token windows out."""
    train: TrainConfig = TrainConfig()
    """How long and in which steps."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The update rule."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over the run."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    memory: MemoryConfig = MemoryConfig()
    """What is kept for backward and what is computed again."""
    kernels: KernelConfig = KernelConfig()
    """Which implementation of an operation runs."""
    data_parallel: DataParallelConfig = DataParallelConfig()
    """Whole copies of the model."""
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    """A layer's matrices split over devices."""
    pipeline_parallel: PipelineParallelConfig = PipelineParallelConfig()
    """Layers cut into stages."""
    zero_optimization: ZeroConfig = ZeroConfig()
    """State sharded over the data-parallel ranks."""
    communication: CommunicationConfig = CommunicationConfig()
    """What travels between ranks."""
    launch: LaunchConfig = LaunchConfig()
    """Processes and threads on this machine."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Snapshots on disk."""
    resilience: ResilienceConfig = ResilienceConfig()
    """Faults and what is done about them."""
    monitor: MonitorConfig = MonitorConfig()
    """Progress, metrics and the report."""
    tune: TuneConfig = TuneConfig()
    """A search over config keys."""
    simulate: SimulateConfig = SimulateConfig()
    """A cluster that is only calculated."""

    def to_dict(self) -> dict[str, Any]:
        """The tree as JSON-ready values."""
        return self.model_dump(mode="json")

    def fingerprint(self) -> str:
        """Twelve hex digits that name this very config."""
        return fingerprint(self.to_dict())


def fingerprint(value: Any) -> str:
    """Twelve hex digits that name a JSON-ready value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
