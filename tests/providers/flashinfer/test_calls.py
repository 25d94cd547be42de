"""What adapters call is taken by every release that the records admit, as their wheels have it."""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
from pathlib import Path
from typing import Any, Optional, Union

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import calls, gemm
from kernelhub.backends.flashinfer.gemm.operands import shuffled
from kernelhub.backends.flashinfer.moe import layouts, mixed
from kernelhub.backends.flashinfer.requirements import PACKAGE, Module, takes_one
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.selection import Decision
from kernelhub.ops.gemm.fp4.problem import Fp4GemmProblem
from kernelhub.probes.device import simulated
from kernelhub.probes.package import fits
from kernelhub.probes.signature import Call, takes
from tests.backends.flashinfer_mixed_fake import BITS, codes_in_order
from tests.providers.wheels import wheel

# The first that is admitted, the last before `plan` of decode took any keyword, one after, the last of 0.6, and the
# newest, where latent attention moved into a package of its own: each shows a change of the interface.
VERSIONS = ("0.6.1", "0.6.12", "0.6.18.post1", "0.7.2.post1")
BLOCK_MAJOR_K, RENORMALIZE, MXFP8 = 2, 1, 2  # as adapters give them, which cannot be imported without the library
MOVED_BEHIND = ("0.6.18.post1", "0.7.2.post1")


def several(call: Call | tuple[Call, ...]) -> tuple[Call, ...]:
    return call if isinstance(call, tuple) else (call,)


def name_of(call: Call | tuple[Call, ...]) -> str:
    return several(call)[-1].target.partition(":")[2]


