"""What only a GPU can show of float8 products: torch's operators, graphs, syncs, real sizes, offsets of 64 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.gemm.finish import finish_kernel
from kernelhub.backends.triton.gemm.fp8.decode import decode_kernel
from kernelhub.backends.triton.gemm.fp8.product import add_parts_kernel, product_kernel
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import GraphLevel
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.ops.models.shapes import ABSORBED, FP8_LAYERS
from tests.contract.fp8_gemm import Fp8GemmContract
from tests.gpu.test_attention_on_gpu import captured

pytestmark = pytest.mark.gpu

TRITON = "triton.fp8_gemm"
SCALINGS = ("tensor", "row", "block", "row_block", "mx")
TORCH = {"torch.scaled_mm": "tensor", "torch.scaled_mm_rowwise": "row", "torch.scaled_mm_blockwise": "block"}


def able(kernel: str, arguments: dict[str, Any]) -> bool:
    return kernelhub.fp8_gemm.explain(**arguments, backend=kernel).selected is not None


def agrees(out: torch.Tensor, arguments: dict[str, Any]) -> None:
    agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=True)
    assert agreement.ok, str(agreement)


class TestScaledMm(Fp8GemmContract):
    kernel = "torch.scaled_mm"
    plain = {"scaling": "tensor", "n": 192, "k": 256}  # noqa: RUF012


class TestScaledMmRowwise(TestScaledMm):
    kernel = "torch.scaled_mm_rowwise"
    plain = {"scaling": "row", "n": 192, "k": 256}  # noqa: RUF012


class TestScaledMmBlockwise(TestScaledMm):
    kernel = "torch.scaled_mm_blockwise"
    plain = {"scaling": "block", "n": 192, "k": 256}  # noqa: RUF012
    takes_bias = False


class TestChoice:
    def test_the_selected_kernel_runs_and_is_right_for_layers_of_real_models(self) -> None:
        for layer in FP8_LAYERS.values():
            if layer.n * layer.k <= 1 << 26:
                arguments = fp8_gemm_inputs(tokens=48, n=layer.n, k=layer.k, scaling=layer.scaling, device="cuda")
                selection = kernelhub.fp8_gemm.explain(**arguments)
                assert selection.selected != "torch.dequantized", str(selection)
                agrees(kernelhub.fp8_gemm(**arguments), arguments)

    def test_what_is_captured_below_claims_to_be(self) -> None:
        _ = HUB.settings
        records = {kernel.name: kernel for kernel in HUB.registry.candidates("fp8_gemm").kernels}
        assert all(records[name].graph is GraphLevel.FULL for name in (TRITON, *TORCH, "torch.dequantized"))


class TestNumbers:
    @pytest.mark.parametrize("scaling", SCALINGS)
    @pytest.mark.parametrize("tokens", [1, 16, 17, 33, 64, 65, 200, 1000, 4096])
    def test_triton_is_right_at_real_sizes(self, tokens: int, scaling: str) -> None:
        """K of DeepSeek's and few columns, so that K is split; and a wide layer, so that it is not."""
        for n, k in ((576, 7168), (4608, 2304)):
            arguments = fp8_gemm_inputs(tokens=tokens, n=n, k=k, scaling=scaling, bias=True, device="cuda")
            agrees(kernelhub.fp8_gemm(**arguments, backend=TRITON), arguments)

    @pytest.mark.parametrize(("kernel", "scaling"), TORCH.items())
    def test_torch_s_operators_are_right_at_real_sizes(self, kernel: str, scaling: str) -> None:
        for tokens in (1, 3, 64, 1000):
            for per_row in ((True, True), (True, False), (False, True)) if scaling == "row" else ((True, True),):
                for n, k in ((1536, 7168), (576, 2304)):  # of 18 blocks of K, whole fours would be 20
                    arguments = fp8_gemm_inputs(
                        tokens=tokens,
                        n=n,
                        k=k,
                        scaling=scaling,
                        per_row=per_row,
                        bias=scaling != "block",
                        device="cuda",
                    )
                    if able(kernel, arguments):
                        agrees(kernelhub.fp8_gemm(**arguments, backend=kernel), arguments)

    @pytest.mark.parametrize("scaling", SCALINGS)
    def test_activations_in_e5m2_are_right_at_real_sizes(self, scaling: str) -> None:
        for tokens, n, k in ((1, 576, 7168), (64, 4608, 2304), (1000, 4608, 2304)):
            arguments = fp8_gemm_inputs(tokens=tokens, n=n, k=k, scaling=scaling, e5m2=True, device="cuda")
            agrees(kernelhub.fp8_gemm(**arguments, backend=TRITON), arguments)
            agrees(kernelhub.fp8_gemm(**arguments), arguments)

    def test_long_sums_do_not_drift(self) -> None:
        """Terms of one sign, which instructions that cut off would make too small: sums go to float32 every 128."""
        k = 16384
        a = torch.full((70, k), 1.125, device="cuda").to(E4M3)
        b = torch.full((128, k), 1.375, device="cuda").to(E4M3)
        one = torch.ones((), device="cuda")
        for rows in (1, 16, 70):
            out = kernelhub.fp8_gemm(a[:rows], b, one, one, out_dtype=torch.float32, backend=TRITON)
            wanted = k * 1.125 * 1.375
            assert float((out - wanted).abs().max()) <= 2**-9 * wanted


