"""What every place that metrics go to promises."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from danlu.base.registry import Registry

__all__ = ["SINKS", "Sink"]


class Sink(ABC):
    """One place that metrics go to. The module's name is what users write in `monitor.sinks`.

    A sink is made without arguments, opened on a run's folder, written to from one thread, and
    closed. Opening a folder that already holds records continues them: nothing is rewritten. A sink
    may be slow and may raise; `Recorder` keeps both away from training.
    """

    @abstractmethod
    def open(self, folder: Path) -> None:
        """Makes ready to write into the run's `folder`.

        Raises:
            ConfigError: something the sink needs is not installed.
        """

    @abstractmethod
    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one record: `kind` ("step", "evaluation", …), `time` (Unix seconds), numbers."""

    @abstractmethod
    def close(self) -> None:
        """Flushes and closes; every record written before can be read afterwards."""


SINKS: Registry[Sink] = Registry("danlu.monitor.sinks", Sink, "monitor.sinks")
"""All sinks, by the name of their file."""
