"""One rank of a run that `danlu train` has launched."""

import json
import sys

from danlu.base.errors import UserError
from danlu.config.load import load
from danlu.train.ranks import NOT_FINITE, PEER_IS_GONE, lost_a_peer
from danlu.train.run import open_run

__all__ = ["main"]


def main(config: str) -> int:
    """Joins the other ranks and trains a config in JSON; returns the exit code."""
    try:
        return 0 if open_run(load(json.loads(config))).train() != "nan" else NOT_FINITE
    except UserError as error:  # every rank raises it; the output of all but the first is a file
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except RuntimeError as error:
        if not lost_a_peer(error):
            raise
        return PEER_IS_GONE
