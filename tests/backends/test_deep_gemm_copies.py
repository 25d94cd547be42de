"""A copy of DeepGEMM that is missing, broken or another version's is told before it is imported, or passed over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.deep_gemm import copies, requirements
from kernelhub.backends.deep_gemm.kernels import KERNELS
from kernelhub.backends.deep_gemm.requirements import CALLS, toolkit
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.load import LoadFailure, load_attribute
from kernelhub.dispatch.machine import Machine, SimulatedMachine
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.probes.finding import found
from tests.backends.deep_gemm_copies import FAKE, installed, on_the_cpu, write
from tests.dispatch.backends import OF_TRUST

RAISES = "raise AssertionError('the library was imported')\n"


@pytest.fixture
def toolkit_here(tmp_path: Path, monkeypatch) -> Path:
    """A CUDA toolkit's files, and a cache folder that can be written."""
    root = tmp_path / "cuda"
    (root / "bin").mkdir(parents=True)
    for name in ("nvcc", "cuobjdump"):
        (root / "bin" / name).touch()
    (root / "include").mkdir()
    for name in ("cuda.h", "cuda_runtime.h"):
        (root / "include" / name).touch()
    (root / "version.json").write_text('{"cuda": {"name": "CUDA SDK", "version": "13.0.1"}}')
    monkeypatch.setenv("CUDA_HOME", str(root))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    return root


def decision(op: str = "fp8_gemm", kernel: str = "deep_gemm.fp8_blocks", **facets: Any) -> Any:
    selection = kernelhub.explain(op, device="H200", machine=Machine(), **facets)
    return next(item for item in selection.decisions if item.kernel == kernel)


def codes(**more: Any) -> set[str]:
    return {rejection.code for rejection in decision(**more).rejections} - OF_TRUST


def test_nothing_installed_is_said_with_the_command_that_installs_it(tmp_path, toolkit_here) -> None:
    with installed(tmp_path):
        found = decision()
    assert not found.accepted
    missing = found.rejections[0]
    assert missing.code == "package_missing"
    assert 'pip install "kernelhub[deep-gemm]"' in missing.remedy


def test_a_whole_copy_is_accepted_and_not_imported(tmp_path, toolkit_here) -> None:
    write(tmp_path, FAKE + RAISES)
    with installed(tmp_path):
        for kernel in KERNELS:
            device = "B200" if "ue8m0" in kernel.name else "H200"
            facets: dict[str, Any] = {}
            if kernel.op == "fp8_gemm" and "ue8m0" in kernel.name:
                facets = {"a_scale_dtype": "float8_e8m0fnu", "b_scale_dtype": "float8_e8m0fnu"}
            if kernel.op == "grouped_gemm":
                facets = {"masked": "masked" in kernel.name}
                if "fp8" in kernel.name:
                    small = "_e8m0" if "ue8m0" in kernel.name else ""
                    facets |= {"a_scale": f"group{small}", "b_scale": f"block{small}"}
            selection = kernelhub.explain(kernel.op, device=device, machine=Machine(), backend=kernel.name, **facets)
            assert selection.selected == kernel.name, str(selection)
        assert "deep_gemm" not in sys.modules


def test_the_index_s_own_package_is_recognised(tmp_path, toolkit_here) -> None:
    """deep-gemm 1.0.0 has neither headers nor compiled modules; its import succeeds, and every call fails."""
    write(tmp_path, "from .jit_kernels import gemm_fp8_fp8_bf16_nt\n", headers=False, compiled="")
    with installed(tmp_path):
        broken = next(item for item in decision().rejections if item.code == "package_broken")
    assert "has no include/deep_gemm" in broken.reason
    assert "deep-gemm 1.0.0" in broken.reason
    assert 'pip uninstall deep-gemm, then pip install "kernelhub[deep-gemm]"' in broken.remedy


def test_a_copy_without_its_compiled_module_is_recognised(tmp_path, toolkit_here) -> None:
    write(tmp_path, compiled="")
    with installed(tmp_path):
        assert "package_broken" in codes()