@pytest.mark.parametrize("version", VERSIONS)
class TestReleases:
    def test_the_records_admit_it(self, version) -> None:
        assert fits(version, PACKAGE.versions)

    @pytest.mark.parametrize("call", calls.CALLS, ids=name_of)
    def test_it_takes_the_call(self, call, version) -> None:
        finding = takes_one(several(call), root=wheel("flashinfer-python", version) / "flashinfer")
        assert finding.ok, finding.reason

    def test_what_plans_decode_is_read_where_it_is(self, version) -> None:
        behind, _ = calls.DECODE_PLAN
        finding = takes(behind, root=wheel("flashinfer-python", version) / "flashinfer")
        assert finding.code == ("found" if version in MOVED_BEHIND else "symbol_missing"), finding.reason

    @pytest.mark.parametrize("call", calls.CALLS, ids=name_of)
    def test_a_parameter_that_it_lacks_is_reported(self, call, version) -> None:
        wrong = tuple(Call(one.target, one.positional, (*one.keywords, "no_such_parameter")) for one in several(call))
        finding = takes_one(wrong, root=wheel("flashinfer-python", version) / "flashinfer")
        assert finding.code == "signature_changed"
        assert "no_such_parameter" in finding.reason

    def test_modules_are_called_what_the_probe_looks_for(self, version) -> None:
        """The text of the functions that name modules, with what the probe fills in taken out."""
        source = (wheel("flashinfer-python", version) / "flashinfer/jit/attention/modules.py").read_text()
        for part in (
            "batch_prefill_with_kv_cache_dtype_q_",
            "batch_decode_with_kv_cache_dtype_q_",
            "posenc_",
            "f16qk_",
        ):
            assert part in source
        suffix = "_planabi2" if version.startswith("0.7") else ""
        assert (f"profiler_{{use_profiler}}{suffix}" in source) or ("profiler_{use_profiler}" in source and not suffix)
        assert '"_sm90" if backend == "fa3"' in source

    def test_sums_over_ranks_have_the_workspace_that_the_adapter_makes(self, version) -> None:
        """What the library's own function makes, and fills; the kernels know it by places in one table."""
        source = (wheel("flashinfer-python", version) / "flashinfer/comm/trtllm_ar.py").read_text()
        for part in (
            "BarrierFlagCount = 256",
            "flag_size = tp_size * BarrierFlagCount * 4",
            "lamport_buffer_size = lamport_comm_size * 3",
            "for ipc_handle in ipc_handles:\n        for rank in range(tp_size):\n            workspace.append(",
            "non-lamport flag: kernel_flag_ptr[1] = 0",
            "lamport flag: kernel_flag_ptr[2] = 0",
            "lamport triple buffer offset: kernel_flag_ptr[3] = lamport_comm_size",
            "lamport clear size: kernel_flag_ptr[4] = 0",
            "kAllReduce = 0",
            "kARResidualRMSNorm = 1",
        ):
            assert part in source, part

    def test_the_exchange_of_tokens_is_compiled_and_laid_out_as_the_adapter_reads_it(self, version) -> None:
        """The name of its module, and what names of offsets have in common."""
        folder = wheel("flashinfer-python", version) / "flashinfer"
        assert '"mnnvl_moe_alltoall"' in (folder / "jit/comm.py").read_text()
        source = (folder / "comm/trtllm_moe_alltoall.py").read_text()
        assert 'name.replace("MOE_A2A_", "")' in source
        assert "SEND_COUNTERS_OFFSET_INDEX" in source
        assert "get_moe_alltoall_module().moe_a2a_get_aux_data_size(" in source or version == "0.7.2.post1"

    def test_cudnn_s_graphs_are_distinguished_by_what_the_record_says(self, version) -> None:
        """By all of it in the newest, which is why the others are known to be bad."""
        keys = {
            name: body_of(wheel("flashinfer-python", version) / f"flashinfer/cudnn/{name}.py", *functions)
            for name, functions in {
                "decode": ("_sdpa_decode_key_fn",),
                "prefill": ("_sdpa_prefill_key_fn", "_prefill_runtime_key", "_prefill_descriptor_key"),
            }.items()
        }
        for name, key in keys.items():
            told = [part in key for part in ("k_cache.stride()", "v_cache.stride()", "k_cache.dtype", "q.device")]
            assert told == [version == "0.7.2.post1"] * 4, name
        returned = keys["decode"].partition("return (")[2]
        assert ("scale" in returned) is (version in MOVED_BEHIND)
        assert ("q.dtype" in returned) is (version == "0.7.2.post1")

    def test_cudnn_is_run_where_its_frontend_is_and_reports_the_base_of_an_lse(self, version) -> None:
        folder = wheel("flashinfer-python", version) / "flashinfer/cudnn"
        for name in ("decode", "prefill"):
            source = (folder / f"{name}.py").read_text()
            assert "    CUDNN_AVAILABLE = False" in source, "else it runs binaries that it downloads"
            assert "get_cudnn_fmha_gen_module()" in source
        source = (folder / "prefill.py").read_text()
        assert ('lse_base: str = "log2"' in source) is (version == "0.7.2.post1"), "natural before"
        assert ("lse.mul_(log2e)" in source) is (version == "0.7.2.post1")

    @pytest.mark.parametrize("call", calls.NEWER, ids=name_of)
    def test_newer_calls_are_refused_where_they_are_not_taken(self, call, version) -> None:
        finding = takes_one(several(call), root=wheel("flashinfer-python", version) / "flashinfer")
        from_0_6_12 = (
            calls.TRTLLM_FP8_BLOCKS,
            calls.MX_GEMM,
            calls.GROUPS_NVFP4,
            calls.DEQUANTIZE_MODULE,
            calls.DEQUANTIZE_NVFP4,
            calls.QUANTIZE_MODULE,
            calls.QUANTIZE_NVFP4_KV,
            calls.QUANTIZE_FP4,
            calls.QUANTIZE_MXFP8,
            calls.TRTLLM_CONTEXT,
            calls.TRTLLM_LATENT,
            calls.CUTLASS_LATENT_MODULE,
            calls.CUTLASS_LATENT,
        )
        older = ("0.6.1",) if call in from_0_6_12 else ("0.6.1", "0.6.12")
        if version in older:
            assert finding.code in ("signature_changed", "symbol_missing", "symbol_unknown")
        else:
            assert finding.ok, finding.reason

    def test_modules_of_attention_are_called_what_the_probe_looks_for(self, version) -> None:
        folder = wheel("flashinfer-python", version) / "flashinfer"
        assert '"fmha_gen"' in (folder / "jit/attention/modules.py").read_text()
        xqa = (folder / "jit/xqa.py").read_text()
        for part in ("xqa_mla_input_", "_head_group_ratio_{head_group_ratio}_use_sliding_window_{use_sliding_window}"):
            assert part in xqa
        takes_halves = "torch.bfloat16)" in xqa.partition("def gen_xqa_module_mla(")[2].partition("return gen_jit")[0]
        assert takes_halves is (version != "0.6.1"), "the record of XQA's latents asks for 0.6.12"
        sinks = (folder / ("attention.py" if version == "0.6.1" else "attention/_core.py")).read_text()
        assert 'f"batch_prefill_attention_sink_{filename_safe_dtype_map[q_data_type]}_swa_{window_left >= 0}_' in sinks

    def test_modules_of_experts_are_called_what_the_probe_looks_for(self, version) -> None:
        source = (wheel("flashinfer-python", version) / "flashinfer/jit/fused_moe.py").read_text()
        assert '"fused_moe_trtllm_sm100"' in source
        assert 'f"fused_moe_{device_arch}"' in source
        for arch in ("90", "100", "103", "120"):
            assert f'nvcc_flags, "{arch}", use_fast_build' in source

    def test_modules_of_products_are_called_what_the_probe_looks_for(self, version) -> None:
        folder = wheel("flashinfer-python", version) / "flashinfer/jit/gemm"
        source = "".join((folder / name).read_text() for name in ("core.py", "fp8_blockscale.py"))
        names = {name for kernel in gemm.KERNELS for item in kernel.constraints for name in _module_names(item)}
        ours = ("gemm", "fp4_gemm_cutlass", "mxfp8_gemm_cutlass", "fp8_gemm_cutlass", "gemm_sm100", "trtllm_gemm")
        assert names == {*ours, "fp8_blockscale_gemm_90"}
        here = names - ({"mxfp8_gemm_cutlass"} if version == "0.6.1" else set())
        assert all(f'"{name}"' in source for name in here)

    def test_modules_of_segments_and_of_the_dequantiser_are_called_so(self, version) -> None:
        jit = wheel("flashinfer-python", version) / "flashinfer/jit"
        assert '"gemm_sm90"' in (jit / "gemm/core.py").read_text()
        source = (jit.parent / "gemm/gemm_base.py").read_text()
        assert "get_gemm_sm100_module().group_gemm_fp8_nt_groupwise(" in source
        assert "get_gemm_sm100_module().group_gemm_mxfp4_nt_groupwise(" in source
        on_sm_120 = ("group_gemm_mxfp4_nt_groupwise", "group_gemm_nvfp4_nt_groupwise")
        for name in () if version == "0.6.1" else on_sm_120:
            assert f"get_gemm_sm120_module().{name}(" in source
        if version != "0.6.1":
            assert '"fp4_kv_dequant"' in (jit / "fp4_kv_dequantization.py").read_text()

    def test_modules_of_quantisers_and_of_merging_are_called_so(self, version) -> None:
        folder = wheel("flashinfer-python", version) / "flashinfer"
        assert '"cascade"' in (folder / "jit/cascade.py").read_text()
        assert '"mxfp8_quantization_sm100"' in (folder / "jit/fp8_quantization.py").read_text()
        if version == "0.6.1":
            return
        assert '"fp4_kv_quant"' in (folder / "jit/fp4_kv_quantization.py").read_text()
        source = (folder / "quantization/fp4_quantization.py").read_text()
        assert 'f"fp4_quantization_{device_arch}"' in source
        assert 'gen_fp4_quantization_module(sm120f_nvcc_flags, "120f")' in source
        assert 'version_at_least(torch.version.cuda, "12.9")' in source
        for arch in ("100", "103", "120", "121"):
            assert f'"{arch}")' in source

    def test_quantisers_of_groups_floor_and_reckon_as_their_model_does(self, version) -> None:
        """The lines that the known defects speak of, and the argument by which small groups are kept."""
        path = wheel("flashinfer-python", version) / "flashinfer/quantization/kernels/cutile"
        path /= "per_token_group_quant_8bit_cutile.py"
        if version not in MOVED_BEHIND:
            assert not path.exists()
            return
        by_rows, _, by_columns = path.read_text().partition("def _per_token_group_quant_8bit_colmajor_kernel(")
        for kernel in (by_rows, by_columns):
            assert "_absmax = ct.maximum(_absmax, eps)" in kernel
            assert "y_s = _absmax / bit8_max" in kernel
        assert "ct.maximum(y * y_s_inv, bit8_min)" in by_rows
        assert "ct.maximum(y / y_s, bit8_min)" in by_columns
        assert "safe_y_s = ct.maximum(abs_y_s, 1e-10)" in by_columns
        assert "y_s = ct.exp2(ct.ceil(ct.log2(safe_y_s)))" in by_columns

    def test_the_scheduler_of_masked_rows_looks_at_groups_that_are_there(self, version) -> None:
        """Until it did, the release is refused; and what it compiles for is what the record says."""
        folder = wheel("flashinfer-python", version) / "flashinfer/gemm/kernels"
        if version not in MOVED_BEHIND:
            assert not (folder / "grouped_gemm_masked_wrapper.py").exists()
            return
        source = (folder / "grouped_gemm_masked_blackwell.py").read_text()
        assert "keep_running = batch_idx < num_batches" in source
        compiled = source.partition("def get_cute_dsl_compiled_masked_gemm_kernel(")
        assert compiled[0].endswith("@functools.cache\n")
        assert compiled[2].split(",")[0].strip() == "m: int"
        assert "out.permute(*_c_perm).is_contiguous()" in source

    def test_functions_of_modules_take_what_adapters_give(self, version) -> None:
        """They are made when a module is loaded, within another function; `compiled.taking` looks at them then."""
        package = wheel("flashinfer-python", version) / "flashinfer"
        assert parameters(package / "gemm/gemm_base.py", "cutlass_segment_gemm_sm90") == of_adapter("grouped/segments")
        if version != "0.6.1":
            path = package / "quantization/fp4_quantization.py"
            assert parameters(path, "nvfp4_kv_dequant") == of_adapter("quant/nvfp4_kv", "_DEQUANTIZER_TAKES")
            assert parameters(path, "nvfp4_kv_quant") == of_adapter("quant/nvfp4_kv", "_QUANTIZER_TAKES")

    def test_cutlass_s_functions_of_attention_take_what_adapters_give(self, version) -> None:
        """They have no Python source: what the library gives them where it calls them, one by one."""
        package = wheel("flashinfer-python", version) / "flashinfer"
        assert '"fmha_cutlass_sm100a"' in (package / "jit/attention/modules.py").read_text()
        assert '"mla",' in (package / "jit/mla.py").read_text()
        (planned,) = given_to(package / "prefill.py", "plan", within="fmha_varlen_plan")
        assert planned[:2] == ["qo_segment_offsets", "kv_segment_offsets"]
        assert planned[2:6] == ["work_indptr", "qo_tile_indices", "head_indices", "batch_indices"]
        assert planned[6:] == ["256", "num_qo_heads", "num_ctas", "causal"]
        paths = {"0.6.1": "mla.py", "0.7.2.post1": "mla/_batch_mla/_backends/cutlass_backend.py"}
        latent = given_to(package / paths.get(version, "mla/_core.py"), "cutlass_mla_paged_attention")
        assert latent
        scale = [] if version == "0.6.1" else ["output_scale"]  # that release is refused
        for arguments in latent:
            workspace, out, lse, q, cache, *rest = (name.rpartition("_")[2] for name in arguments)
            assert (workspace, out, lse) == ("buffer", "out", "lse")
            assert (q, cache) in (("pe", "cache"), ("query", "cache"))
            assert rest == ["len", "table", *(name.rpartition("_")[2] for name in scale)]

    def test_rows_of_weights_are_shuffled_in_this_order(self, version) -> None:
        """The functions of the library, cut out of a file that cannot be imported here."""
        tree = ast.parse((wheel("flashinfer-python", version) / "flashinfer/utils.py").read_text())
        maps = ("srcToDstBlk16RowMap", "srcToDstBlk32RowMap")
        functions = ("get_shuffle_block_size", "get_shuffle_matrix_a_row_indices")
        parts = [
            item
            for item in tree.body
            if (isinstance(item, ast.FunctionDef) and item.name in functions)
            or (isinstance(item, ast.Assign) and getattr(item.targets[0], "id", "") in maps)
        ]
        assert len(parts) == 4
        space = {"torch": torch}
        exec(compile(ast.Module(parts, []), "flashinfer/utils.py", "exec"), space)
        numbers = torch.arange(384)[:, None]
        order = space["get_shuffle_matrix_a_row_indices"](numbers, 128)
        assert torch.equal(numbers[order], shuffled(numbers))

    def test_products_of_float4_and_mxfp8_have_the_backends_that_are_requested(self, version) -> None:
        source = (wheel("flashinfer-python", version) / "flashinfer/gemm/gemm_base.py").read_text()
        bodies = {name: source.partition(f"\ndef {name}(")[2].partition("\n@")[0] for name in ("mm_fp4", "mm_mxfp8")}
        for backend in ("cutlass", "trtllm", "cudnn"):
            assert f'"{backend}": lambda' in bodies["mm_fp4"]
        assert ('"cudnn": lambda' in bodies["mm_mxfp8"]) == (version in ("0.6.18.post1", "0.7.2.post1"))

    def test_products_have_the_runners_that_are_requested(self, version) -> None:
        source = (wheel("flashinfer-python", version) / "flashinfer/gemm/gemm_base.py").read_text()
        for runner in ("cublas", "cudnn", "cutlass_sm10x"):
            assert f'if "{runner}" in runner_names' in source or f'"{runner}": lambda' in source

    def test_no_release_looks_at_the_shape_of_the_scales_of_rows(self, version) -> None:
        """They are given as the kernel reads them, which is not as the documentation has them."""
        source = (wheel("flashinfer-python", version) / "flashinfer/gemm/gemm_base.py").read_text()
        body = source.partition("def fp8_blockscale_gemm_sm90(")[2].partition("\ndef ")[0]
        assert "input_scale.dtype" in body
        assert "input_scale.shape" not in body


