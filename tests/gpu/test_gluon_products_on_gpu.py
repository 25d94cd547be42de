"""What only a GPU can show of Gluon's products: their contracts, real sizes, the same bits again, a captured call."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from tests.contract.fp8_gemm import Fp8GemmContract
from tests.contract.grouped_gemm import GroupedGemmContract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="sm_90 only"
    ),
]


class TestFp8Gemm(Fp8GemmContract):
    kernel = "gluon.fp8_gemm"


class TestGroupedFp8(GroupedGemmContract):
    kernel = "gluon.grouped_fp8"
    formats = ("block", "channel", "tensor")


class TestGroupedHalves(GroupedGemmContract):
    kernel = "gluon.grouped_halves"
    formats = ("bfloat16", "float16")


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
@pytest.mark.parametrize("tokens", [1, 65, 200, 257, 1000, 4096])
def test_real_sizes_are_right(tokens: int, scaling: str) -> None:
    for n, k in ((576, 7168), (4608, 2304), (1536, 8192)):
        arguments = fp8_gemm_inputs(tokens=tokens, n=n, k=k, scaling=scaling, bias=True, device="cuda")
        out = kernelhub.fp8_gemm(**arguments, backend="gluon")
        agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=True)
        assert agreement.ok, str(agreement)


@pytest.mark.parametrize("tokens", [1000, 200])
def test_a_thousand_calls_give_the_same_bits(tokens: int) -> None:
    arguments = fp8_gemm_inputs(tokens=tokens, n=4608, k=2304, device="cuda")
    want = kernelhub.fp8_gemm(**arguments, backend="gluon")
    out, unequal = torch.empty_like(want), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out.zero_()
        kernelhub.fp8_gemm(**arguments, out=out, backend="gluon")
        unequal += (out != want).any()
    assert int(unequal) == 0


def test_a_captured_call_reads_what_its_operands_then_hold() -> None:
    arguments = fp8_gemm_inputs(tokens=300, n=1536, k=2304, device="cuda")
    out = kernelhub.fp8_gemm(**arguments, backend="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernelhub.fp8_gemm(**arguments, out=out, backend="gluon")
    arguments["a_scale"].mul_(2)
    graph.replay()
    agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=True)
    assert agreement.ok, str(agreement)
