"""What is known of this machine, also where nothing can be written down."""

from danlu.base.facts import DeviceFacts
from danlu.hardware.cluster import device_file, local_cluster, recall, remember

DEVICE = DeviceFacts("cpu", "x", 1, {"fp32": 1e9}, 1e9, 2, ("avx2",))


def test_what_was_measured_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("DANLU_HOME", str(tmp_path))
    assert remember(DEVICE, 3) is None
    assert recall() == (DEVICE, 3)
    device_file().write_text("[]")
    assert recall() is None


def test_a_home_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("DANLU_HOME", str(tmp_path / "home"))
    assert recall() is None
    assert remember(DEVICE, 3)
    assert recall() == (DEVICE, 3)
    assert local_cluster().device == DEVICE
    (tmp_path / "home").unlink()
    assert remember(DEVICE, 4) is None
    assert recall() == (DEVICE, 4)
