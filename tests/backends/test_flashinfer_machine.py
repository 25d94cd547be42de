"""What FlashInfer's kernels ask of the machine: told from files, with a remedy, and without importing anything."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.backends.flashinfer.requirements import (
    RunsNvcc,
    built_module,
    compiler_of_kernels,
    compiler_of_modules,
    cubins,
    products,
)
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.machine import Machine, SimulatedMachine
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.attention.problem import PagedAttentionProblem
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.probes.device import simulated
from tests.backends.test_flashinfer import on_cpu

WRAPPER = """
class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto"): ...
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, causal=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        q_data_type="float16", kv_data_type=None, {o_data_type}max_token_per_sequence=None,
    ): ...
    def run(self, q, paged_kv_cache, *args, out=None, lse=None, return_lse=False): ...
"""
MODULE = (
    "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128"
    "_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with nothing but what a test puts there."""
    for name in ("FLASHINFER_DISABLE_JIT", "FLASHINFER_NVCC", "CUDA_HOME", "CUDA_PATH", "CXX", "FLASHINFER_CUBIN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "cache"))
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    return tmp_path


def install(root: Path, version: str = "0.6.18.post1", o_data_type: str = "o_data_type=None, ") -> Path:
    """FlashInfer's files, which say so if they are imported."""
    package = root / "site" / "flashinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "prefill.py").write_text(WRAPPER.format(o_data_type=o_data_type))
    info = root / "site" / f"flashinfer_python-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n")
    return package


def tools(root: Path, *names: str) -> None:
    for name in names:
        path = root / "cuda" / "bin" / name if name == "nvcc" else root / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\necho release 13.0\n")
        path.chmod(0o755)


def rejections(**facets) -> dict[str, str]:
    """Code and remedy of each reason against `flashinfer.fa2_prefill` on an H200."""
    kernel = next(kernel for kernel in records.KERNELS if kernel.name == "flashinfer.fa2_prefill")
    problem = PagedAttentionProblem(device=simulated("H200"), **facets)
    found = (constraint.reject(problem, Machine()) for constraint in kernel.constraints)
    return {rejection.code: f"{rejection.reason} | {rejection.remedy}" for rejection in found if rejection}


class TestPackage:
    def test_without_it_the_remedy_is_a_command(self, machine) -> None:
        assert 'pip install "kernelhub[flashinfer]"' in rejections()["package_missing"]

    @pytest.mark.parametrize("version", ["0.5.3", "0.8.0", "0.7.3"])
    def test_another_version_is_refused(self, machine, version) -> None:
        install(machine, version)
        assert version in rejections()["package_version"]

    def test_a_folder_without_code_is_no_package(self, machine) -> None:
        (machine / "site" / "flashinfer").mkdir(parents=True)
        assert "namespace folder" in rejections()["package_broken"]

    def test_a_file_that_is_missing_is_reported(self, machine) -> None:
        (install(machine) / "prefill.py").unlink()
        tools(machine, "nvcc", "ninja", "g++")
        assert "symbol_unknown" in rejections()

    def test_a_parameter_that_is_missing_is_reported(self, machine) -> None:
        install(machine, o_data_type="")
        tools(machine, "nvcc", "ninja", "g++")
        assert list(rejections()) == ["signature_changed", "not_built"]
        assert "o_data_type" in rejections()["signature_changed"]

    def test_all_that_is_required_is_enough_and_nothing_is_imported(self, machine) -> None:
        install(machine)
        tools(machine, "nvcc", "ninja", "g++")
        assert list(rejections()) == ["not_built"], "which holds only where nobody asks for the kernel"
        assert "flashinfer-jit-cache" in rejections()["not_built"]
        assert "flashinfer" not in sys.modules


