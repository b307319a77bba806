"""One rank of a run whose second rank becomes slow: `python drifting.py STEP OVERRIDE…`.

From optimizer step STEP on, each layer of rank 1 sleeps before it computes. The peak of the machine
is taken to have been measured far too low.
"""

import gc
import os
import sys
import time
from dataclasses import replace

import danlu
from danlu.models.transformer import Block
from danlu.train import loop
from danlu.train import run as train_run


def main(slow_from, *words):
    run = danlu.build(danlu.load(None, *words))
    device = run.plan.cluster.device
    rates = {name: rate / 300 for name, rate in device.peak_flops.items()}
    low = replace(device, peak_flops=rates)
    run.plan = run._adapter.plan = replace(run.plan, cluster=replace(run.plan.cluster, device=low))
    forward, update, build = Block.forward, loop.update, train_run.build
    done = 0

    def slow_forward(self, *args, **more):
        if os.environ["RANK"] == "1" and done >= int(slow_from):
            time.sleep(0.01)
        return forward(self, *args, **more)

    def counted_update(*args):
        nonlocal done
        done += 1
        update(*args)

    def build_alone(*args, **more):
        assert not any(type(thing) is Block for thing in gc.get_objects()), "an old model is left"
        return build(*args, **more)

    Block.forward, loop.update, train_run.build = slow_forward, counted_update, build_alone
    run.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
