"""litgpt's pretraining: its model and its fit loop, fed with the common stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Gate, Peer, serve

PEER = Peer(
    name="litgpt",
    environment="lightning",
    package="litgpt",
    settings={
        "default": "litgpt pretrain as it comes: bf16-mixed, torch.compile, AdamW (not fused)",
    },
    notes="has one setting: it always compiles, and passes fused=False to AdamW on a CPU",
)


def run(gate: Gate) -> None:
    import litgpt.pretrain
    from litgpt.args import EvalArgs, TrainArgs

    from benchmarks.peers.runners.stream import prepare

    work = gate.work
    prepare(work)
    hook_into(litgpt.pretrain, gate)
    litgpt.pretrain.setup(
        "none",
        model_config(gate),
        Path("out"),
        data=common_stream(gate),
        devices=1,
        logger_name="csv",
        train=TrainArgs(
            save_interval=None,
            global_batch_size=work.batch,
            micro_batch_size=work.batch,
            max_tokens=1_000_000 * work.tokens_per_step,
            max_norm=work.clip_norm,
            lr_warmup_steps=0,
            max_seq_length=work.sequence,
        ),
        eval=EvalArgs(
            interval=10**9, max_iters=1, initial_validation=False, final_validation=False
        ),
        optimizer={
            "class_path": "torch.optim.AdamW",
            "init_args": {
                "lr": work.learning_rate,
                "weight_decay": work.weight_decay,
                "betas": [work.beta1, work.beta2],
            },
        },
    )


def model_config(gate: Gate) -> Any:
    from litgpt.config import Config

    work = gate.work
    return Config(
        name="common",
        block_size=work.sequence,
        vocab_size=work.vocab,
        padded_vocab_size=work.vocab,
        n_layer=work.layers,
        n_head=work.heads,
        n_embd=work.dim,
        intermediate_size=work.ffn,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-6,
        mlp_class_name="LLaMAMLP",
    )


def common_stream(gate: Gate) -> Any:
    """A litgpt data module over the common stream; its check on validation data stays untimed."""
    import torch
    from litgpt.data import DataModule
    from torch.utils.data import DataLoader, IterableDataset

    from benchmarks.peers.runners.stream import batches, rows

    work = gate.work

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[torch.Tensor]:
            gate.ready(parameters=work.parameters)
            yield from rows(work)

    class Common(DataModule):
        def connect(self, *_: Any, batch_size: int = 1, **__: Any) -> None:
            self.batch_size = batch_size

        def prepare_data(self) -> None:
            pass

        def setup(self, stage: str = "") -> None:
            pass

        def train_dataloader(self) -> DataLoader[torch.Tensor]:
            return DataLoader(Stream(), batch_size=self.batch_size)

        def val_dataloader(self) -> DataLoader[torch.Tensor]:
            held_out = list(next(batches(work)))
            return DataLoader(held_out, batch_size=self.batch_size)  # type: ignore[arg-type]

    return Common()


def hook_into(pretrain: Any, gate: Gate) -> None:
    """End a step after the optimizer's, and read the loss where litgpt computes it.

    Its fit loop has no callbacks. The parameter count is checked here, where the model is seen.
    """
    build_optimizer = pretrain.instantiate_torch_optimizer
    cross_entropy = pretrain.chunked_cross_entropy
    losses: list[Any] = []

    def build_hooked_optimizer(optimizer: Any, parameters: Any, **named: Any) -> Any:
        weights = list(parameters)
        found = sum(weight.numel() for weight in weights)
        if found != gate.work.parameters:
            raise RuntimeError(f"litgpt built {found:,} parameters, not {gate.work.parameters:,}")
        built = build_optimizer(optimizer, weights, **named)
        step = built.step

        def step_and_tick(*given: Any, **kwargs: Any) -> Any:
            result = step(*given, **kwargs)
            gate.tick(losses[-1])
            losses.clear()
            return result

        built.step = step_and_tick
        return built

    def noted_cross_entropy(*given: Any, **named: Any) -> Any:
        loss = cross_entropy(*given, **named)
        losses.append(loss.detach())
        return loss

    pretrain.instantiate_torch_optimizer = build_hooked_optimizer
    pretrain.chunked_cross_entropy = noted_cross_entropy


if __name__ == "__main__":
    serve(PEER, run)
