"""Who takes part: found by looking into ``runners/``, so that a new peer is one file."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

from benchmarks.peers import runners
from benchmarks.peers.protocol import Peer

REFERENCE = "plain:default"
"""The plain fp32 loop: alive in every group, and the base of one of the two ratios."""
OURS = "danlu"
PEAK = "matmul:peak"


@dataclass(frozen=True)
class Entry:
    """One peer in one setting: one process, one line of the table."""

    peer: Peer
    setting: str
    module: str

    @property
    def name(self) -> str:
        """``PEER:SETTING``, the entry's name in every table and file."""
        return f"{self.peer.name}:{self.setting}"

    @property
    def is_ours(self) -> bool:
        """Whether this is danlu itself, whose turns stand around every other's."""
        return self.peer.name == OURS

    @property
    def is_rival(self) -> bool:
        """Whether danlu is to be compared with it: everything that trains and is not danlu."""
        return not self.is_ours and self.name != PEAK


def discover() -> list[Entry]:
    """Every setting of every peer in ``runners/``, by name."""
    entries = []
    for found in pkgutil.iter_modules(runners.__path__, f"{runners.__name__}."):
        if found.name.endswith("_run"):
            peer: Peer = importlib.import_module(found.name).PEER
            entries += [Entry(peer, setting, found.name) for setting in peer.settings]
    return entries


def choose(entries: list[Entry], only: list[str]) -> list[Entry]:
    """The entries whose peer or full name is in ``only``, plus those every run needs.

    Raises:
        ValueError: A name in ``only`` is neither a peer nor an entry.
    """
    if not only:
        return entries
    known = {entry.name for entry in entries} | {entry.peer.name for entry in entries}
    unknown = sorted(set(only) - known)
    if unknown:
        raise ValueError(
            f"--only: no peer named {', '.join(unknown)}. Use {', '.join(sorted(known))}."
        )
    wanted = {*only, REFERENCE, PEAK, OURS}
    return [entry for entry in entries if wanted & {entry.name, entry.peer.name}]