def test_a_function_that_is_gone_and_one_that_changed_are_distinguished(tmp_path, toolkit_here) -> None:
    write(tmp_path, FAKE.replace("def fp8_gemm_nt(a, b, d, c", "def fp8_gemm_nt(a, b, c, d"))
    with installed(tmp_path):
        assert codes() == {"signature_changed"}
    (tmp_path / "deep_gemm" / "__init__.py").write_text(FAKE.replace("fp8_gemm_nt", "renamed"))
    with installed(tmp_path):
        assert codes() == {"symbol_missing"}
        other = decision("mqa_logits", "deep_gemm.logits")
        assert other.accepted  # only the kernels that need it suffer


def test_a_release_whose_logits_miss_waits_is_reported_by_a_name_that_it_lacks(tmp_path, toolkit_here) -> None:
    write(tmp_path, FAKE.replace("def fp8_fp4_mqa_logits", "def another"))
    with installed(tmp_path):
        assert decision("mqa_logits", "deep_gemm.logits").code == "known_bad"
        assert codes() == set()


@pytest.mark.parametrize("name", ["nvcc", "cuobjdump"])
def test_a_toolkit_without_a_program_is_refused(tmp_path, toolkit_here, name: str) -> None:
    write(tmp_path)
    (toolkit_here / "bin" / name).unlink()
    with installed(tmp_path):
        lacking = decision().rejections
    assert [item.code for item in lacking] == ["toolkit_missing"]
    assert name in lacking[0].reason
    assert "set CUDA_HOME" in lacking[0].remedy


def test_a_toolkit_that_is_too_old_is_refused_by_generation(toolkit_here) -> None:
    (toolkit_here / "version.json").write_text('{"cuda": {"version": "12.8.1"}}')
    assert toolkit((12, 3)).ok
    assert toolkit((12, 9)).code == "toolkit_version"
    (toolkit_here / "version.json").unlink()
    assert toolkit((12, 9)).ok  # not known to be


def test_headers_of_another_cuda_and_a_driver_that_is_too_old_are_refused(toolkit_here, monkeypatch) -> None:
    assert toolkit((12, 3)).ok
    (toolkit_here / "include" / "cuda.h").write_text("#define CUDA_VERSION 12080\n")
    assert toolkit((12, 3)).code == "toolkit_headers"
    (toolkit_here / "include" / "cuda.h").write_text("#define CUDA_VERSION 13000\n")
    assert toolkit((12, 3)).ok
    monkeypatch.setattr(requirements, "driver", lambda: found("driver", "550.54.14", "driver 550.54.14"))
    assert toolkit((12, 3)).code == "driver_old"


def test_a_cache_that_cannot_be_written_is_refused(tmp_path, toolkit_here, monkeypatch) -> None:
    write(tmp_path)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(toolkit_here / "version.json" / "below"))
    with installed(tmp_path):
        (refused,) = decision().rejections
    assert refused.code == "cache_unwritable"
    assert "DG_JIT_CACHE_DIR" in refused.remedy


def test_an_import_that_fails_is_passed_over_with_its_reason(tmp_path) -> None:
    write(tmp_path, FAKE + "raise OSError('libcudart.so.13: cannot open')\n")
    arguments = fp8_gemm_inputs(tokens=2, n=64, k=128)
    with installed(tmp_path), on_the_cpu():
        with kernelhub.use(fp8_gemm=("fake.fp8_blocks", "torch.dequantized")):
            out = kernelhub.fp8_gemm(**arguments)
        assert torch.equal(out, kernelhub.fp8_gemm(**arguments, backend="torch.dequantized"))
        (fallback,) = [item for item in kernelhub.report().fallbacks if item.kernel == "fake.fp8_blocks"]
    assert "libcudart.so.13: cannot open" in fallback.reason


def test_a_function_whose_parameters_only_the_loaded_library_states_is_looked_at_again(tmp_path) -> None:
    made = FAKE.replace("def fp8_gemm_nt(a, b, d, c", "def fp8_gemm_nt(a, b, c, d")
    write(tmp_path, made)
    with installed(tmp_path), on_the_cpu():
        arguments = fp8_gemm_inputs(tokens=2, n=64, k=128)
        with kernelhub.use(fp8_gemm=("fake.fp8_blocks", "torch.dequantized")):
            kernelhub.fp8_gemm(**arguments)
        (fallback,) = kernelhub.report().fallbacks
    assert "fp8_gemm_nt has c as argument 3, where d was" in fallback.reason


