"""Selective recompute: the same gradients from fewer bytes, on every kind of operation."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from danlu.base.facts import ModelShape
from danlu.hardware.cluster import cpu_on_paper
from danlu.hardware.seed import generator
from danlu.kernels.dispatch import choose_ops, torch_ops
from danlu.kernels.recompute import selective_ops
from danlu.models.describe import describe
from danlu.models.transformer import Positions, Transformer

SHAPE = ModelShape(64, 64, 1, 4, 2, 16, 160, 32, False, 10000.0, 1e-5)
TOKENS = 128


def native_ops():
    ops = choose_ops(cpu_on_paper(), lambda text: None)
    if ops.variants["swiglu"] != "native":
        pytest.skip("there are no native kernels on this machine")
    return ops


class Layer:
    """A layer with its inputs."""

    def __init__(self, ops, dtype, **compiled):
        model = Transformer(SHAPE, ops, dtype)
        model.initialize(lambda name, w, s: w.normal_(0, s * 5, generator=generator(0, name)))
        self.block = model.layers["0"]
        if compiled:
            self.block.compile(dynamic=False, **compiled)
        draw = generator(1)
        self.inputs = [
            torch.randn(TOKENS, SHAPE.hidden_size, generator=draw).to(dtype).requires_grad_()
            for _ in range(2)
        ]
        self.positions = Positions(TOKENS // 32, model.cosine, model.sine)

    def loss(self):
        x_nd, branch_nd = self.block(*self.inputs, self.positions)
        return (x_nd.float() * branch_nd.float()).sum()

    def gradients(self):
        self.loss().backward()
        return [tensor.grad for tensor in (*self.inputs, *self.block.parameters())]

    def kept_bytes(self):
        """What forward leaves allocated for backward; backward gives all of it back."""
        gc.collect()
        gc.disable()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
            loss = self.loss()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
            loss.backward()
            del loss
        gc.enable()
        kept, freed = (
            sum(e.self_cpu_memory_usage for e in p.events()) for p in (forward, backward)
        )
        assert kept == -freed
        return kept


@pytest.mark.parametrize(
    ("make", "dtype"), [(torch_ops, torch.float32), (native_ops, torch.bfloat16)]
)
def test_cheap_outputs_are_not_kept_and_no_bit_changes(make, dtype):
    ops = make()
    kept, again = (Layer(o, dtype) for o in (ops, selective_ops(ops, compiled=False)))
    for a, b in zip(kept.gradients(), again.gradients(), strict=True):
        assert torch.equal(a, b)
    cheap = describe(SHAPE)[1].cheap_elements * TOKENS * dtype.itemsize
    assert kept.kept_bytes() - again.kept_bytes() == cheap


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # PyTorch's own
def test_compiled_layers_drop_them_too():
    partition = {"backend": "aot_eager_decomp_partition"}
    kept = Layer(torch_ops(), torch.float32, **partition)
    again = Layer(selective_ops(torch_ops(), compiled=True), torch.float32, **partition)
    for a, b in zip(kept.gradients(), again.gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    swiglu = SHAPE.intermediate_size * TOKENS * 4
    assert kept.kept_bytes() - again.kept_bytes() >= swiglu
