import math
import signal
import time

import pytest
import torch

from danlu.hardware.comm import Comm, launched_world
from danlu.hardware.device import Device
from danlu.hardware.seed import derive_seed, generator
from danlu.monitor.meter import Meter
from danlu.train.control import StopRequest


def test_random_numbers_depend_on_seed_and_purpose_alone():
    first = torch.rand(3, generator=generator(1, "weights", "a"))
    torch.rand(100)
    assert torch.equal(first, torch.rand(3, generator=generator(1, "weights", "a")))
    assert not torch.equal(first, torch.rand(3, generator=generator(1, "weights", "b")))
    assert derive_seed(1, "ab") != derive_seed(1, "a", "b")
    assert 0 <= derive_seed(2**62, "x") < 2**63


def test_a_run_of_one_process_talks_to_itself():
    comm = Comm()
    values = torch.tensor([1.0, 2.0])
    assert comm.sum(values) is values
    assert comm.share({"a": 1}) == {"a": 1}
    comm.wait()
    comm.close()
    assert (comm.first, comm.world) == (True, 1)


def test_only_a_launcher_s_variables_make_a_world(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert launched_world() is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched_world() is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert launched_world() == 4


def test_the_meter_reports_what_was_measured_and_leaves_pauses_out():
    meter = Meter(Comm(), Device("cpu"), flops_per_token=1e6, peak_flops=1e9)
    for _ in range(2):
        meter.add(torch.tensor(2.5), tokens=100, data_seconds=0.01)
    with meter.paused():
        time.sleep(0.2)
    report, stopping = meter.collect(7, torch.tensor(3.0), 0.1, stop=True)
    assert (report.step, report.tokens, report.loss, report.gradient_norm) == (7, 200, 2.5, 3.0)
    assert report.seconds < 0.1
    assert report.tokens_per_second == pytest.approx(200 / (2 * report.seconds))
    assert report.mfu == pytest.approx(report.tokens_per_second * 1e6 / 1e9)
    assert report.memory_bytes > 10**6
    assert stopping
    meter.add(torch.tensor(math.nan), tokens=1, data_seconds=0)
    assert not meter.finite(meter.collect(8, torch.tensor(1.0), 0.1, stop=False)[0])


def test_the_first_ctrl_c_asks_and_the_second_one_insists():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.wanted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
