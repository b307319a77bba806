"""Does a GPU train like the CPU, and how fast? Under five minutes; says so where there is no GPU.

Trains the default model on the GPU in bf16 with torch.compile, in fp32, and in fp32 with the
optimizer's moments in CPU memory, and on the CPU in fp32, all from the same seed on the same
samples, through `danlu train` itself; compares the losses and prints tokens/s, MFU and memory.
The device is one word of the plan; there is no other code path.
"""

import json
import sys
import tempfile
from pathlib import Path

import danlu
from danlu.base.units import format_bytes, format_count, format_rate

COMPARED_STEPS = 20
TIMED_SECONDS = 45
BF16_TOLERANCE, FP32_TOLERANCE = 0.02, 0.002
"""Relative difference of a step's loss that rounding explains over the compared steps (fp32 on the
GPU computes products in TF32)."""
OFFLOAD_TOLERANCE = 1e-4
"""The same of moments in CPU memory against moments on the GPU: the update's arithmetic is equal,
but attention's backward may add up in another order from run to run."""


def losses(folder: Path) -> list[float]:
    """The run's losses, in order."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


def train(folder: Path, *words: str) -> "danlu.Run":
    """One run of the default model; its folder is `folder`."""
    common = ("train.batch_tokens=2048", "train.evaluate_every=100000", "monitor.log_every=1")
    config = danlu.load(None, *common, f"folder={folder}", *words)
    run = danlu.build(config)
    run.train()
    return run


def worst(a: list[float], b: list[float]) -> float:
    """Largest relative difference."""
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def main() -> int:
    """Runs the check; 0 when it passes or there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        print("gpu-check: PyTorch finds no CUDA or ROCm GPU here; nothing was checked.")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        root, steps = Path(scratch), f"train.steps={COMPARED_STEPS}"
        train(root / "cpu", "train.device=cpu", "precision.format=fp32", steps)
        train(root / "fp32", "train.device=cuda", "precision.format=fp32", steps)
        train(
            root / "offload",
            "train.device=cuda",
            "precision.format=fp32",
            "zero_optimization.offload_ratio=1",
            steps,
        )
        train(
            root / "bf16",
            "train.device=cuda",
            "precision.format=bf16",
            "kernels.compile=true",
            steps,
        )
        reference = losses(root / "cpu")
        fp32 = worst(reference, losses(root / "fp32"))
        bf16 = worst(reference, losses(root / "bf16"))
        offload = worst(losses(root / "fp32"), losses(root / "offload"))
        fast = train(
            root / "fast", "train.device=cuda", "precision.format=bf16", "kernels.compile=true",
            f"train.duration={TIMED_SECONDS}s", "train.batch_tokens=262144", "monitor.log_every=10",
        )  # fmt: skip
        found = fast.report()
        device = fast.plan.cluster.device
        print(f"\ngpu-check on {device.name}, torch {torch.__version__}")
        print(f"  bf16 peak          {format_rate(device.peak_flops['bf16'])} (measured)")
        print(f"  fp32 against CPU   {fp32:.2e} relative, allowed {FP32_TOLERANCE}")
        print(f"  bf16 against CPU   {bf16:.2e} relative, allowed {BF16_TOLERANCE}")
        print(f"  offload or not     {offload:.2e} relative, allowed {OFFLOAD_TOLERANCE}")
        print(f"  CPU memory to GPU  {device.host_bandwidth / 1e9:.3g} GB/s (measured)")
        print(f"  speed              {format_count(found.tokens_per_second)} tokens/s")
        print(f"  MFU                {found.mfu:.1%}")
        print(f"  memory             {format_bytes(found.memory_bytes)}")
        passed = fp32 <= FP32_TOLERANCE and bf16 <= BF16_TOLERANCE
        passed = passed and offload <= OFFLOAD_TOLERANCE
        print("passed" if passed else "FAILED: the losses differ by more than rounding explains")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