class TestGraphs:
    @pytest.mark.parametrize("scaling", SCALINGS)
    def test_a_captured_call_sees_new_operands(self, scaling: str) -> None:
        for kernel in (TRITON, *TORCH, "torch.dequantized"):
            for tokens in (4, 100):
                arguments = fp8_gemm_inputs(tokens=tokens, n=512, k=4096, scaling=scaling, device="cuda")
                if not able(kernel, arguments):
                    continue
                out = torch.empty(tokens, 512, dtype=torch.bfloat16, device="cuda")
                graph = captured(lambda a=arguments, o=out, k=kernel: kernelhub.fp8_gemm(**a, out=o, backend=k))
                new = fp8_gemm_inputs(tokens=tokens, n=512, k=4096, scaling=scaling, device="cuda", seed=1)
                for name in ("a", "b", "a_scale", "b_scale"):
                    arguments[name].copy_(new[name])
                out.fill_(torch.nan)
                graph.replay()
                agrees(out, new)


class TestSyncs:
    @pytest.fixture(autouse=True)
    def no_syncs(self):
        yield
        torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("scaling", SCALINGS)
    def test_no_call_waits_and_other_sizes_compile_nothing(self, scaling: str) -> None:
        sizes = (1, 5, 16, 20, 32, 40, 64, 100, 500)
        calls = [fp8_gemm_inputs(tokens=tokens, n=640, k=2048, scaling=scaling, device="cuda") for tokens in sizes]
        again = [
            fp8_gemm_inputs(tokens=tokens + 3, n=640, k=2048, scaling=scaling, device="cuda")
            for tokens in (2, 101, 700)
        ]
        kernels = (product_kernel, add_parts_kernel, decode_kernel, finish_kernel)
        caches = [kernel.device_caches[torch.cuda.current_device()][0] for kernel in kernels]
        for arguments in calls:
            kernelhub.fp8_gemm(**arguments, backend=TRITON)
        compiled = [len(cache) for cache in caches]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for arguments in (*calls, *again):
            kernelhub.fp8_gemm(**arguments, backend=TRITON)
        torch.cuda.set_sync_debug_mode("default")
        assert [len(cache) for cache in caches] == compiled

    def test_the_default_selection_does_not_wait(self) -> None:
        for scaling in SCALINGS:
            arguments = fp8_gemm_inputs(tokens=9, n=640, k=2048, scaling=scaling, device="cuda")
            kernelhub.fp8_gemm(**arguments)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            kernelhub.fp8_gemm(**arguments)
            torch.cuda.set_sync_debug_mode("default")


