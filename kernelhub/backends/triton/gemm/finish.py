# mypy: ignore-errors
"""What follows a product that cuBLAS kept in float32: its factors, the bias, the dtype of the result."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["units"], do_not_specialize_on_alignment=["b_global", "bias"])
def finish_kernel(
    product,
    b_global,
    bias,
    out,
    units,
    stride_om,
    stride_on,
    UNIT: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A stretch of a row: out = product * global scale * LEFT + bias, of `units` times UNIT columns.

    Columns are counted in whole units, since how many there are depends on the rows, and must compile nothing.
    """
    columns = units * UNIT
    across = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64)
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    value = tl.load(product + row * columns + column, mask, other=0.0)
    if HAS_GLOBAL:
        value *= tl.load(b_global)
    if LEFT != 1.0:
        value *= LEFT
    if HAS_BIAS:
        value += tl.load(bias + column, mask, other=0.0).to(tl.float32)
    tl.store(out + row * stride_om + column.to(tl.int64) * stride_on, value.to(out.dtype.element_ty), mask)
