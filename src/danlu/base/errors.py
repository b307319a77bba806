"""What can go wrong, said so that the reader knows what to do next.

Two kinds. A `UserError` is something the user can mend: a key, a file, a value. It is shown as one
line (which key or file, what is wrong, how to fix it) and ends the program with exit code 2. A
`MachineError` is our fault or the machine's: exit code 1. Everything else is a bug and keeps its
traceback.
"""

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DanluError",
    "DataError",
    "MachineError",
    "NotAvailableError",
    "UserError",
    "closest",
]


class DanluError(Exception):
    """The root of everything that danlu raises on purpose."""

    exit_code = 1


class UserError(DanluError):
    """Something the user can mend.

    Args:
        where: the key (`train.steps`) or the file that the problem is in.
        problem: what is wrong, with the offending value.
        fix: what to do about it, as a sentence.

    Attributes:
        common: whether every rank of a run meets it, so that one of them says enough.
    """

    exit_code = 2
    common = False

    def __init__(self, where: str, problem: str, fix: str = "") -> None:
        self.where, self.problem, self.fix = where, problem, fix
        super().__init__(" ".join(f"{where}: {problem} {fix}".split()))

    def __reduce__(
        self,
    ) -> tuple[type["UserError"], tuple[str, str, str], dict[str, bool]]:
        """Errors cross process boundaries whole (workers that prepare data, ranks).

        The copy is `common`: the process that it comes from has it too.
        """
        return type(self), (self.where, self.problem, self.fix), {"common": True}


class ConfigError(UserError):
    """A key that does not exist, a value of the wrong type, or one that cannot be."""

    common = True


class NotAvailableError(ConfigError):
    """A key that is part of the system's design but not built in this version."""


class DataError(UserError):
    """A corpus, tokenizer or token shard that cannot be used."""


class CheckpointError(UserError):
    """A run folder or checkpoint that is broken or belongs to something else."""


class MachineError(DanluError):
    """The machine failed us (a rank died, a device vanished); nothing in the config is wrong."""


def closest(word: str, choices: Iterable[str]) -> str:
    """A sentence that suggests the nearest of `choices`, or lists them all when none is near."""
    options = sorted(choices)
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {near[0]}?"
    return f"Use one of: {', '.join(options)}." if options else ""
