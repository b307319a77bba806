"""Joining the ranks that a launcher started."""

import pytest
import torch

from danlu.base.errors import ConfigError
from danlu.hardware.comm import join_ranks


@pytest.mark.parametrize("rank", ["0", "2"])
def test_more_ranks_than_gpus_are_refused_by_every_rank(monkeypatch, rank):
    for name, value in {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="3 ranks on a machine with 2 GPUs"):
        join_ranks("cuda", timeout_seconds=1)
