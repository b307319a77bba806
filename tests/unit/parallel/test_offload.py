"""Moments off the device: the same update, the same checkpoints."""

import copy

import pytest
import torch
from torch import nn

from danlu.base.errors import ConfigError
from danlu.config.optim import OptimizerConfig
from danlu.hardware.seed import generator
from danlu.optim.optimizers.adamw import build_adamw
from danlu.parallel.offload import FileOffload, HostOffload

RATE = 0.01


def make():
    """Weights of odd sizes, one of which never has a gradient."""
    model = nn.ParameterDict(
        {
            name: nn.Parameter(torch.randn(shape, generator=generator(0, name)))
            for name, shape in {
                "wide": (37, 64), "narrow": (5, 64), "scale": (64,), "unused": (9, 9)
            }.items()
        }
    )  # fmt: skip
    return model, build_adamw(model.named_parameters(), OptimizerConfig(), RATE)


def in_host_memory(optimizer, share, _folder):
    return HostOffload(optimizer, share, torch.device("cpu"), room=2**30, piece_bytes=1024)


def in_a_file(optimizer, share, folder):
    return FileOffload(optimizer, share, folder / "moments")


def train(model, optimizer, step, first, last):
    for number in range(first, last):
        for name, weight in model.items():
            if name != "unused":
                weight.grad = torch.randn(weight.shape, generator=generator(number, name))
        for group in optimizer.param_groups:
            group["lr"] = RATE / (1 + number)
        step()
        optimizer.zero_grad(set_to_none=True)


def moments(optimizer):
    return [state[n] for state in optimizer.state.values() for n in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("place", [in_host_memory, in_a_file])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_an_update_is_the_same_bits_wherever_its_moments_are(place, share, tmp_path):
    (here, usual), (there, optimizer) = make(), make()
    offload = place(optimizer, share, tmp_path)
    total = 8 * sum(p.numel() for p in there.values())
    assert offload.bytes == (total if share == 1 else 8 * 37 * 64)
    train(here, usual, usual.step, 0, 5)
    for number in range(5):
        offload.fetch()
        train(there, optimizer, offload.step, number, number + 1)
    for name, weight in here.items():
        assert torch.equal(there[name], weight), name
        for key, value in usual.state[weight].items():
            assert torch.equal(optimizer.state[there[name]][key], value), (name, key)


def test_a_state_is_read_from_host_memory_and_filled_in_there(tmp_path):
    (before, first), (after, second) = make(), make()
    offload = in_host_memory(first, 1.0, tmp_path)
    train(before, first, offload.step, 0, 3)
    after.load_state_dict(before.state_dict())
    again = in_host_memory(second, 1.0, tmp_path)
    again.fetch()  # what was fetched before is not used after
    places = [moment.data_ptr() for moment in moments(second)]
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert [moment.data_ptr() for moment in moments(second)] == places
    train(before, first, offload.step, 3, 5)
    train(after, second, again.step, 3, 5)
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name


def test_a_share_that_the_host_has_no_room_for_is_refused():
    _, optimizer = make()
    with pytest.raises(ConfigError, match=r"zero_optimization\.offload_ratio.*for each"):
        HostOffload(optimizer, 1.0, torch.device("cpu"), room=1000)
