import errno
import json
import pickle

import pytest

from danlu.base.errors import ConfigError, DataError, UserError, closest
from danlu.base.events import JsonLines, read_lines
from danlu.base.facts import DeviceFacts
from danlu.base.files import atomic_write, checksum, explain_disk_full, write_json
from danlu.base.registry import Registry
from danlu.optim.schedules._base import SCHEDULES, Schedule


def test_an_error_is_one_line_of_place_problem_and_fix():
    error = ConfigError("train.steps", "'abc' is not a number.", "Write 100.")
    assert str(error) == "train.steps: 'abc' is not a number. Write 100."
    assert error.exit_code == 2
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_error_that_came_from_another_process_is_known_there():
    error = DataError("a.txt", "it is broken.")
    assert not error.common
    assert pickle.loads(pickle.dumps(error)).common
    assert ConfigError("train.steps", "no.").common


def test_the_nearest_name_is_suggested():
    assert closest("stps", ["steps", "seed"]) == "Did you mean steps?"
    assert closest("xyz", ["b", "a"]) == "Use one of: a, b."


def test_a_file_is_whole_or_absent(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write("half")
        raise RuntimeError
    assert not list(path.parent.iterdir())
    write_json(path, {"a": 1})
    before = checksum(path)
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write("half")
        raise RuntimeError
    assert checksum(path) == before
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_full_disk_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="the disk is full. Free some."):
        with explain_disk_full(tmp_path, "Free some."):
            raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), explain_disk_full(tmp_path, ""):
        raise PermissionError


def test_events_survive_a_line_that_a_crash_left_half_written(tmp_path):
    log = JsonLines(tmp_path / "events.jsonl")
    log.write(kind="start", step=1)
    log.close()
    with open(log.path, "a") as file:
        file.write('{"kind": "half')
    log.write(kind="resume", step=2)
    assert [e["kind"] for e in read_lines(log.path)] == ["start", "resume"]
    assert list(read_lines(tmp_path / "none.jsonl")) == []


def test_a_part_is_found_by_its_file_name():
    assert {"constant", "cosine", "wsd"} <= set(SCHEDULES.names())
    assert issubclass(SCHEDULES.find("cosine"), Schedule)
    with pytest.raises(ConfigError, match=r"schedule.type: there is no 'cosin'. Did you mean"):
        SCHEDULES.find("cosin")
    assert isinstance(SCHEDULES, Registry)


def test_device_facts_come_back_from_json():
    facts = DeviceFacts("cpu", "x", 1, {"fp32": 1e9}, 1e9, 2, ("avx2",))
    assert DeviceFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
