"""Compilers that are missing, broken or take arguments; folders that cannot be written."""

import shlex
import shutil

import pytest

from danlu.kernels import native
from danlu.kernels.native import BuildError, build, compiler


@pytest.fixture(autouse=True)
def _asked_anew():
    compiler.cache_clear()
    yield
    compiler.cache_clear()


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A kernel that does nothing, and a home to build it in."""
    if not shutil.which("g++"):
        pytest.skip("there is no g++")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("DANLU_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(native, "_OPS", tmp_path)
    (tmp_path / "simd.h").write_text("")
    (tmp_path / "one.cpp").write_text('extern "C" int answer() { return ANSWER; }')
    return "one.cpp"


def test_a_compiler_may_come_with_arguments_and_they_count(source, monkeypatch):
    for answer in (7, 8):
        compiler.cache_clear()
        monkeypatch.setenv("CXX", f"g++ -DANSWER={answer} '-DTEXT=\"a b\"'")
        assert shlex.split(compiler()[0])[1:] == [f"-DANSWER={answer}", '-DTEXT="a b"']
        assert build(source, "test").answer() == answer


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no-such-compiler -O2", r"CXX is .* and there is no 'no-such-compiler' that can be run"),
        ("g++ 'unclosed", r"which is no command"),
        ("false", r"false --version ends with code 1"),
    ],
)
def test_a_compiler_that_cannot_be_used_is_said_and_not_passed_over(monkeypatch, value, message):
    monkeypatch.setenv("CXX", value)
    with pytest.raises(BuildError, match=message):
        compiler()


def test_a_compiler_that_is_no_program_is_said(monkeypatch, tmp_path):
    (tmp_path / "g++").write_text("not a program")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"g\+\+ cannot be run \(Exec format error\)"):
        compiler()


def test_a_home_that_is_no_folder_means_no_kernel(source, tmp_path, monkeypatch):
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("CXX", "g++ -DANSWER=1")
    with pytest.raises(BuildError, match="cannot hold what is built"):
        build(source, "test")


def test_a_library_that_cannot_be_loaded_means_no_kernel(source, monkeypatch):
    monkeypatch.setenv("CXX", "g++ -DANSWER=1")
    monkeypatch.setattr(native, "_compile", lambda command, source, library: library.write_text(""))
    with pytest.raises(BuildError, match="cannot be loaded"):
        build(source, "test")
