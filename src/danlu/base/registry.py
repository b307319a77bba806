"""A folder of parts, found by name.

A kind of part (learning-rate schedules, data sources, number formats …) is one package; a part is
one module in it whose name is what users write in a config, holding exactly one concrete subclass
of the kind's abstract class. Nothing is listed
anywhere: dropping a file into the folder registers it, and its module is imported only when asked
for. Other people's packages add parts through the entry-point group of the kind, e.g.
`danlu.schedules`.
"""

import importlib
import importlib.metadata
import inspect
import pkgutil
from typing import Generic, TypeVar

from danlu.base.errors import ConfigError, closest

__all__ = ["Registry"]

Part = TypeVar("Part")


class Registry(Generic[Part]):
    """The parts of one kind.

    Args:
        package: the folder, e.g. `danlu.optim.schedules`.
        base: the abstract class that every part of the kind extends.
        key: the config key that names a part, for error messages.
    """

    def __init__(self, package: str, base: type[Part], key: str) -> None:
        self.package, self.base, self.key = package, base, key
        self.group = "danlu." + package.rsplit(".", 1)[-1]

    def names(self) -> list[str]:
        """All names, sorted, without importing the parts."""
        folder = importlib.import_module(self.package)
        own = [m.name for m in pkgutil.iter_modules(folder.__path__) if not m.name.startswith("_")]
        return sorted({*own, *(p.name for p in importlib.metadata.entry_points(group=self.group))})

    def find(self, name: str) -> type[Part]:
        """The class of the part called `name`.

        Raises:
            ConfigError: there is no such part; the message suggests the nearest name.
        """
        if name not in self.names():
            raise ConfigError(self.key, f"there is no {name!r}.", closest(name, self.names()))
        for point in importlib.metadata.entry_points(group=self.group, name=name):
            return point.load()  # type: ignore[no-any-return]
        module = importlib.import_module(f"{self.package}.{name}")
        return self._only_part(module.__name__, vars(module))

    def _only_part(self, module: str, members: dict[str, object]) -> type[Part]:
        parts = [
            member
            for member in members.values()
            if inspect.isclass(member)
            and issubclass(member, self.base)
            and member.__module__ == module
            and not inspect.isabstract(member)
        ]
        assert len(parts) == 1, f"{module} must hold exactly one {self.base.__name__}, has {parts}"
        return parts[0]
