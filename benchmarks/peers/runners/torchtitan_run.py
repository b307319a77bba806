"""torchtitan's own trainer and Llama on a CPU, behind a shim: as published it needs a GPU.

What stops torchtitan 0.3.0 here, and what ``shim_device``/``shim_calls`` put in its place:

* it takes ``torch.cuda`` as its device module and selects a device at start → a module with the
  calls it makes, on ``torch.cpu``;
* its language models accept only FlexAttention or varlen attention, and PyTorch has no backward
  for FlexAttention on CPUs → its own SDPA module, which it ships but refuses by name;
* it calls ``torch.distributed.set_timeout``, which torch 2.13 does not have → nothing;
* it imports triton always → the environment installs it, unused.

The loop, loss, optimizer container and per-block compilation are torchtitan's own, untouched.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Iterator
from typing import Any

from benchmarks.peers.protocol import Gate, Peer, serve

PEER = Peer(
    name="torchtitan",
    environment="torchtitan",
    package="torchtitan",
    settings={
        "default": "debug config as it comes: bf16 mixed, selective recompute, chunked loss, eager",
        "best": "bf16 mixed, compile.enable, no recompute, chunked loss",
    },
    notes="runs only behind a shim (see its runner); its own weight initialisation",
)


def run(gate: Gate) -> None:
    from benchmarks.peers.runners.stream import prepare, single_rank

    single_rank()
    shim_device()
    trainer = build_trainer(gate)
    parameters = sum(weight.numel() for part in trainer.model_parts for weight in part.parameters())
    prepare(gate.work)
    hook_into(trainer, gate)
    gate.ready(parameters=parameters)
    trainer.train()


def shim_device() -> None:
    """Stand in for an accelerator before torchtitan is imported, and for its late look-ups."""
    import torch
    import torch._utils

    class Device(types.SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch.cpu, name)

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = Device(
        set_device=lambda _: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda _=None: "cpu",
        get_device_properties=lambda _=None: types.SimpleNamespace(total_memory=memory_bytes),
        memory_stats=lambda _=None: {},
        reset_peak_memory_stats=lambda *_: None,
        empty_cache=lambda: None,
        synchronize=lambda *_: None,
    )
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    torch._utils._get_device_module = lambda _: device  # type: ignore[assignment]

    import torchtitan.distributed.utils as distributed
    import torchtitan.tools.utils as tools

    for module in (tools, distributed):
        module.device_type, module.device_module = "cpu", device
        module.get_local_device = lambda: torch.device("cpu")
    distributed.set_pg_timeouts = lambda *_, **__: None


def build_trainer(gate: Gate) -> Any:
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    work = gate.work
    config = llama3_debugmodel()
    config.model_spec = dataclasses.replace(config.model_spec, model=model_config(gate))
    config.loss.loss_fn.global_vocab_size = work.vocab
    config.training = dataclasses.replace(
        config.training,
        local_batch_size=work.batch,
        seq_len=work.sequence,
        steps=1_000_000,
        max_norm=work.clip_norm,
        disable_cuda_graphs=True,
    )
    config.optimizer = default_adamw(
        lr=work.learning_rate,
        betas=(work.beta1, work.beta2),
        weight_decay=work.weight_decay,
    )
    config.lr_scheduler.warmup_steps = 0
    config.checkpoint.enable = False
    config.validator.enable = False
    config.dump_folder = "out"
    if gate.setting == "best":
        config.compile = CompileConfig(enable=True)
        config.activation_checkpoint = None
        config.metrics.log_freq = 10

    HuggingFaceTextDataLoader.Config.build = lambda *_, **__: CommonData(gate)
    type(config.tokenizer).build = lambda *_, **__: types.SimpleNamespace()
    return config.build()


def model_config(gate: Gate) -> Any:
    import torchtitan.models.common.attention as attention
    import torchtitan.models.llama3 as llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.llama3.model import Llama3Model

    work = gate.work
    llama3.get_attention_config = lambda _: attention.ScaledDotProductAttention.Config()
    return Llama3Model.Config(
        dim=work.dim,
        vocab_size=work.vocab,
        tok_embeddings=Embedding.Config(
            num_embeddings=work.vocab,
            embedding_dim=work.dim,
            param_init=llama3._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(normalized_shape=work.dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=work.dim,
            out_features=work.vocab,
            param_init=llama3._output_linear_init(work.dim),
        ),
        layers=llama3._build_llama3_layers(
            fuse_qkv=True,
            n_layers=work.layers,
            dim=work.dim,
            n_heads=work.heads,
            hidden_dim=work.ffn,
            attn_backend="sdpa",
            rope=ComplexRoPE.Config(
                dim=work.dim // work.heads, max_seq_len=work.sequence, theta=10000
            ),
        ),
    )


class CommonData:
    """The common stream in the shape torchtitan's trainer takes from a data loader."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        from benchmarks.peers.runners.stream import batches, inputs_and_targets

        for block in batches(self.gate.work):
            inputs, targets = inputs_and_targets(block)
            yield {"input": inputs}, targets

    def state_dict(self) -> dict[str, Any]:
        """Nothing to resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to resume."""

    def close(self) -> None:
        """Nothing to close."""


def hook_into(trainer: Any, gate: Gate) -> None:
    """End a step where torchtitan's ``train_step`` ends; read the loss from forward-backward."""
    forward_backward, train_step = trainer.fwd_bwd_fn, trainer.train_step
    losses: list[Any] = []

    def noting_the_loss(*given: Any, **named: Any) -> Any:
        loss = forward_backward(*given, **named)
        losses.append(loss.detach())
        return loss

    def step_and_tick(*given: Any, **named: Any) -> None:
        train_step(*given, **named)
        gate.tick(losses.pop())

    trainer.fwd_bwd_fn, trainer.train_step = noting_the_loss, step_and_tick


if __name__ == "__main__":
    serve(PEER, run)
