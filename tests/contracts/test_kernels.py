"""What every operation promises: its variants equal its reference, values and gradients."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from danlu.base.errors import ConfigError
from danlu.base.facts import DeviceFacts
from danlu.hardware.cluster import cpu_on_paper
from danlu.kernels import dispatch, native
from danlu.kernels.native import BuildError, build, compiler
from danlu.kernels.op import Case, verify
from danlu.kernels.ops.add_norm import AddNorm
from danlu.kernels.ops.attention import Attention
from danlu.kernels.ops.cross_entropy import CrossEntropy, chunked_cross_entropy, torch_rows
from danlu.kernels.ops.linear import Linear
from danlu.kernels.ops.swiglu import SwiGLU

OPS = {
    "add_norm": AddNorm(),
    "attention": Attention(),
    "swiglu": SwiGLU(),
    "cross_entropy": CrossEntropy(),
    "linear": Linear(),
}
DEVICE = cpu_on_paper()


def native_variant(name):
    op = OPS[name]
    missing = [f for f in op.features if f not in DEVICE.features]
    if missing:
        pytest.skip(f"this processor has no {missing[0]}: the native kernel cannot run here")
    try:
        compiler()
    except BuildError as error:
        pytest.skip(str(error))
    return op.native(build(op.source, "test"))


@pytest.mark.parametrize("name", OPS)
def test_the_native_variant_equals_the_reference(name):
    verdict = verify(OPS[name], native_variant(name))
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", OPS)
def test_the_reference_passes_its_own_verification(name):
    assert verify(OPS[name], OPS[name].reference).passed


@pytest.mark.parametrize("name", OPS)
def test_verification_notices_a_wrong_variant(name):
    op = OPS[name]

    def off_by_a_little(*arguments):
        out = op.reference(*arguments)
        return tuple(o * 1.05 for o in out) if isinstance(out, tuple) else out * 1.05

    assert not verify(op, off_by_a_little).passed


def test_the_chunked_loss_in_torch_equals_the_reference():
    assert verify(CrossEntropy(), chunked_cross_entropy(torch_rows)).passed


@pytest.mark.parametrize("length", [1, 15, 63, 64, 65, 128, 191])
@pytest.mark.parametrize("size", [16, 32, 80, 128])
def test_native_attention_is_right_at_every_length_and_head_size(length, size):
    op = OPS["attention"]
    native_attention = native_variant("attention")
    from danlu.kernels.ops.attention import _arguments

    shape = _arguments(2, length, 4, 2, size, documents=length % 2 == 1)

    class OneShape(Attention):
        def cases(self):
            return [Case("one", shape)]

    assert verify(OneShape(), native_attention).passed
    assert op.source


def test_a_head_size_that_does_not_fill_vectors_falls_back():
    native_attention = native_variant("attention")
    from danlu.kernels.ops.attention import _arguments

    arguments = _arguments(1, 20, 2, 2, 24, documents=False)(torch.Generator().manual_seed(0))
    out = native_attention(*arguments)
    assert torch.equal(out, Attention().reference(*arguments))


def test_native_results_are_the_same_bits_every_time():
    for name, op in OPS.items():
        function = native_variant(name)
        case = next(iter(op.cases()))
        results = []
        for _ in range(2):
            arguments = case.arguments(torch.Generator().manual_seed(1))
            out = function(*arguments)
            out = out if isinstance(out, tuple) else (out,)
            sum(o.float().sum() for o in out).backward()
            grads = [
                a.grad for a in arguments if isinstance(a, torch.Tensor) and a.grad is not None
            ]
            results.append([*out, *grads])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name


def test_without_a_compiler_the_fallback_is_told(monkeypatch):
    def none(*_):
        raise BuildError("there is no C++ compiler (g++ or clang++)")

    monkeypatch.setattr(dispatch, "build", none)
    notes = []
    ops = dispatch.choose_ops(
        DeviceFacts("cpu", "x", 1, {}, 1.0, 1, ("avx512_bf16",)), notes.append
    )
    assert len(notes) == 4
    assert all("no C++ compiler" in note for note in notes)
    assert all(variant.startswith("torch") for variant in ops.variants.values())
    assert ops.variants["linear"] == "torch"


def test_native_kernels_that_are_asked_for_do_not_fall_back(monkeypatch):
    def none(*_):
        raise BuildError("there is no C++ compiler (g++ or clang++)")

    monkeypatch.setattr(dispatch, "build", none)
    device = DeviceFacts("cpu", "x", 1, {}, 1.0, 1, ("avx512_bf16",))
    with pytest.raises(ConfigError, match=r"kernels.backend: native is .* no C\+\+ compiler"):
        dispatch.choose_ops(device, lambda text: None, required=True)
    with pytest.raises(ConfigError, match="there are no kernels for NVIDIA"):
        device = DeviceFacts("cuda", "NVIDIA", 1, {}, 1.0)
        dispatch.choose_ops(device, lambda text: None, required=True)


def test_a_processor_without_the_instructions_gets_the_fallback():
    notes = []
    dispatch.choose_ops(DeviceFacts("cpu", "x", 1, {}, 1.0, 1, ("avx2",)), notes.append)
    assert all("no avx512_bf16" in note for note in notes)


def test_a_kernel_that_does_not_compile_leaves_nothing_behind(tmp_path, monkeypatch):
    try:
        compiler()
    except BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("DANLU_HOME", str(tmp_path))
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "broken.cpp").write_text("int f( {")
    (tmp_path / "ops" / "simd.h").write_text("")
    monkeypatch.setattr(native, "_OPS", tmp_path / "ops")
    with pytest.raises(BuildError, match="broken.cpp does not compile"):
        build("broken.cpp", "test")
    assert [p.suffix for p in (tmp_path / "kernels").iterdir()] == [".lock"]


def test_a_wrong_kernel_is_not_used(monkeypatch):
    op = OPS["swiglu"]
    monkeypatch.setattr(dispatch, "_native", lambda op, device: lambda *a: op.reference(*a))
    monkeypatch.setattr(type(op), "native", None)
    notes = []

    def wrong(op, device):
        return (lambda x: op.reference(x) + 1) if isinstance(op, SwiGLU) else op.reference

    monkeypatch.setattr(dispatch, "_native", wrong)
    ops = dispatch.choose_ops(DEVICE, notes.append)
    assert ops.variants["swiglu"].startswith("torch (its error is")
    assert ops.variants["attention"] == "native"
    assert "swiglu runs on PyTorch" in notes[0]


def test_the_amx_tile_code_equals_the_reference_in_emulation(tmp_path):
    """On a processor without AMX its instructions are played in C++; see tests/native."""
    native_variant("attention")
    path, _ = compiler()
    library = tmp_path / "attention.so"
    emulation = ("-DEMULATE_AMX", f"-I{Path(__file__).parents[1] / 'native'}")
    source = native._OPS / "attention.cpp"
    command = [path, *native._FLAGS, *emulation, "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    loaded = ctypes.CDLL(str(library))
    assert verify(OPS["attention"], OPS["attention"].native(loaded)).passed
    assert loaded.emulated_products() > 1000


def test_the_kernels_compile_for_processors_with_amx(tmp_path):
    path, _ = compiler()
    flags = [f if f != "-march=native" else "-march=sapphirerapids" for f in native._FLAGS]
    done = subprocess.run(
        [path, *flags, "-S", "-o", "-", str(native._OPS / "attention.cpp")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode and "sapphirerapids" in done.stderr:
        pytest.skip("this compiler does not know processors with AMX")
    assert done.stdout.count("tdpbf16ps") > 8