class TestModules:
    @pytest.mark.parametrize(
        ("have", "code"),
        [
            ((), "toolkit_missing"),
            (("nvcc",), "toolkit_missing"),
            (("nvcc", "ninja"), "compiler_missing"),
            (("ninja", "g++"), "toolkit_missing"),
        ],
    )
    def test_what_it_takes_to_compile_is_looked_for(self, machine, have, code) -> None:
        install(machine)
        tools(machine, *have)
        assert list(rejections()) == [code]
        assert "is not built" in rejections()[code]

    def test_a_cache_that_cannot_be_written_is_reported(self, machine, monkeypatch) -> None:
        install(machine)
        tools(machine, "nvcc", "ninja", "g++")
        (machine / "file").write_text("")
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(machine / "file"))
        assert "FLASHINFER_WORKSPACE_BASE" in rejections()["cache_unwritable"]

    @pytest.mark.parametrize("value", ["1", "0"])
    def test_any_value_forbids_to_compile_as_in_the_library(self, machine, monkeypatch, value) -> None:
        install(machine)
        tools(machine, "nvcc", "ninja", "g++")
        monkeypatch.setenv("FLASHINFER_DISABLE_JIT", value)
        assert list(rejections()) == ["jit_disabled"]

    @pytest.mark.parametrize("place", ["flashinfer/data/aot", "flashinfer_jit_cache/jit_cache"])
    def test_a_module_that_is_built_ahead_needs_no_compiler(self, machine, monkeypatch, place) -> None:
        install(machine)
        monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
        folder = machine / "site" / place / MODULE
        folder.mkdir(parents=True)
        (machine / "site" / place.split("/")[0] / "__init__.py").touch()
        (folder / f"{MODULE}.so").touch()
        assert rejections() == {}
        assert list(rejections(window_left=True)) == ["jit_disabled"], "another module"
        assert list(rejections(q_dtype="float16", kv_dtype="float16")) == ["jit_disabled"]

    def test_a_module_that_was_compiled_here_before_is_built(self, machine, monkeypatch) -> None:
        install(machine)
        tools(machine, "nvcc", "ninja", "g++")
        kept = machine / "cache" / ".cache" / "flashinfer"
        for version, arch in (("0.6.17", "90a"), ("0.6.18.post1", "80")):
            folder = kept / version / arch / "cached_ops" / MODULE
            folder.mkdir(parents=True)
            (folder / f"{MODULE}.so").touch()
            assert list(rejections()) == ["not_built"], "of another release, or for another device"
        folder = kept / "0.6.18.post1" / "90a" / "cached_ops" / MODULE
        folder.mkdir(parents=True)
        assert list(rejections()) == ["not_built"], "a build that was broken off"
        (folder / f"{MODULE}.so").touch()
        assert rejections() == {}
        monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
        kernelhub.reload()
        assert list(rejections()) == ["jit_disabled"], "the library loads nothing that it compiled itself"

    def test_nobody_waits_for_a_compiler_who_has_not_asked(self) -> None:
        lacking = SimulatedMachine({"triton": "3.7.1", "flashinfer": "0.6.18.post1"}, lacks={"modules"})
        facets = {"device": "H200", "machine": lacking, "q_len": "many", "causal": True}
        unasked = kernelhub.explain("paged_attention", **facets)
        assert unasked.selected == "gluon.prefill_pipelined"
        assert next(d for d in unasked.decisions if d.kernel == "flashinfer.fa3_prefill").code == "not_built"
        assert kernelhub.explain("paged_attention", backend="flashinfer", **facets).selected == "flashinfer.fa3_prefill"
        with kernelhub.use(paged_attention="flashinfer"):
            assert kernelhub.explain("paged_attention", **facets).selected == "flashinfer.fa3_prefill"
        with kernelhub.use(prefer="flashinfer"):
            assert kernelhub.explain("paged_attention", **facets).selected == "flashinfer.fa3_prefill"

    def test_no_module_is_found_where_there_is_no_library(self, machine) -> None:
        assert built_module((MODULE,), "90").code == "symbol_missing"
        assert compiler_of_modules().code == "toolkit_missing"


