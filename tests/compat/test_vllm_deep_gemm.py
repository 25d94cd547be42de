"""kernelhub behind the names of ``vllm.utils.deep_gemm``: which copy, on which device, with which scales."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import kernelhub
from kernelhub.compat.vllm import deep_gemm as dg
from kernelhub.compat.vllm.deep_gemm import calls, indexer
from kernelhub.compat.vllm.deep_gemm.support import copy
from kernelhub.errors import KernelUnavailable

SOURCE = """
seen = []
state = {"sms": 132, "alignment": 128}
def fp8_gemm_nt(*args, **kwargs): seen.append(("fp8_gemm_nt", args, kwargs))
def m_grouped_fp8_gemm_nt_masked(*args, **kwargs): seen.append(("masked", args, kwargs))
def m_grouped_fp8_gemm_nt_contiguous(*args, **kwargs): seen.append(("contiguous", args, kwargs))
def set_pdl(on): seen.append(("set_pdl", on))
def get_num_sms(): return state["sms"]
def set_num_sms(sms): state["sms"] = sms
def get_mk_alignment_for_contiguous_layout(): return state["alignment"]
def set_mk_alignment_for_contiguous_layout(value): state["alignment"] = value
def get_theoretical_mk_alignment_for_contiguous_layout(rows, groups=None): return (rows, groups or 1)[0]
def get_paged_mqa_logits_metadata(lens, block, slots, **more): return (slots, more)
def fp8_fp4_paged_mqa_logits(q, kv, weights, lens, table, plan, longest, **more): return table
def bf16_mega_gate(x, weight, top_k, *, out, **more):
    out[0].fill_(7); out[1].fill_(0.5)
