"""Hugging Face Trainer with its own Llama: its loop, its data loader, its hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.protocol import Gate, Peer, serve

PEER = Peer(
    name="hf_trainer",
    environment="hf",
    package="transformers",
    settings={
        "default": "TrainingArguments() as they come: fp32, eager, SDPA, adamw_torch_fused",
        "best": "bf16=True, torch_compile=True, SDPA, adamw_torch_fused",
    },
    notes="shifts the labels itself, so it scores one token a sequence less",
)


def run(gate: Gate) -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from benchmarks.peers.runners.stream import prepare, rows

    work = gate.work
    prepare(work)
    model = build_model(gate)
    parameters = sum(weight.numel() for weight in model.parameters())

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            gate.ready(parameters=parameters)
            for row in rows(work):
                yield {"input_ids": row[:-1], "labels": row[:-1]}

    losses: list[Any] = []

    class StepEnd(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate.tick(losses.pop())

    best = {"bf16": True, "torch_compile": True} if gate.setting == "best" else {}
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=work.batch,
        max_steps=1_000_000,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=work.weight_decay,
        adam_beta1=work.beta1,
        adam_beta2=work.beta2,
        max_grad_norm=work.clip_norm,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **best,
    )
    torch.set_num_threads(work.threads)
    trainer = Trainer(model=model, args=arguments, train_dataset=Stream(), callbacks=[StepEnd()])
    training_step = trainer.training_step

    def noting_the_loss(*given: Any, **named: Any) -> Any:
        losses.append(training_step(*given, **named))
        return losses[-1]

    trainer.training_step = noting_the_loss
    trainer.train()


def build_model(gate: Gate) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    work = gate.work
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=work.vocab,
            hidden_size=work.dim,
            num_hidden_layers=work.layers,
            num_attention_heads=work.heads,
            num_key_value_heads=work.heads,
            intermediate_size=work.ffn,
            max_position_embeddings=work.sequence,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


if __name__ == "__main__":
    serve(PEER, run)