class TestNvccAtRunTime:
    """`fp8_blocks` runs nvcc for each class of shapes, also where its module is built ahead."""

    @pytest.fixture(autouse=True)
    def without_the_users_own(self, machine, monkeypatch):
        monkeypatch.delenv("TRTLLM_DG_NVCC_COMPILER", raising=False)
        monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(machine / "kernels"))

    def test_it_is_looked_for_where_the_library_does(self, machine, monkeypatch) -> None:
        assert compiler_of_kernels().code == "toolkit_missing"
        tools(machine, "nvcc")
        assert compiler_of_kernels().code == "compiler_missing"
        tools(machine, "g++")
        assert compiler_of_kernels().ok
        monkeypatch.setenv("TRTLLM_DG_NVCC_COMPILER", str(machine / "none" / "nvcc"))
        assert "none/nvcc is not a command" in compiler_of_kernels().reason
        monkeypatch.delenv("TRTLLM_DG_NVCC_COMPILER")
        monkeypatch.delenv("CUDA_HOME")
        assert "nvcc is not a command" in compiler_of_kernels().reason

    def test_where_kernels_are_kept_must_be_writable(self, machine, monkeypatch) -> None:
        tools(machine, "nvcc", "g++")
        (machine / "file").write_text("")
        monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(machine / "file"))
        assert compiler_of_kernels().code == "cache_unwritable"
        assert "TRTLLM_DG_CACHE_DIR" in compiler_of_kernels().remedy

    def test_the_record_requires_it(self, machine) -> None:
        kernel = next(kernel for kernel in records.KERNELS if kernel.name == "flashinfer.fp8_blocks")
        asked = next(item for item in kernel.constraints if isinstance(item, RunsNvcc))
        found = asked.reject(None, Machine())
        assert found is not None
        assert found.code == "toolkit_missing"


class TestCubins:
    def test_they_are_not_downloaded_but_required(self, machine) -> None:
        finding = cubins()
        assert finding.code == "cubins_missing"
        assert "flashinfer-cubin" in finding.remedy

    def test_a_package_or_a_folder_of_them_is_enough(self, machine, monkeypatch) -> None:
        folder = machine / "site" / "flashinfer_cubin" / "cubins"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        assert not cubins().ok, "an empty folder"
        (folder / "fmha.cubin").touch()
        assert cubins().ok
        monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(machine / "elsewhere"))
        assert not cubins().ok, "the variable says where"

    def test_experts_want_batched_products_not_any_binaries(self, machine, monkeypatch) -> None:
        package = machine / "site" / "flashinfer_cubin"
        folder = package / "cubins" / "0a1b"
        (folder / "fmha").mkdir(parents=True)
        (package / "__init__.py").touch()
        (folder / "fmha" / "fmha.cubin").touch()
        assert cubins().ok
        assert products().code == "cubins_missing", "those are of attention"
        (folder / "batched_gemm-1-2").mkdir()
        assert not products().ok, "an empty folder"
        (folder / "batched_gemm-1-2" / "checksums.txt").touch()
        assert products().ok
        monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(machine / "elsewhere"))
        assert "elsewhere has none" in products().reason


_OF_BINARIES = ("trtllm_gen", "trtllm_context")


def kernels_of_binaries() -> tuple[str, ...]:
    return tuple(f"flashinfer.{name}" for name in _OF_BINARIES)


