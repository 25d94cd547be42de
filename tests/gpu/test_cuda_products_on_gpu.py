"""Float8 products by our CUDA kernel: their contract, and each form at sizes that end within tiles."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.backends.cuda.gemm.fp8 import Form, Fp8Gemm
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from tests.contract.fp8_gemm import Fp8GemmContract
from tests.gpu.products_sanitized import forms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="sm_90 only"
    ),
]


class TestFp8Gemm(Fp8GemmContract):
    kernel = "cuda.fp8_gemm"


@pytest.mark.parametrize("tokens", [1, 65, 200, 257, 1000, 4096])
def test_real_sizes_are_right(tokens: int) -> None:
    for n, k in ((576, 7168), (4608, 2304), (1536, 8192)):
        arguments = fp8_gemm_inputs(tokens=tokens, n=n, k=k, bias=True, device="cuda")
        out = kernelhub.fp8_gemm(**arguments, backend="cuda.fp8_gemm")
        agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=True)
        assert agreement.ok, str(agreement)


@pytest.mark.parametrize("form", forms(), ids=str)
def test_every_form_gives_the_same_bits_and_writes_nothing_else(form: Form) -> None:
    for tokens, n, k in ((1, 8, 16), (300, 200, 400), (1025, 1160, 1536)):
        arguments = fp8_gemm_inputs(tokens=tokens, n=n, k=k, device="cuda")
        problem = kernelhub.fp8_gemm.explain(**arguments, backend="cuda.fp8_gemm").problem
        made = type("Formed", (Fp8Gemm,), {"form": form})(problem)
        operands = [arguments.get(name) for name in ("a", "b", "a_scale", "b_scale", "bias")]
        around = torch.full((tokens + 2, n + 16), 7.0, dtype=torch.bfloat16, device="cuda")
        out = around[1:-1, 8:-8]
        made.launch(*operands, out)
        agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=True)
        assert agreement.ok, str(agreement)
        want = around.clone()
        for _ in range(200):
            out.fill_(torch.nan)
            made.launch(*operands, out)
            assert torch.equal(around, want)
        want[1:-1, 8:-8] = 7.0
        assert (want == 7.0).all()


def test_a_captured_call_reads_what_its_operands_then_hold() -> None:
    arguments = fp8_gemm_inputs(tokens=300, n=1536, k=2304, device="cuda")
    out = kernelhub.fp8_gemm(**arguments, backend="cuda.fp8_gemm")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernelhub.fp8_gemm(**arguments, out=out, backend="cuda.fp8_gemm")
    arguments["a_scale"].mul_(2)
    graph.replay()
    agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=True)
    assert agreement.ok, str(agreement)
