"""danlu (丹炉): a training system for transformer language models, from a laptop to a cluster.

    import danlu

    config = danlu.load("run.yaml", "train.steps=1000")   # checked, frozen
    plan = danlu.plan(config, cluster="2x8xh100")         # arithmetic only
    print(plan.explain())

    run = danlu.build(config)                             # plans for the machine it is on
    run.train()                                           # resumes by itself
    print(run.report().summary())

Names are imported when they are first used: `import danlu` is instant and needs no torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danlu.base.errors import (
        CheckpointError,
        ConfigError,
        DanluError,
        DataError,
        MachineError,
        UserError,
    )
    from danlu.config.load import load
    from danlu.config.run import RunConfig
    from danlu.data.corpus import Corpus
    from danlu.data.prepare import prepare
    from danlu.models.transformer import Transformer
    from danlu.planner.plan import Plan
    from danlu.train.inference import load_model
    from danlu.train.planning import plan_run as plan
    from danlu.train.run import Run
    from danlu.train.run import open_run as build

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Corpus",
    "DanluError",
    "DataError",
    "MachineError",
    "Plan",
    "Run",
    "RunConfig",
    "Transformer",
    "UserError",
    "build",
    "load",
    "load_model",
    "plan",
    "prepare",
]

__version__ = "0.1.0"

# Threads that wait for work spin before they sleep, by default for milliseconds. Where anything
# else wants the CPUs that is many times slower than sleeping at once (figures in docs/log.md). Read
# by libgomp when torch loads it, so it is set before.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_HOME = {
    "CheckpointError": ("danlu.base.errors", "CheckpointError"),
    "ConfigError": ("danlu.base.errors", "ConfigError"),
    "Corpus": ("danlu.data.corpus", "Corpus"),
    "DanluError": ("danlu.base.errors", "DanluError"),
    "DataError": ("danlu.base.errors", "DataError"),
    "MachineError": ("danlu.base.errors", "MachineError"),
    "Plan": ("danlu.planner.plan", "Plan"),
    "Run": ("danlu.train.run", "Run"),
    "RunConfig": ("danlu.config.run", "RunConfig"),
    "Transformer": ("danlu.models.transformer", "Transformer"),
    "UserError": ("danlu.base.errors", "UserError"),
    "build": ("danlu.train.run", "open_run"),
    "load": ("danlu.config.load", "load"),
    "load_model": ("danlu.train.inference", "load_model"),
    "plan": ("danlu.train.planning", "plan_run"),
    "prepare": ("danlu.data.prepare", "prepare"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'danlu' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