class TestCutlass:
    """CUTLASS's attention: compiled for Blackwell of data centres alone, built ahead or not."""

    @pytest.mark.parametrize(
        ("op", "name", "module"),
        [("attention", "cutlass_ragged", "fmha_cutlass_sm100a"), ("mla_attention", "mla_cutlass", "mla")],
    )
    def test_its_module_is_looked_for_by_its_name(self, machine, op, name, module) -> None:
        package = install(machine)
        kernel = next(kernel for kernel in records.KERNELS if kernel.name == f"flashinfer.{name}")
        facets = {"head_dim_qk": 192, "head_dim_vo": 128} if op == "attention" else {}

        def codes(device: str) -> set[str]:
            problem = kernelhub.explain(op, device=device, machine=SimulatedMachine({}), **facets).problem
            found = (constraint.reject(problem, Machine()) for constraint in kernel.constraints)
            return {item.code for item in found if item}

        assert "toolkit_missing" in codes("B200"), "it is not built, and cannot be"
        tools(machine, "nvcc", "ninja", "g++")
        assert "not_built" in codes("B200")
        built = package / "data" / "aot" / module / f"{module}.so"
        built.parent.mkdir(parents=True)
        built.touch()
        assert not {"not_built", "toolkit_missing", "capability", "value"} & codes("B300")
        for device in ("H200", "RTX 5090"):
            assert "capability" in codes(device)

    def test_a_release_that_gives_latent_attention_no_scale_of_results_is_refused(self, machine) -> None:
        """What its inner function takes is told by what the wrapper takes: so many arguments, or one less."""
        kernel = next(kernel for kernel in records.KERNELS if kernel.name == "flashinfer.mla_cutlass")
        source = install(machine) / "mla" / "_core.py"
        source.parent.mkdir()
        (source.parent / "__init__.py").write_text("from ._core import *\n")
        run = "    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, page_table=None{more}): ...\n"
        for more, refused in ((", o_scale=None", False), ("", True)):
            text = "class BatchMLAPagedAttentionWrapper:\n" + run.format(more=more)
            source.write_text(f"def get_mla_module(): ...\n{text}")
            problem = kernelhub.explain("mla_attention", device="B200", machine=SimulatedMachine({})).problem
            found = [constraint.reject(problem, Machine()) for constraint in kernel.constraints]
            assert (
                any(item and item.code == "signature_changed" and "o_scale" in item.reason for item in found) is refused
            )


class TestKnownBad:
    def test_binaries_want_a_launcher_and_are_not_downloaded(self, machine) -> None:
        for name in (*kernels_of_binaries(), *(f"flashinfer.{end}" for end in ("trtllm_ragged", "mla_trtllm"))):
            kernel = next(kernel for kernel in records.KERNELS if kernel.name == name)
            problem = kernelhub.explain(kernel.op, device="B200", machine=SimulatedMachine({})).problem
            found = [constraint.reject(problem, Machine()) for constraint in kernel.constraints]
            assert {"package_missing", "toolkit_missing", "cubins_missing"} <= {item.code for item in found if item}

    def test_it_is_not_chosen_for_them_nor_are_sinks_given_to_what_drops_them(self) -> None:
        machine = SimulatedMachine({"flashinfer": "0.6.18.post1", "triton": "3.7.1"})
        for device, facets in (("B200", {"page_size": 256}), ("H200", {"sinks": True}), ("B200", {"sinks": True})):
            selection = kernelhub.explain("paged_attention", device=device, machine=machine, **facets)
            assert selection.selected not in (
                "flashinfer.fa2_decode",
                "flashinfer.fa2_prefill",
                "flashinfer.fa3_prefill",
            )
            assert "page_size" not in facets or selection.selected not in kernels_of_binaries()
        honours = {kernel.name for kernel in records.KERNELS if "sinks" in kernel.features}
        assert honours == {f"flashinfer.{name}" for name in ("xqa", "fa2_sinks", "fa3_sinks", *_OF_BINARIES)}


class TestLoading:
    def test_a_library_that_cannot_be_imported_is_passed_over_with_the_reason(self, caplog) -> None:
        arguments = paged_attention_inputs(AttentionModel("small", 8, 2, 64, 64), seq_lens=(40, 9))
        with on_cpu(), without_fake(), kernelhub.use(paged_attention=("flashinfer.fa2_prefill", "torch")):
            HUB.machine.forget()
            with caplog.at_level(logging.WARNING):
                out = kernelhub.paged_attention(**arguments)
            selection = kernelhub.paged_attention.explain(**arguments)
        assert torch.isfinite(out).all()
        assert selection.selected.startswith("torch.")
        (reason,) = [d.rejections[0] for d in selection.decisions if d.kernel == "flashinfer.fa2_prefill"]
        assert reason.code == "load_failed"
        assert "No module named 'flashinfer'" in reason.reason


@contextlib.contextmanager
def without_fake():
    """As `on_cpu`, with no library at all."""
    taken = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "flashinfer"}
    try:
        yield
    finally:
        sys.modules.update(taken)
