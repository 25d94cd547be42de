"""`fp8_gemm` scaled by MX with many rows, whose operands are decoded for cuBLAS."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.gemm import decoded
from kernelhub.backends.triton.gemm.fp8.adapter import DECODED_FROM
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare
from tests.conftest import DEVICE

TRITON = "triton.fp8_gemm"
ROWS = DECODED_FROM + 3


def inputs(**changes: Any) -> dict[str, Any]:
    return fp8_gemm_inputs(**{"tokens": ROWS, "n": 48, "k": 96, "scaling": "mx", "device": DEVICE} | changes)


def agrees(out: torch.Tensor, arguments: dict[str, Any]) -> None:
    agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=DEVICE == "cuda")
    assert agreement.ok, str(agreement)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": True},
        {"e5m2": True, "bias": True},
        {"k": 80, "n": 33, "bias": True},  # part of a group, and columns that are no multiple of 16
        {"k": 288, "out_dtype": torch.float32},  # two programs for a row
    ],
)
def test_it_is_right(changes: dict[str, Any]) -> None:
    arguments = inputs(**changes)
    agrees(kernelhub.fp8_gemm(**arguments, backend=TRITON), arguments)


def test_operands_and_out_may_have_any_strides() -> None:
    arguments = inputs(bias=True)
    moved = dict(arguments)
    for name in ("a", "b", "a_scale", "b_scale"):
        bytes_of = arguments[name].view(torch.uint8)
        wide = bytes_of.new_full((bytes_of.shape[0], 2 * bytes_of.shape[1] + 1), 0x7F)  # NaN beside each value
        wide[:, 1::2] = bytes_of
        moved[name] = wide[:, 1::2].view(arguments[name].dtype)
    around = torch.full((ROWS + 2, 96), 7.0, dtype=torch.bfloat16, device=DEVICE)
    kernelhub.fp8_gemm(**moved, backend=TRITON, out=around[1:-1, ::2])
    agrees(around[1:-1, ::2], arguments)
    assert (around[:, 1::2] == 7.0).all()
    assert (around[[0, -1]] == 7.0).all()


def test_nan_reaches_its_row_or_column_and_no_other() -> None:
    for name, at in (("a", (20, 37)), ("b", (45, 90)), ("a_scale", (ROWS - 1, 2)), ("b_scale", (0, 0))):
        arguments = inputs()
        arguments[name].view(torch.uint8)[at] = 0xFF
        wrong = kernelhub.fp8_gemm(**arguments, backend=TRITON).isnan()
        assert (wrong[at[0]] if name.startswith("a") else wrong[:, at[0]]).all()
        assert int(wrong.sum()) == (48 if name.startswith("a") else ROWS)


def test_a_weight_of_several_stretches_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = inputs(n=1024 + 40, k=32, bias=True)
    want = kernelhub.fp8_gemm(**arguments, backend=TRITON)
    monkeypatch.setattr(decoded, "_MOST_BYTES", 1)
    agrees(want, arguments)
    assert torch.equal(kernelhub.fp8_gemm(**arguments, backend=TRITON), want)


def test_a_plan_states_the_memory_of_both_ways() -> None:
    arguments = inputs()
    dtype = arguments.pop("out_dtype")
    plan = kernelhub.fp8_gemm.prepare(**arguments, out_dtype=dtype, backend=TRITON)
    few, many = (plan.workspace_bytes(num_tokens=tokens) for tokens in (DECODED_FROM - 1, DECODED_FROM))
    assert many == max(few, 2 * DECODED_FROM * 96 + 48 * (2 * 96 + 4 * DECODED_FROM))
    assert torch.equal(plan.run(**arguments), kernelhub.fp8_gemm(**arguments, out_dtype=dtype, backend=TRITON))