def test_a_second_library_of_the_same_operators_is_not_loaded(tmp_path) -> None:
    """Loading it would end the process."""
    write(tmp_path, RAISES, compiled="_C.abi3.so")
    library = torch.library.Library("deep_gemm", "FRAGMENT")
    library.define("an_operator_of_another_copy(Tensor a) -> Tensor")
    try:
        with installed(tmp_path), pytest.raises(LoadFailure, match=r"has registered torch's operators deep_gemm::"):
            load_attribute("kernelhub.backends.deep_gemm.fp8_gemm:Fp8Blocks", 10.0)
    finally:
        library._destroy()


@pytest.mark.parametrize(
    ("compiled", "source", "claims"),
    [
        ("_C.cpython-312-x86_64-linux-gnu.so", "", False),
        ("_C.so", "import tvm_ffi\n", False),
        ("_C.so", "import torch\n", True),
        ("_C_extension.abi3.so", "", True),
    ],
)
def test_which_copies_claim_torch_s_namespace(tmp_path, compiled: str, source: str, claims: bool) -> None:
    folder = write(tmp_path, source, compiled=compiled)
    assert copies.Copy("deep_gemm", folder).registers_operators is claims


def test_the_copy_inside_vllm_is_loaded_without_vllm_and_found_by_it_later(tmp_path, toolkit_here) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('vllm was imported')\n")
    source = "from . import _C\nfrom ._C import *\n__version__ = '2.8.1'\n"
    folder = write(package / "third_party", source, compiled="_C_extension.abi3.so")
    (folder / "_C.py").write_text(FAKE)
    arguments = fp8_gemm_inputs(tokens=2, n=64, k=128)
    with installed(tmp_path), on_the_cpu():
        assert decision().accepted
        assert "vllm" not in sys.modules
        out = kernelhub.fp8_gemm(**arguments, backend="fake.fp8_blocks")
        assert "vllm" not in sys.modules
        assert sys.modules["vllm.third_party.deep_gemm"].__version__ == "2.8.1"
    torch.testing.assert_close(out, kernelhub.fp8_gemm(**arguments, backend="torch.dequantized"))


def test_a_broken_copy_gives_way_to_a_whole_one(tmp_path) -> None:
    write(tmp_path, RAISES, headers=False)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    folder = write(tmp_path / "vllm" / "third_party")
    with installed(tmp_path):
        assert copies.find() == copies.Copy("vllm.third_party.deep_gemm", folder)


def test_scales_that_are_no_powers_of_two_are_never_rounded() -> None:
    """On Blackwell the library would, without a word; the record refuses (vllm#37804, sglang#12878)."""
    machine = SimulatedMachine({"triton": "3.7.1", "deep_gemm": "2.5.0"})
    for device in ("B200", "B300"):
        selection = kernelhub.explain("fp8_gemm", device=device, machine=machine)
        assert not selection.selected.startswith("deep_gemm")
        grouped = {"a_scale": "group", "b_scale": "block"}
        selection = kernelhub.explain("grouped_gemm", device=device, machine=machine, **grouped)
        assert not selection.selected.startswith("deep_gemm")


def test_every_call_names_a_function_of_the_library() -> None:
    _ = HUB.settings
    assert all(call.target.startswith("deep_gemm:") for calls in CALLS.values() for call in calls)
    assert {kernel.backend for kernel in KERNELS} == {"deep_gemm"}


def test_parameters_are_read_from_what_pybind_writes_into_docstrings() -> None:
    text = (
        "fp8_gemm_nt(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], d: torch.Tensor, "
        "c: Optional[torch.Tensor] = None, recipe: Annotated[list[int], FixedSize(3)] | None = None, "
        "compiled_dims: str = 'nk', logits_dtype: object = torch.float32) -> None"
    )
    header = copies.header_of_text(text)
    assert header.positional[:3] == ("a", "b", "d")
    assert header.required == {"a", "b", "d"}
    assert copies.header_of_text("a function of <another kind at 0x1>") is None