def body_of(path: Path, *functions: str) -> str:
    """The source of functions of a file that has them, without docstrings and comments."""
    tree = ast.parse(path.read_text())
    return "\n".join(
        ast.unparse(item) for item in tree.body if isinstance(item, ast.FunctionDef) and item.name in functions
    )


def functions(version: str, path: str, *names: str) -> dict[str, Any]:
    """Functions and tables of a file of the library, run without what surrounds them."""
    tree = ast.parse((wheel("flashinfer-python", version) / "flashinfer" / path).read_text())
    found: dict[str, Any] = {"torch": torch, "Union": Union, "Optional": Optional}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node
        if getattr(target, "id", getattr(target, "name", None)) in names:
            node.decorator_list = []  # type: ignore[attr-defined]
            exec(compile(ast.Module([node], []), path, "exec"), found)
    return found


ROWS = ("srcToDstBlk16RowMap", "srcToDstBlk32RowMap", "get_shuffle_block_size", "get_shuffle_matrix_a_row_indices")
IN_TURN = "get_reorder_rows_for_gated_act_gemm_row_indices"


@pytest.mark.parametrize("version", VERSIONS)
class TestLayoutsOfExperts:
    """What packs weights against the library's own functions, as far as those need no GPU."""

    def test_rows_are_shuffled_as_the_library_shuffles_them(self, version) -> None:
        indices = functions(version, "utils.py", *ROWS)["get_shuffle_matrix_a_row_indices"]
        rows = torch.arange(3 * 128 * 5).view(3, 128, 5)
        want = torch.stack([of[indices(of, 128)] for of in rows])
        assert torch.equal(layouts.shuffled(rows), want)
        assert torch.equal(layouts.unshuffled(want), rows)

    def test_gate_and_up_are_in_turn_as_in_the_library(self, version) -> None:
        """Which has up before gate where it begins."""
        indices = functions(version, "fused_moe/core.py", IN_TURN)[IN_TURN]
        rows = torch.arange(3 * 64 * 5).view(3, 64, 5)
        want = torch.stack([torch.cat([of[32:], of[:32]])[indices(of)] for of in rows])
        assert torch.equal(layouts.in_turn(rows), want)
        assert torch.equal(layouts.one_after_the_other(want), rows)

    def test_k_is_in_blocks_as_in_the_library(self, version) -> None:
        convert = functions(version, "fused_moe/core.py", "convert_to_block_layout")["convert_to_block_layout"]
        rows = torch.arange(3 * 32 * 256, dtype=torch.int64).to(torch.uint8).view(3, 32, 256)
        want = torch.stack([convert(of, 128) for of in rows])
        assert torch.equal(layouts.in_blocks(rows), want)
        assert torch.equal(layouts.out_of_blocks(want), rows)

    def test_scales_for_sm_90_are_folded_as_in_the_library(self, version) -> None:
        if version not in MOVED_BEHIND:
            pytest.skip("the kernel wants scales otherwise in older releases, which its record refuses")
        name = "interleave_moe_scales_for_sm90_mixed_gemm"
        fold = functions(version, "fused_moe/prepare.py", name)[name]
        scale = torch.randint(0, 256, (3, 128, 12), dtype=torch.uint8)
        assert torch.equal(mixed.folded(scale), fold(scale))
        assert torch.equal(mixed.unfolded(fold(scale)), scale)

    def test_numbers_that_are_given_for_names(self, version) -> None:
        if version not in MOVED_BEHIND:
            pytest.skip("older releases are refused")
        source = (wheel("flashinfer-python", version) / "flashinfer/tllm_enums.py").read_text()
        assert f"BlockMajorK = {BLOCK_MAJOR_K}" in source
        assert f"Renormalize = ({RENORMALIZE},)" in source
        assert f"MxFp8 = {MXFP8}" in source