"""
SPARSE = "\n".join(
    f"def {name}(*a, **k): ..."
    for name in (
        *("fp8_fp4_sparse_mqa_logits", "fp8_fp4_paged_sparse_mqa_logits", "get_sparse_mqa_logits_metadata"),
        "get_paged_sparse_mqa_logits_metadata",
    )
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a DeepGEMM at a module path."""

    def put(module: str = "deep_gemm", source: str = SOURCE, *, headers: bool = True) -> None:
        folder = tmp_path.joinpath(*module.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_C.cpython-312.so").touch()
        if headers:
            (folder / "include" / "deep_gemm").mkdir(parents=True, exist_ok=True)
        for parent in folder.relative_to(tmp_path).parents:
            if parent.name:
                (tmp_path / parent / "__init__.py").write_text("")
        (folder / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        kernelhub.reload()

    kernelhub.reload()
    calls._functions.clear()
    calls._prepared.clear()
    yield put
    for name in [name for name in sys.modules if name.split(".")[0] in ("deep_gemm", "vllm")]:
        del sys.modules[name]
    calls._functions.clear()
    calls._prepared.clear()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch):
    def be(sm: tuple[int, int] | None) -> None:
        for module in ("here", "deep_gemm.support", "deep_gemm.calls", "deep_gemm.indexer"):
            monkeypatch.setattr(f"kernelhub.compat.vllm.{module}.capability", lambda: sm)

    return be


class TestCopies:
    def test_none_is_a_no_with_a_remedy_and_a_call_an_error(self, install) -> None:
        assert not dg.has_deep_gemm()
        assert dg.has_deep_gemm.why().remedy == 'pip install "kernelhub[deep-gemm]"'
        with pytest.raises(RuntimeError, match="deep_gemm is not installed"):
            dg.fp8_gemm_nt()

    def test_the_one_in_vllm_s_wheel_is_found_without_importing_vllm(self, install, device) -> None:
        install("vllm.third_party.deep_gemm")
        device((9, 0))
        assert copy().value == "vllm.third_party.deep_gemm"
        assert dg.is_deep_gemm_supported()
        assert "vllm" not in sys.modules
        assert dg.get_num_sms() == 132

    def test_an_installed_one_comes_first(self, install) -> None:
        install("vllm.third_party.deep_gemm")
        install("deep_gemm")
        assert copy().value == "deep_gemm"

    def test_one_without_headers_is_none_though_it_imports(self, install, device) -> None:
        """As deep-gemm 1.0.0 of the index."""
        device((9, 0))
        install("deep_gemm", headers=False)
        assert not dg.has_deep_gemm()
        assert not dg.is_deep_gemm_supported()
        why = dg.is_deep_gemm_supported.why()
        assert (why.code, why.remedy) == (
            "package_broken",
            'pip uninstall deep-gemm, then pip install "kernelhub[deep-gemm]"',
        )
        assert "has no include/deep_gemm" in why.reason
        install("vllm.third_party.deep_gemm", headers=False)
        assert not dg.has_deep_gemm()
        install("vllm.third_party.deep_gemm")
        assert copy().value == "vllm.third_party.deep_gemm"
        assert dg.get_num_sms() == 132

    def test_whatever_its_import_raises_is_a_reason_and_is_not_remembered(self, install, tmp_path) -> None:
        install(source="raise AssertionError('CUDA_HOME is not set')\n")
        assert dg.has_deep_gemm()
        with pytest.raises(KernelUnavailable, match="AssertionError: CUDA_HOME is not set"):
            dg.get_num_sms()
        install()
        assert dg.get_num_sms() == 132

    def test_a_function_that_it_lacks_is_named(self, install) -> None:
        install()
        with pytest.raises(KernelUnavailable, match="has no attribute mega_mhc"):
            dg.mega_mhc()


class TestSupport:
    @pytest.mark.parametrize(
        ("sm", "answer"),
        [
            ((9, 0), True),
            ((10, 0), True),
            ((10, 3), True),
            ((12, 0), False),
            ((8, 9), False),
            ((11, 0), False),
            (None, False),
        ],
    )
    def test_devices(self, install, device, sm, answer) -> None:
        install()
        device(sm)
        assert dg.is_deep_gemm_supported() is answer

    def test_sm_120_came_with_2_8(self, install, device) -> None:
        device((12, 0))
        install()
        assert "older than 2.8" in dg.is_deep_gemm_supported.why().reason
        assert not dg.has_deep_gemm_sparse_mqa()
        install(source=SOURCE + SPARSE)
        assert dg.is_deep_gemm_supported()
        assert dg.has_deep_gemm_sparse_mqa()

    def test_the_reason_is_what_keeps_it_off(self, install, device, monkeypatch) -> None:
        install()
        device((9, 0))
        monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
        kernelhub.reload()
        assert dg.is_deep_gemm_supported.why().reason == "disabled by VLLM_USE_DEEP_GEMM"
        assert dg.has_deep_gemm()

    @pytest.mark.parametrize(
        ("sm", "e8m0", "format"),
        [
            ((9, 0), "1", "FLOAT32_CEIL_UE8M0"),
            ((10, 0), "1", "UE8M0"),
            ((9, 0), "0", "FLOAT32"),
            ((10, 0), "0", "FLOAT32"),
            ((8, 0), "1", "FLOAT32"),
        ],
    )
    def test_format_of_scales(self, install, device, monkeypatch, sm, e8m0, format) -> None:
        install()
        device(sm)
        monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", e8m0)
        kernelhub.reload()
        assert dg.DeepGemmQuantScaleFMT.from_oracle().name == format
        assert dg.is_deep_gemm_e8m0_used() is (format != "FLOAT32")

    @pytest.mark.parametrize(
        ("dtype", "shape", "takes"),
        [
            (torch.bfloat16, (64, 128), True),
            (torch.float16, (64, 128), False),
            (torch.bfloat16, (96, 128), False),
            (torch.bfloat16, (64, 64), False),
        ],
    )
    def test_which_products_it_takes(self, dtype, shape, takes) -> None:
        assert dg.should_use_deepgemm_for_fp8_linear(dtype, shape, True) is takes
        assert not dg.should_use_deepgemm_for_fp8_linear(dtype, shape, False)

    def test_models_that_it_hurts(self, device) -> None:
        device((10, 0))
        assert dg.should_auto_disable_deep_gemm("qwen3_5_text")
        assert not dg.should_auto_disable_deep_gemm("kolibri1")
        assert not dg.should_auto_disable_deep_gemm(None)
        device((9, 0))
        assert not dg.should_auto_disable_deep_gemm("qwen3_5_text")


class TestCalls:
    def test_products_receive_the_rounding_of_scales(self, install, device, monkeypatch) -> None:
        install()
        device((9, 0))
        dg.fp8_gemm_nt(1, 2)
        dg.fp8_gemm_nt(1, 2, is_deep_gemm_e8m0_used=False)
        dg.fp8_m_grouped_gemm_nt_masked(3, expected_m=4)
        seen = sys.modules["deep_gemm"].seen
        assert seen == [
            ("set_pdl", True),
            ("fp8_gemm_nt", (1, 2), {"disable_ue8m0_cast": False}),
            ("fp8_gemm_nt", (1, 2), {"disable_ue8m0_cast": True}),
            ("masked", (3,), {"expected_m": 4, "disable_ue8m0_cast": False}),
        ]
        monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "0")
        kernelhub.reload()
        dg.m_grouped_fp8_gemm_nt_contiguous(5)
        assert seen[-1] == ("contiguous", (5,), {"disable_ue8m0_cast": True})

    def test_the_older_spelling_is_found(self, install) -> None:
        install(source="def fp8_m_grouped_gemm_nt_masked(*a, disable_ue8m0_cast): return a\n")
        assert dg.fp8_m_grouped_gemm_nt_masked(1) == (1,)

    def test_the_environment_stays_as_it_is(self, install) -> None:
        import os

        before = dict(os.environ)
        install()
        dg.get_num_sms()
        assert dict(os.environ) == before

    def test_alignment_is_put_back(self, install) -> None:
        install()
        inside = []

        def fail() -> None:
            with dg.mk_alignment_scope(64):
                inside.append(dg.get_mk_alignment_for_contiguous_layout())
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert inside == [[64, 64]]
        assert dg.get_mk_alignment_for_contiguous_layout() == [128, 128]

    def test_alignment_for_so_many_rows(self, install) -> None:
        install()
        assert dg.get_theoretical_mk_alignment_for_contiguous_layout(100, 3) == 100
        with pytest.raises(ValueError, match="num_groups is 0"):
            dg.get_theoretical_mk_alignment_for_contiguous_layout(100, 0)
        install(source="def get_theoretical_mk_alignment_for_contiguous_layout(rows): return rows\n")
        sys.modules.pop("deep_gemm")
        calls._functions.clear()
        assert dg.get_theoretical_mk_alignment_for_contiguous_layout(100, 3) == 34

    def test_the_gate_gives_weights_then_ids(self, install) -> None:
        install()
        weights, ids = dg.bf16_mega_gate(
            torch.zeros(3, 8), torch.zeros(16, 8), 2, scoring_func="softmax", routed_scaling_factor=1.0, ep_rank=0
        )
        assert (weights.dtype, ids.dtype, weights.shape) == (torch.float32, torch.int64, (3, 2))
        assert (weights.unique().tolist(), ids.unique().tolist()) == ([0.5], [7])


