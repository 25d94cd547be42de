"""What the cases of the fused quantisations call right: as far from the row as a rounding is, however ties fall."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernelhub.evidence.cases import CASES
from kernelhub.ops.fused_quant.inputs import activation_inputs
from kernelhub.ops.fused_quant.reference import activated
from kernelhub.ops.quant.tolerance import UNIT_ROUNDOFF

CASES_OF_SILU = CASES["silu_and_mul_quant"]


def judged(out: Tensor, arguments: dict) -> bool:
    return CASES_OF_SILU.compare({"out": out}, arguments, CASES_OF_SILU.expect(arguments)).ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tie_may_go_either_way_and_nothing_may_go_further(dtype: torch.dtype) -> None:
    arguments = activation_inputs(width=4096, tokens=16, dtype=dtype, format=None)
    row = activated(arguments["x"])
    right = row.to(dtype)
    assert judged(right, arguments)
    # Kernels compute the row with an error of 2^-17: next to a tie they round to the other side.
    nearly = (row * (1 + 2.0**-18)).to(dtype), (row * (1 - 2.0**-18)).to(dtype)
    assert any(not torch.equal(other, right) for other in nearly), "there are ties"
    for other in nearly:
        assert judged(other, arguments)
    assert not judged((row * (1 + 3 * UNIT_ROUNDOFF[dtype])).to(dtype), arguments)


def test_what_is_beyond_the_dtype_is_infinite() -> None:
    arguments = activation_inputs(width=64, tokens=2, dtype=torch.float16, format=None)
    arguments["x"][0] = 600.0
    right = activated(arguments["x"]).to(torch.float16)
    assert bool(right[0].isinf().all())
    assert judged(right, arguments)
    assert not judged(right.clamp(max=65504.0), arguments)