def test_codes_for_sm_90_are_interleaved_as_the_library_s_kernel_does() -> None:
    """Held against a transcription of it, bit by bit; `tests/gpu` holds it against the kernel."""
    codes = torch.randint(0, 256, (2, 48, 96), dtype=torch.uint8)
    assert torch.equal(codes_in_order(mixed.interleaved(codes)), codes)
    assert torch.equal(mixed.deinterleaved(mixed.interleaved(codes)), codes)
    bits = sorted(far for of in BITS for far in of)
    assert bits == list(range(32))


def parameters(path: Path, function: str) -> tuple[str, ...]:
    """Of a function inside another."""
    tree = ast.parse(path.read_text())
    found = next(item for item in ast.walk(tree) if isinstance(item, ast.FunctionDef) and item.name == function)
    return tuple(argument.arg for argument in found.args.args)


def given_to(path: Path, method: str, within: str | None = None) -> list[list[str]]:
    """What each call of a method is given, as it is written, in a file or in one of its functions."""
    tree: ast.AST = ast.parse(path.read_text())
    if within is not None:
        tree = next(item for item in ast.walk(tree) if isinstance(item, ast.FunctionDef) and item.name == within)
    calls_of = [item for item in ast.walk(tree) if isinstance(item, ast.Call)]
    assert not any(item.keywords for item in calls_of if getattr(item.func, "attr", "") == method)
    return [[ast.unparse(one) for one in item.args] for item in calls_of if getattr(item.func, "attr", "") == method]


