"""FX3: compilers that are old, missing, broken, hang or are killed; headers and drivers of another CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

import kernelhub
from kernelhub.backends.cpp import build
from kernelhub.backends.flashinfer.requirements import compiler_of_modules
from kernelhub.dispatch.hub import HUB
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.probes import toolchain
from kernelhub.probes.finding import found
from tests.faults.record import NOTHING
from tests.faults.records import FAULTS
from tests.faults.scene import code_is, script


@pytest.fixture
def toolkit_of(tmp_path: Path, monkeypatch):
    """A CUDA toolkit whose nvcc is a script; gives what makes one."""

    def make(text: str, *, header: str | None = "#define CUDA_VERSION 13000", runtime: bool = True) -> Path:
        root = tmp_path / "cuda"
        (root / "nvvm").mkdir(parents=True)
        (root / "include").mkdir()
        if header is not None:
            (root / "include" / "cuda.h").write_text(header)
        if runtime:
            (root / "include" / "cuda_runtime.h").touch()
        monkeypatch.setenv("CUDA_HOME", str(root))
        return script(root / "bin" / "nvcc", text)

    return make


RELEASE = "echo 'Cuda compilation tools, release {}, V{}.1'"


def release(version: str) -> str:
    return RELEASE.format(version, version)


@pytest.mark.fault("nvcc_missing")
def test_no_nvcc(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    code_is(FAULTS["nvcc_missing"], toolchain.nvcc())


@pytest.mark.fault("nvcc_old")
def test_an_old_nvcc(toolkit_of) -> None:
    nvcc = toolkit_of(release("11.5"), header="#define CUDA_VERSION 11050")
    code_is(FAULTS["nvcc_old"], toolchain.answering(nvcc, oldest=(12, 3)))
    assert toolchain.answering(nvcc).value == "11.5"


@pytest.mark.parametrize("text", ["exec sleep 60", "sleep 60; exit 0", "sleep 60 & exit 0"])
@pytest.mark.fault("nvcc_hangs")
def test_an_nvcc_that_does_not_end(toolkit_of, text) -> None:
    """Nor what it started: a wrapper that is ended alone would leave its pipes open."""
    code_is(FAULTS["nvcc_hangs"], toolchain.answering(toolkit_of(text), timeout_s=0.3))


@pytest.mark.parametrize("how", ["exit 137", "kill -9 $$"])
@pytest.mark.fault("nvcc_killed")
def test_an_nvcc_that_is_killed(toolkit_of, how) -> None:
    toolkit_of(how)
    code_is(FAULTS["nvcc_killed"], toolchain.nvcc())


@pytest.mark.parametrize("text", ["exit 1", "echo hello", "exec /no/such/program"])
@pytest.mark.fault("nvcc_broken")
def test_an_nvcc_that_fails(toolkit_of, text) -> None:
    toolkit_of(text)
    code_is(FAULTS["nvcc_broken"], toolchain.nvcc())


@pytest.mark.fault("nvcc_broken")
def test_an_nvcc_that_is_no_program(toolkit_of) -> None:
    nvcc = toolkit_of("exit 0")
    nvcc.write_bytes(b"\x7fELF\0\0")
    code_is(FAULTS["nvcc_broken"], toolchain.nvcc())


@pytest.mark.fault("nvcc_noise")
def test_an_nvcc_that_warns_first(toolkit_of) -> None:
    toolkit_of(f"echo 'warning: the licence expires'; echo noise >&2; {release('13.0')}")
    assert toolchain.nvcc().value == "13.0"
    assert FAULTS["nvcc_noise"].code == NOTHING


@pytest.mark.parametrize("what", ["runtime", "header"])
@pytest.mark.fault("headers_missing")
def test_headers_that_are_missing(toolkit_of, what) -> None:
    toolkit_of(release("13.0"), **{what: False if what == "runtime" else None})
    code_is(FAULTS["headers_missing"], toolchain.nvcc())


@pytest.mark.fault("headers_of_another")
def test_headers_of_another_cuda(toolkit_of) -> None:
    toolkit_of(release("13.3"))
    code_is(FAULTS["headers_of_another"], toolchain.nvcc())
    assert "nvcc is of CUDA 13.3" in toolchain.nvcc().reason


@pytest.mark.fault("driver_old")
def test_code_and_ptx_for_a_driver_that_is_older(toolkit_of, monkeypatch) -> None:
    """The driver is simulated, since it cannot be changed: all else is as on such a machine."""
    toolkit_of(release("13.0"))
    for version, fits in (("535.104.05", False), ("575.57.08", False), ("580.65.06", True), ("610.1", True)):
        monkeypatch.setattr(toolchain, "driver", lambda version=version: found("driver", version, f"driver {version}"))
        if fits:
            assert toolchain.nvcc().ok
        else:
            code_is(FAULTS["driver_old"], toolchain.nvcc())
            assert version in toolchain.nvcc().reason


@pytest.mark.fault("nvcc_killed")
def test_a_backend_that_would_compile_says_the_same(toolkit_of, tmp_path, monkeypatch, no_engine_variables) -> None:
    """FlashInfer, here by the files that are looked for, would run this nvcc."""
    toolkit_of("exit 137")
    (tmp_path / "site" / "flashinfer").mkdir(parents=True)
    (tmp_path / "site" / "flashinfer" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    script(tmp_path / "bin" / "ninja", "exit 0")
    script(tmp_path / "bin" / "g++", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    code_is(FAULTS["nvcc_killed"], compiler_of_modules())


class TestCompilerOfThisCpu:
    """Our own C++ is compiled by a compiler that fails: torch's kernel answers, with the same numbers."""

    @pytest.fixture
    def call(self, tmp_path, monkeypatch):
        monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "cache"))
        build.library.cache_clear()
        given = fp8_gemm_inputs(tokens=2, n=64, k=64)

        def call(cxx: str):
            monkeypatch.setenv("CXX", cxx)
            kernelhub.reload()
            result = kernelhub.fp8_gemm(**given)
            assert result.isfinite().all()
            selection = kernelhub.explain(kernelhub.fp8_gemm, **given)
            assert selection.selected.startswith("torch.")
            return next(item for item in selection.decisions if item.kernel == "cpp.fp8_gemm")

        yield call
        build.library.cache_clear()
        HUB.machine.forget()

    @pytest.mark.fault("cxx_missing")
    def test_no_compiler(self, call, tmp_path) -> None:
        code_is(FAULTS["cxx_missing"], call(str(tmp_path / "none")))
        code_is(FAULTS["cxx_missing"], toolchain.cxx_compiler())

    @pytest.mark.parametrize(
        ("key", "text"),
        [
            pytest.param("cxx_fails", "echo 'error: no such option' >&2; exit 1", marks=pytest.mark.fault("cxx_fails")),
            pytest.param("cxx_killed", "exit 137", marks=pytest.mark.fault("cxx_killed")),
            pytest.param("cxx_killed", "kill -9 $$", marks=pytest.mark.fault("cxx_killed")),
            pytest.param(
                "cxx_killed",
                "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
                marks=pytest.mark.fault("cxx_killed"),
            ),
            pytest.param("cxx_hangs", "exec sleep 60", marks=pytest.mark.fault("cxx_hangs")),
            pytest.param("cxx_hangs", "sleep 60; exit 0", marks=pytest.mark.fault("cxx_hangs")),
        ],
    )
    def test_one_that_fails(self, call, tmp_path, monkeypatch, key, text) -> None:
        monkeypatch.setenv("KERNELHUB_COMPILE_TIMEOUT_S", "0.5")
        code_is(FAULTS[key], call(str(script(tmp_path / "g++", text))))
