"""One process of several: `python -m danlu.train.rank MODULE ARGUMENT` calls the module's `main`.

The module is imported only here, and that takes seconds: Ctrl-C while it runs ends the rank without
a word, since the process that started the ranks says it.
"""

import importlib
import sys

from danlu.base.output import leave

__all__ = ["main"]

_INTERRUPTED = 130


def main(module: str, argument: str) -> int:
    """Runs a rank; returns its exit code."""
    try:
        return int(importlib.import_module(module).main(argument))
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