class TestMemory:
    def test_weights_beyond_two_to_the_31_elements(self) -> None:
        k, n = 8192, (1 << 31) // 8192 + 300
        b = torch.zeros(n, k, dtype=torch.uint8, device="cuda").view(E4M3)
        last = fp8_gemm_inputs(tokens=20, n=256, k=k, scaling="row", device="cuda")
        b.view(torch.uint8)[-256:] = last["b"].view(torch.uint8)
        b_scale = torch.ones(n, 1, device="cuda")
        b_scale[-256:] = last["b_scale"]
        out = kernelhub.fp8_gemm(last["a"], b, last["a_scale"], b_scale, backend=TRITON)
        agrees(out[:, -256:].contiguous(), last)
        assert not out[:, :-256].any()

    def test_results_beyond_two_to_the_31_elements(self) -> None:
        m, n = (1 << 31) // 32768 + 200, 32768
        arguments = fp8_gemm_inputs(tokens=200, n=n, k=128, scaling="row", device="cuda")
        a = torch.zeros(m, 128, dtype=torch.uint8, device="cuda").view(E4M3)
        a.view(torch.uint8)[-200:] = arguments["a"].view(torch.uint8)
        a_scale = torch.ones(m, 1, device="cuda")
        a_scale[-200:] = arguments["a_scale"]
        out = kernelhub.fp8_gemm(a, arguments["b"], a_scale, arguments["b_scale"], backend=TRITON)
        agrees(out[-200:].contiguous(), arguments)


class TestVariants:
    def test_calls_that_differ_in_what_triton_compiles_for_do_not_meet(self) -> None:
        base = fp8_gemm_inputs(tokens=20, n=192, k=512, device="cuda")
        shifted = torch.empty(20 * 512 + 1, dtype=torch.uint8, device="cuda")[1:].view(E4M3).view(20, 512)
        shifted.view(torch.uint8).copy_(base["a"].view(torch.uint8))
        wide = torch.empty(20, 528, dtype=torch.uint8, device="cuda")[:, :512].view(E4M3)
        wide.view(torch.uint8).copy_(base["a"].view(torch.uint8))
        calls = [{}, {"a": shifted}, {"a": wide}, {"a_scale": base["a_scale"].t().contiguous().t()}]
        for change in (*calls, *reversed(calls)):
            agrees(kernelhub.fp8_gemm(**{**base, **change}, backend=TRITON), base)


class TestBatches:
    @pytest.mark.parametrize("name", ABSORBED)
    def test_absorbed_projections_are_right_captured_and_wait_for_nothing(self, name: str) -> None:
        projection = ABSORBED[name]
        for tokens in (1, 16, 64, 65, 500):
            how = {"batch": projection.heads, "tokens": tokens, "n": projection.n, "k": projection.k, "device": "cuda"}
            arguments = bmm_fp8_inputs(**how, b_scaling="batch")
            assert kernelhub.bmm_fp8.explain(**arguments).selected == "triton.bmm_fp8"
            out = torch.empty(tokens, projection.heads, projection.n, dtype=torch.bfloat16, device="cuda").transpose(
                0, 1
            )
            graph = captured(lambda a=arguments, o=out: kernelhub.bmm_fp8(**a, out=o))
            new = bmm_fp8_inputs(**how, b_scaling="batch", seed=1)
            for operand in ("a", "b", "a_scale", "b_scale"):
                arguments[operand].copy_(new[operand])
            out.fill_(torch.nan)
            graph.replay()
            agreement = compare(out, kernelhub.bmm_fp8.reference, new, matrix_instructions=True)
            assert agreement.ok, str(agreement)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                kernelhub.bmm_fp8(**arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def test_other_sizes_compile_nothing(self) -> None:
        compiled = set()
        cache = product_kernel.device_caches[torch.cuda.current_device()][0]
        for batch, tokens in ((8, 5), (3, 16), (128, 2), (1, 9)):
            kernelhub.bmm_fp8(**bmm_fp8_inputs(batch=batch, tokens=tokens, device="cuda"), backend="triton")
            compiled.add(len(cache))
        assert len(compiled) == 1

    def test_batches_beyond_two_to_the_31_elements(self) -> None:
        batch = (1 << 31) // (512 * 128) + 9
        b = torch.zeros(batch, 512, 128, dtype=torch.uint8, device="cuda").view(E4M3)
        last = bmm_fp8_inputs(batch=4, tokens=8, device="cuda")
        b.view(torch.uint8)[-4:] = last["b"].view(torch.uint8)
        a = torch.zeros(batch, 8, 128, dtype=torch.uint8, device="cuda").view(E4M3)
        a.view(torch.uint8)[-4:] = last["a"].view(torch.uint8)
        out = kernelhub.bmm_fp8(a, b, last["a_scale"], last["b_scale"], backend="triton")
        assert compare(out[-4:], kernelhub.bmm_fp8.reference, last, matrix_instructions=True).ok
