import pytest
import torch
import torch.distributed as dist
from torch import nn

from danlu.parallel.gradients import CopyAverage


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """Sizes of what is sent, in order, in a group of one rank that adds 1 to every number."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    sizes = []

    class Work:
        def wait(self):
            pass

    def all_reduce(flat, group, *, async_op):
        sizes.append(flat.numel())
        flat += 1
        return Work()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    yield sizes
    dist.destroy_process_group()


def backward(model, times=1):
    for _ in range(times):
        model(torch.ones(1, 2)).sum().backward()


def test_pieces_travel_while_the_last_backward_runs(sent):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    average = CopyAverage([model], dist.group.WORLD, bucket=1)
    seen = []

    def look(_module, _inputs, output):
        output.register_hook(lambda _: seen.append(len(sent)))

    model[0].register_forward_hook(look)
    average.begin(2)
    backward(model)
    assert sent == []
    backward(model)
    assert sent == [5, 20, 4, 12, 3, 6]  # from the last weights to the first
    assert seen[-1] >= 4  # what the last two layers have was on its way by then
    before = [w.grad.clone() for w in model.parameters()]
    average.finish()
    for weight, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(weight.grad, gradient + 1)
    average.begin(1)
    sent.clear()
    backward(model)
    assert len(sent) == 6


def test_what_backward_did_not_tell_is_sent_at_the_end(sent):
    model = nn.Linear(2, 3)
    average = CopyAverage([model], dist.group.WORLD, bucket=2**20)
    average.begin(1)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    average.finish()
    assert sent == [9]
    assert all((w.grad == 1).all() for w in model.parameters())


def test_a_weight_of_two_parts_waits_for_both(sent):
    first = nn.Linear(2, 2, bias=False)
    second = nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    average = CopyAverage([first, second], dist.group.WORLD, bucket=1)
    average.begin(1)
    backward(second)
    assert sent == []
    backward(first)
    assert sent == [4]
    average.finish()
