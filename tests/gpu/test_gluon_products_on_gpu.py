"""What only a GPU can show of Gluon's products: their contracts, real sizes, the same bits again, a captured call."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.evidence.cases import CASES
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
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


SIZES = ((300, 0, 129, 256, 1, 0, 77), (16, 0, 40) * 7, (1500, 2, 0, 900))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("masked", [False, True])
def test_groups_of_real_sizes_are_right(masked: bool, dtype: str) -> None:
    """Tiles of every height; each call gives the same bits again."""
    for sizes in SIZES:
        for n, k in ((1536, 2048), (1544, 712)):
            arguments = grouped_gemm_inputs(
                sizes=sizes, n=n, k=k, format=dtype, masked=masked, bias=masked, device="cuda"
            )
            want = torch.full((*arguments["a"].shape[:-1], n), torch.nan, dtype=arguments["a"].dtype, device="cuda")
            kernelhub.grouped_gemm(**arguments, out=want, backend="gluon.grouped_halves")
            judgement = CASES["grouped_gemm"].judge({"out": want}, arguments)
            assert judgement.ok, judgement.figures
            for _ in range(50):
                out = torch.full_like(want, torch.nan)  # also in rows of no group
                kernelhub.grouped_gemm(**arguments, out=out, backend="gluon.grouped_halves")
                assert torch.equal(out.view(torch.int16), want.view(torch.int16))


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
