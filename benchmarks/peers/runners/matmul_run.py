"""What this machine's matrix product reaches now: the denominator of MFU.

Not a peer. One of its "steps" times square products of two sizes in bf16 and fp32 and reports
TFLOP/s: the best and the median of a few. The parent asks before and after every turn, so that a
throughput is divided by what the machine could do in the same seconds.
"""

from __future__ import annotations

from benchmarks.peers.protocol import Gate, Peer, serve

PEER = Peer(
    name="matmul",
    environment="torch",
    package="torch",
    settings={"peak": "square products, 1024 and 2048, bf16 and fp32, same threads"},
)
SIZES = (1024, 2048)
REPEATS = {"bf16": 5, "fp32": 3}


def run(gate: Gate) -> None:
    import statistics
    import time

    import torch

    from benchmarks.peers.runners.stream import prepare

    prepare(gate.work)
    types = {"bf16": torch.bfloat16, "fp32": torch.float32}
    operands = {
        (name, size): [torch.randn(size, size).to(dtype) for _ in range(3)]
        for name, dtype in types.items()
        for size in SIZES
    }
    gate.ready()
    while True:
        figures = {}
        for (name, size), (left, right, out) in operands.items():
            torch.mm(left, right, out=out)  # wakes the threads and fills the caches
            rates = []
            for _ in range(REPEATS[name]):
                start = time.perf_counter()
                torch.mm(left, right, out=out)
                rates.append(2 * size**3 / (time.perf_counter() - start) / 1e12)
            figures[f"{name}_{size}_best"] = max(rates)
            figures[f"{name}_{size}_median"] = statistics.median(rates)
        gate.tick(**figures)


if __name__ == "__main__":
    serve(PEER, run)
