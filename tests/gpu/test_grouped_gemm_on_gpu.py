"""What only a GPU can show of grouped products: graphs, syncs, real sizes, offsets beyond 2^31, torch's own kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.gemm.grouped.grouped import grouped_gemm_kernel
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import GraphLevel
from kernelhub.ops.gemm.grouped.inputs import PAIRS, grouped_gemm_inputs
from kernelhub.ops.gemm.grouped.tolerance import error_allowed
from kernelhub.ops.models.shapes import GROUPED
from tests.contract.grouped_gemm import GroupedGemmContract
from tests.gpu.test_attention_on_gpu import captured

pytestmark = pytest.mark.gpu

FORMATS = ("bfloat16", "float16", "float32", "tensor", "channel", "block", "nvfp4", "mxfp4", *PAIRS)


class TestGroupedMm(GroupedGemmContract):
    """torch's kernel runs on sm_90 and sm_10x only."""

    kernel = "torch.grouped_mm"
    formats = ("bfloat16",)
    takes_masked = False

    @pytest.fixture(autouse=True)
    def able(self) -> None:
        selection = kernelhub.explain("grouped_gemm", device="cuda", backend=self.kernel)
        if selection.selected is None:
            pytest.skip(f"torch's grouped kernel does not run on {selection.problem.device}")


class TestScaledGroupedMm(TestGroupedMm):
    """torch's kernel of float8 runs on sm_90 only."""

    kernel = "torch.scaled_grouped_mm"
    formats = ("tensor", "channel")

    @pytest.fixture(autouse=True)
    def able(self) -> None:
        scales = {"a_dtype": "float8_e4m3fn", "a_scale": "token", "b_scale": "channel"}
        selection = kernelhub.explain("grouped_gemm", device="cuda", backend=self.kernel, **scales)
        if selection.selected is None:
            pytest.skip(f"torch's grouped kernel does not run on {selection.problem.device}")


def inputs(**changes: Any) -> dict[str, Any]:
    return grouped_gemm_inputs(**{"device": "cuda", "spare": 0} | changes)


def agrees(out: torch.Tensor, arguments: dict[str, Any]) -> None:
    want = kernelhub.grouped_gemm.reference(**arguments, dtype=torch.float64)
    live = ~want.isnan()
    allowed = error_allowed(arguments, want, out.dtype, tensor_cores=True)
    assert bool(((out.double() - want).abs() <= allowed)[live].all())


class TestGraphs:
    def test_the_kernels_captured_below_claim_to_be(self) -> None:
        _ = HUB.settings
        records = {kernel.name: kernel.graph for kernel in HUB.registry.candidates("grouped_gemm").kernels}
        assert records["triton.grouped"] is records["torch.grouped_mm"] is GraphLevel.FULL
        assert records["torch.per_group"] is GraphLevel.NONE

    @pytest.mark.parametrize("format", FORMATS)
    def test_a_captured_call_reads_the_offsets_of_each_replay(self, format: str) -> None:
        arguments = inputs(sizes=(40, 0, 7, 13), format=format)
        out = torch.zeros(60, 192, device="cuda", dtype=kernelhub.grouped_gemm(**arguments).dtype)
        graph = captured(lambda: kernelhub.grouped_gemm(**arguments, out=out, backend="triton"))
        for ends in ((0, 0, 60, 60), (15, 30, 45, 58), (60, 60, 60, 60)):
            arguments["offsets"].copy_(torch.tensor(ends))
            out.fill_(torch.nan)
            graph.replay()
            agrees(out, arguments)
            assert out[: ends[-1]].isfinite().all()
            assert out[ends[-1] :].isnan().all()

    @pytest.mark.parametrize("format", ["bfloat16", "block", "mxfp4"])
    def test_a_captured_masked_call_reads_the_sizes_of_each_replay(self, format: str) -> None:
        arguments = inputs(sizes=(30, 30, 30), format=format, masked=True)
        out = torch.zeros(3, 30, 192, device="cuda", dtype=kernelhub.grouped_gemm(**arguments).dtype)
        graph = captured(lambda: kernelhub.grouped_gemm(**arguments, out=out))
        for sizes in ((0, 30, 1), (17, 0, 16), (0, 0, 0)):
            arguments["group_sizes"].copy_(torch.tensor(sizes))
            out.fill_(torch.nan)
            graph.replay()
            agrees(out, arguments)
            for group, size in enumerate(sizes):
                assert out[group, :size].isfinite().all()
                assert out[group, size:].isnan().all()

    def test_the_chosen_bfloat16_kernel_is_captured(self) -> None:
        arguments = inputs(sizes=(40, 0, 7, 13))
        out = torch.zeros(60, 192, device="cuda", dtype=torch.bfloat16)
        graph = captured(lambda: kernelhub.grouped_gemm(**arguments, out=out))
        arguments["offsets"].copy_(torch.tensor((10, 20, 20, 55)))
        arguments["a"].normal_()
        out.fill_(torch.nan)
        graph.replay()
        agrees(out, arguments)
        assert out[55:].isnan().all()


