"""ZeRO (arXiv 1910.02054) on FSDP2.

Stage 1 shards the optimizer's state over the copies of the model: each holds a shard of the fp32
weights, gathers the others' once a step, keeps its gradients whole until the last micro-batch, and
updates its shard. Stage 2 reduces gradients to shards after every micro-batch. Stage 3 also lets
the gathered weights of a layer go as soon as they are used. Inside a pipeline, PyTorch keeps a
stage's weights gathered between its micro-batches and reduces gradients once a step.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from danlu.kernels.dispatch import Ops
from danlu.parallel.mesh import Ranks

__all__ = ["before_micro_batch", "gathered", "gathered_ops", "shard_state", "tie"]


def shard_state(
    roots: Iterable[nn.Module], blocks: Iterable[nn.Module], ranks: Ranks, dtype: torch.dtype
) -> None:
    """Shards modules over the copies, in place.

    Args:
        roots: whole models or pipeline stages: what is called.
        blocks: their layers, each gathered by itself.
        ranks: the mesh; its layout says which stage.
        dtype: format in which weights are gathered; gradients are reduced in fp32.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    layout = ranks.layout
    # Schedules that split backward, or hold several stages, gather and release whole stages.
    reshard = layout.zero == 3 and layout.chunks == 1
    mesh = ranks.axis("data")
    # Nothing here changes an output in place, which is what the warning is about.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in (*blocks, *roots):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        _portable(module)


def tie(first: nn.Module, last: nn.Module, roots: Iterable[nn.Module]) -> None:
    """Makes the weights of two modules one again, after each root has sharded its own.

    Where both modules are sharded, both gather the one shard, and their gradients add up in it.

    Args:
        first: a module with a `weight`; it may be in another root than `last`, or in none.
        last: the other one.
        roots: as for `shard_state`, on their device.
    """
    first.weight = last.weight
    states = [fully_shard.state(root) for root in roots]  # type: ignore[attr-defined]
    groups = [group for state in states for group in state._fsdp_param_groups]
    shards = {p._module_info.module: p for group in groups for p in group.fsdp_params}
    if first in shards and last in shards:  # the padded shard, which is what is gathered
        shards[first]._sharded_param_data = shards[last]._sharded_param_data


def gathered_ops(ops: Ops) -> Ops:
    """The operations for weights that arrive in the computing format: norms want theirs in fp32."""

    def add_norm(
        x_nd: Tensor, branch_nd: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        return ops.add_norm(x_nd, branch_nd, weight.float(), epsilon)

    return replace(ops, add_norm=add_norm)


def _portable(module: nn.Module) -> None:
    assert isinstance(module, FSDPModule)
    if torch.distributed.get_backend() == "gloo":
        module.set_force_sum_reduction_for_comms(True)


def before_micro_batch(model: nn.Module, zero: int, *, last: bool) -> None:
    """Says what the next forward and backward gather and reduce.

    Below stage 3, weights stay gathered from the first to the last micro-batch of a step; in stage
    1, gradients are reduced in the last one only.
    """
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(last or zero == 3)
    model.set_requires_gradient_sync(last or zero >= 2)


@contextlib.contextmanager
def gathered(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Forward passes without backward; afterwards the weights are sharded again."""
    sharded = [m for root in modules for m in root.modules() if isinstance(m, FSDPModule)]
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
