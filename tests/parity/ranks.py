"""One rank of a parity test: trains layout after layout and writes down what came out.

Run by `layouts.run` as `python ranks.py TASK.json`, with a launcher's environment variables. A task
has the keys `corpus` and `out` (folders), `layouts` (name -> overrides), `steps`, `reshard` (pairs
of names), `targets` and `checkpoints`.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from danlu.base.output import leave
from danlu.checkpoint.disk import CheckpointStore
from danlu.checkpoint.state import CheckpointFacts
from danlu.config.load import load
from danlu.data.corpus import Corpus
from danlu.hardware.cluster import local_cluster
from danlu.hardware.comm import join_ranks
from danlu.parallel.offload import HostOffload
from danlu.train.balance import Balancer
from danlu.train.build import build, build_loader, document_end
from danlu.train.evaluate import evaluate
from danlu.train.loop import clip, forward_backward, update
from danlu.train.planning import plan_run


def in_host_memory(optimizer, share, _file):
    """As on a GPU, in pieces of a few hundred weights."""
    return HostOffload(optimizer, share, torch.device("cpu"), room=2**30, piece_bytes=1024)


class Trial:
    """A layout in training."""

    def __init__(self, words, comm, corpus, scratch, slow=0.0, host_memory=False):
        self.config = load(None, *words)
        self.plan = plan_run(self.config, local_cluster(), world=comm.world)
        if host_memory:
            with patch("danlu.train.build.FileOffload", in_host_memory):
                self.learner = build(self.config, self.plan, comm, scratch=scratch, note=print)
        else:
            self.learner = build(self.config, self.plan, comm, scratch=scratch, note=print)
        self.comm, self.corpus, self.done, self.slow = comm, corpus, 0, slow
        self.loader = build_loader(self.config, self.plan, corpus, self.learner.ranks, position=0)

    def train(self, steps):
        """Loss and gradient norm of each further step."""
        found, balancer = [], None
        if self.config.data_parallel.balance:
            balancer = Balancer(self.learner.ranks, self.loader, print)
            balancer.add = lambda seconds, add=balancer.add: add(seconds + self.slow)
        for _ in range(steps):
            rate = self.plan.learning_rate * self.learner.schedule.factor(self.done)
            loss = forward_backward(self.learner, self.loader.next_step(), balancer)
            norm = clip(self.learner)
            update(self.learner, rate)
            if balancer is not None:
                balancer.after_step()
            self.done += 1
            total = self.comm.sum(loss.double())
            found.append([float(total), float(norm)])
        return found

    def weights(self):
        """All of the weights that this rank holds a part of, by name."""
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in self.learner.model.named_parameters()
        }

    def close(self):
        self.loader.close()


def main(task):
    torch.set_num_threads(1)
    comm = join_ranks("cpu", timeout_seconds=60)
    corpus, out = Corpus.open(Path(task["corpus"])), Path(task["out"])
    results = {}
    for name, words in task["layouts"].items():
        slow = float(comm.rank == comm.world - 1)  # as the balancer sees it: one second slower
        trial = Trial(words, comm, corpus, out, slow, name.endswith("host memory"))
        half = task["steps"] // 2
        curve = trial.train(half)
        store = CheckpointStore(out / name, comm, keep=1, warn=print)
        facts = CheckpointFacts(half, trial.loader.state(), {}, "", "")
        store.save(trial.learner.model, trial.learner.optimizer, facts)
        end = document_end(trial.config, corpus)
        held_out = evaluate(trial.learner, corpus, half, 1000, document_end=end)
        curve += trial.train(task["steps"] - half)
        torch.save(trial.weights(), out / f"{name}-{comm.rank}.pt")
        state = sum(
            t.untyped_storage().nbytes()
            for values in trial.learner.optimizer.state.values()
            for t in (v.to_local() if isinstance(v, DTensor) else v for v in values.values())
        )
        results[name] = {
            "curve": curve,
            "held_out": [held_out.loss, held_out.tokens],
            "layout": trial.plan.layout.to_dict(),
            "optimizer_bytes": state,
            "shares": trial.loader.shares,
        }
        trial.close()
    for source, target in task.get("reshard", ()):
        words, host_memory = task["targets"][target], target.endswith("host memory")
        trial = Trial(words, comm, corpus, out, host_memory=host_memory)
        path = Path(task.get("checkpoints", {}).get(source, out / source))
        store = CheckpointStore(path, comm, keep=1, warn=print)
        facts = store.load(store.newest(), trial.learner.model, trial.learner.optimizer)
        trial.loader.close()
        trial.loader = build_loader(
            trial.config, trial.plan, corpus, trial.learner.ranks, position=facts.data["position"]
        )
        trial.done = facts.step
        results[f"{source} -> {target}"] = {"curve": trial.train(3)}
        trial.close()
    (out / f"results-{comm.rank}.json").write_text(json.dumps(results))
    comm.close()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    leave(0)