class TestSyncs:
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("format", FORMATS)
    def test_no_call_waits_for_the_gpu(self, format: str, masked: bool) -> None:
        arguments = inputs(sizes=(40, 0, 7), format=format, masked=masked, bias=True)
        kernelhub.grouped_gemm(**arguments)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = kernelhub.grouped_gemm(**arguments)
            kernelhub.grouped_gemm(**arguments, out=out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        agrees(out, arguments)


class TestVariants:
    def test_other_numbers_of_rows_compile_one_kernel_per_size_of_tile(self) -> None:
        def compiled() -> int:
            return len(grouped_gemm_kernel.device_caches[torch.cuda.current_device()][0])

        for sizes in ((3, 4), (30, 20), (200, 150)):  # tiles of 16, 64 and 128 rows
            kernelhub.grouped_gemm(**inputs(sizes=sizes, n=320), backend="triton")
        before = compiled()
        for sizes in ((1, 0), (5, 11), (33, 31), (64, 60), (400, 1), (1000, 900)):
            arguments = inputs(sizes=sizes, n=320)
            agrees(kernelhub.grouped_gemm(**arguments, backend="triton"), arguments)
        assert compiled() == before

    def test_calls_that_differ_in_what_triton_compiles_for_do_not_meet(self) -> None:
        base = inputs(sizes=(20, 5), bias=True)
        shifted = torch.empty(base["a"].numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view_as(base["a"])
        wide = torch.empty(25, 264, dtype=torch.bfloat16, device="cuda")[:, :256]
        flipped = base["b"].transpose(1, 2).contiguous().transpose(1, 2)
        calls = [
            {},
            {"a": shifted.copy_(base["a"])},
            {"a": wide.copy_(base["a"])},
            {"b": flipped},
            {"bias": base["bias"].float()},
            {"bias": base["bias"].half()},
        ]
        for change in (*calls, *reversed(calls)):
            arguments = base | change
            agrees(kernelhub.grouped_gemm(**arguments, backend="triton"), arguments)


class TestRealSizes:
    """One layer's experts at real widths: fewer experts than there are, so that the reference fits."""

    @pytest.mark.parametrize("rows", [1, 40, 300], ids=lambda rows: f"{rows} rows of a group")
    @pytest.mark.parametrize("model", GROUPED.values(), ids=lambda model: model.name)
    def test_the_chosen_kernel_agrees(self, model, rows: int) -> None:
        sizes = (rows, 0, 2 * rows + 1)
        for n, k in (model.w13, model.w2):
            arguments = inputs(sizes=sizes, n=n, k=k, format=model.format, bias=model.bias)
            agrees(kernelhub.grouped_gemm(**arguments), arguments)
            agrees(kernelhub.grouped_gemm(**arguments, backend="triton"), arguments)

    @pytest.mark.parametrize("format", ["tensor", "channel", "nvfp4"])
    def test_formats_that_no_model_above_has(self, format: str) -> None:
        for rows in (5, 200):
            arguments = inputs(sizes=(rows, 0, rows + 7), n=4096, k=7168, format=format)
            agrees(kernelhub.grouped_gemm(**arguments), arguments)


class TestMemory:
    """Offsets beyond 2^31 elements, each array made so that a 32-bit offset would read or write elsewhere."""

    def test_weights_beyond_two_to_the_31_elements(self) -> None:
        groups, n, k = 80, 4096, 7168
        weights = torch.zeros(groups, n, k, dtype=torch.bfloat16, device="cuda")
        assert weights.numel() > 1 << 31
        small = inputs(sizes=(9, 20), n=n, k=k)
        weights[3], weights[groups - 1] = small["b"][0], small["b"][1]
        ends = torch.zeros(groups, dtype=torch.int32, device="cuda")
        ends[3:] = 9
        ends[groups - 1] = 29
        out = kernelhub.grouped_gemm(small["a"], weights, offsets=ends, backend="triton")
        agrees(out, small)

    def test_rows_beyond_two_to_the_31_elements(self) -> None:
        rows, n, k = 310_000, 128, 7168
        a = torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda")
        assert a.numel() > 1 << 31
        small = inputs(sizes=(9, 20), n=n, k=k)
        a[:9], a[-20:] = small["a"][:9], small["a"][9:]
        ends = torch.tensor((9, rows - 20, rows), dtype=torch.int32, device="cuda")
        weights = torch.stack([small["b"][0], torch.zeros_like(small["b"][0]), small["b"][1]])
        out = kernelhub.grouped_gemm(a, weights, offsets=ends, backend="triton")
        agrees(torch.cat([out[:9], out[-20:]]), small)
        assert not out[9:-20].any()
