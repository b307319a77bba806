"""What every number format promises."""

import pytest
import torch

from danlu.base.facts import DeviceFacts
from danlu.kernels.ops.linear import Linear
from danlu.precision.formats._base import FORMATS


@pytest.mark.parametrize("name", FORMATS.names())
class TestFormat:
    def test_a_product_stays_within_the_stated_tolerance_and_gradient_flows(self, name):
        kind = FORMATS.find(name)
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(64, 96, generator=draw)
        weight = torch.randn(48, 96, generator=draw, requires_grad=True)
        out = Linear().reference(x.to(kind.dtype), weight)
        exact = x.double() @ weight.detach().double().t()
        assert (out.double() - exact).norm() / exact.norm() < kind.tolerance
        out.float().square().sum().backward()
        wanted = 2 * exact.t() @ x.double()
        assert weight.grad.dtype == torch.float32
        assert (weight.grad.double() - wanted).norm() / wanted.norm() < 2 * kind.tolerance

    def test_support_is_declared_by_the_device_s_rates(self, name):
        kind = FORMATS.find(name)()
        device = DeviceFacts("cpu", "x", 1, {"fp32": 1.0, name: 1.0}, 1.0)
        assert kind.supported(device)
        if name != "fp32":
            assert not kind.supported(DeviceFacts("cpu", "x", 1, {"fp32": 1.0}, 1.0))
