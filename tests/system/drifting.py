"""One rank of a run whose second rank becomes slow: `python drifting.py STEP OVERRIDE…`.

From optimizer step STEP on, each layer of rank 1 sleeps before it computes.
"""

import os
import sys
import time

import danlu
from danlu.models.transformer import Block
from danlu.train import loop


def main(slow_from, *words):
    run = danlu.build(danlu.load(None, *words))
    forward, update = Block.forward, loop.update
    done = 0

    def slow_forward(self, *args, **more):
        if os.environ["RANK"] == "1" and done >= int(slow_from):
            time.sleep(0.01)
        return forward(self, *args, **more)

    def counted_update(*args):
        nonlocal done
        done += 1
        update(*args)

    Block.forward, loop.update = slow_forward, counted_update
    run.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