class TestIndexer:
    @pytest.mark.parametrize(("sm", "next_n", "slots"), [((9, 0), 4, 66), ((9, 0), 2, 132), ((10, 0), 4, 132)])
    def test_work_is_divided_among_pairs_on_hopper(self, install, device, sm, next_n, slots) -> None:
        install()
        device(sm)
        lens = torch.ones(3, next_n, dtype=torch.int32)
        assert dg.get_paged_mqa_logits_metadata(lens, 64, 132) == (slots, {})
        assert dg.get_paged_mqa_logits_metadata(lens, 64, 132, lens)[1].keys() == {"indices"}

    def test_tables_have_stride_1(self, install) -> None:
        install()
        one = torch.zeros(1, 3, dtype=torch.int32).t()
        assert one.stride(-1) != 1
        table = dg.fp8_fp4_paged_mqa_logits((one, None), one, one, one, one, one, 8)
        assert table.stride(-1) == 1
        assert table.shape == one.shape

    def test_devices_differ(self, device) -> None:
        device((12, 0))
        assert dg.get_paged_mqa_page_sizes() == (64,)
        assert dg.native_next_n_supported(3)
        device((9, 0))
        assert dg.get_paged_mqa_page_sizes() == (32, 64)
        assert [n for n in range(1, 6) if dg.native_next_n_supported(n)] == [1, 2, 4]

    def test_scales_of_ones_where_they_are_folded_into_the_weights(self, device, monkeypatch) -> None:
        monkeypatch.setattr(indexer, "_ones", {})
        q, weights = torch.zeros(2, 3, 8), torch.ones(2, 3)
        device((9, 0))
        assert dg.mqa_logits_mx_inputs(q, None, weights) == (None, weights)
        device((10, 0))
        scale, half = dg.mqa_logits_mx_inputs(q, None, weights)
        assert (scale.shape, scale.dtype, half.dtype) == ((2, 3), torch.int32, torch.bfloat16)
        assert scale.view(torch.uint8).unique().tolist() == [127]  # 2 ** 0
        older = scale.data_ptr()
        wider, _ = dg.mqa_logits_mx_inputs(torch.zeros(50, 3, 8), None, weights)
        assert wider.shape == (50, 3)
        assert any(buffer.data_ptr() == older for buffer in indexer._ones[q.device])


class TestCasts:
    @pytest.mark.parametrize(("m", "n"), [(128, 128), (130, 300), (1, 1)])
    @pytest.mark.parametrize("powers", [False, True])
    def test_blocks_come_back_within_half_a_step(self, m, n, powers) -> None:
        x = torch.randn(m, n) * 3
        codes, scales = dg.per_block_cast_to_fp8(x, use_ue8m0=powers)
        assert (codes.shape, scales.shape) == (x.shape, (-(-m // 128), -(-n // 128)))
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:m, :n]
        # e4m3 has 3 bits of mantissa: half a step is 2**-4 of a normal number, and 2**-10 scales below the least.
        bound = torch.maximum(x.abs() * 2**-4, wide * 2**-10) * 1.001
        assert ((codes.float() * wide - x).abs() <= bound).all()
        if powers:
            assert torch.equal(torch.exp2(torch.log2(scales).round()), scales)

    def test_a_block_of_zeros_has_a_scale(self) -> None:
        codes, scales = dg.per_block_cast_to_fp8(torch.zeros(128, 128))
        assert codes.float().abs().max() == 0
        assert scales.item() == pytest.approx(1e-4 / 448)

    def test_likeness(self) -> None:
        x = torch.randn(100)
        assert dg.calc_diff(x, x) == pytest.approx(0.0, abs=1e-12)
        assert dg.calc_diff(x, -x) == pytest.approx(2.0)
        assert dg.calc_diff(x, 1.1 * x) == pytest.approx(1 - 2.2 / 2.21)

    @pytest.mark.parametrize(("x", "size", "aligned"), [(1, 4, 4), (4, 4, 4), (5, 4, 8), (17, 1, 32), (8, 2, 8)])
    def test_sizes_for_the_tensor_memory_accelerator(self, x, size, aligned) -> None:
        assert dg.get_tma_aligned_size(x, size) == aligned