def of_adapter(name: str, constant: str = "_TAKES") -> tuple[str, ...]:
    """What an adapter says that a function takes, read without importing it, since it would import the library."""
    tree = ast.parse((Path(inspect.getfile(calls)).parent / f"{name}.py").read_text())
    said = next(
        item.value
        for item in tree.body
        if isinstance(item, ast.Assign) and getattr(item.targets[0], "id", "") == constant
    )
    return tuple(ast.literal_eval(said))


def _module_names(constraint: object) -> tuple[str, ...]:
    """Of a problem on an sm_100."""
    if not isinstance(constraint, Module):
        return ()
    return constraint.names(Fp4GemmProblem(device=simulated("B200")))


def test_an_older_release_is_refused_by_its_version() -> None:
    assert not fits("0.5.3", PACKAGE.versions)
    assert not fits("0.8.0", PACKAGE.versions)


def test_every_call_of_the_table_is_in_a_record() -> None:
    folder = Path(inspect.getfile(calls)).parent
    held = "".join(
        path.read_text() for name in ("__init__", "kernels", "requirements") for path in folder.rglob(f"{name}.py")
    )
    for name, value in vars(calls).items():
        if value in (*calls.CALLS, *calls.NEWER):
            assert f"calls.{name}" in held, f"{name} is held by no record"


def test_a_real_wheel_with_a_shifted_parameter_keeps_the_kernel_from_being_chosen(tmp_path, monkeypatch) -> None:
    """The wheel's own source, one parameter put before the others: told when asked, never by a call that fails."""
    shutil.copytree(wheel("flashinfer-python", "0.6.18.post1"), tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    source = tmp_path / "site" / "flashinfer" / "concat_ops.py"

    def decision() -> Decision:
        ask = {"backend": "flashinfer", "machine": Machine()}
        selection = kernelhub.explain("concat_mla_k", device="H200", **ask)
        return next(item for item in selection.decisions if item.kernel == "flashinfer.concat")

    whole = {item.code for item in decision().rejections}
    assert "signature_changed" not in whole
    text = source.read_text()
    assert "def concat_mla_k(\n    k: torch.Tensor," in text
    source.write_text(text.replace("def concat_mla_k(\n    k:", "def concat_mla_k(\n    stream: int,\n    k:"))
    told = decision()
    assert not told.accepted
    assert {item.code for item in told.rejections} == {*whole, "signature_changed"}
    told = next(item for item in told.rejections if item.code == "signature_changed")
    assert "has stream as argument 1, where k was" in told.reason
    assert "flashinfer" not in sys.modules
