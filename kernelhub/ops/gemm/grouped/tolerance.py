"""How far a product may be from the reference, and why.

Values and scales are decoded exactly, and a product of two of them is exact in float32 (8 + 8, 11 + 11, 4 + 4 bits, a
code of nvfp4 with its scale has 6; of float32 values it is rounded). What is rounded is:

* sums. A sum of K products in any order is off by K u at most, u the unit roundoff of the accumulator, relative to the
  sum of their sizes S = |a| |b|^T; roundings being independent, by more than 8 sqrt(K) u with negligible probability
  (Higham and Mary 2019, theorem 2.4). u is 2^-23, since tensor cores truncate.
* sums of fp8 products on tensor cores. Hopper aligns the 32 products of an instruction to the largest and keeps 13
  bits below it (DeepSeek-V3, 2024, section 3.3.2), so each is off by up to 2^-13 of the largest product there,
  independently: 6 sqrt(K) 2^-13 max |a_i| max |b_j| in all. Only on request, with `tensor_cores`.
* scales. They are applied in float32, to a sum or to each part of it: three products, 3 2^-24 S. Those for 16 or 32
  columns are no rounding, being part of the values, and the two global ones of nvfp4 are two products.
* the result, once, to its dtype: u |result|; float16 has an absolute floor of 2^-25 besides.

Elements of mxfp4 and mxfp8 may be beyond float32 (6 and 448 x 2^127) and are multiplied over a power of two that is put
back at the end: with S below 2^128 no result is NaN. Nor is it because of two scales whose product is no number of
float32; for the error of results below 1e-29 see `ops/gemm/fp8/tolerance.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.gemm.grouped.reference import (
    grouped_gemm_reference,
    of_group,
    rows_dequantized,
    weights_dequantized,
)
from kernelhub.ops.gemm.grouped.scales import PACKED, columns_of, geometry_of_a, geometry_of_b

_UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def error_allowed(arguments: dict[str, Any], want: Tensor, dtype: torch.dtype, tensor_cores: bool = False) -> Tensor:
    """The allowed error of each element of the result; NaN for rows of no group.

    Args:
        arguments: of the op, without `out`.
        want: the reference's result.
        dtype: of the result.
        tensor_cores: whether fp8 products were summed by tensor cores.
    """
    a = arguments["a"]
    sizes = grouped_gemm_reference(**_absolute(arguments))
    k = columns_of(a)
    allowed: Tensor = (min(k, 8 * math.sqrt(k)) * 2.0**-23 + 3 * 2.0**-24) * sizes
    allowed = allowed + _UNIT_ROUNDOFF[dtype] * want.abs().float() + 2.0**-25
    if tensor_cores and a.dtype is torch.float8_e4m3fn:
        allowed = allowed + 6 * math.sqrt(k) * 2.0**-13 * _largest_product(arguments)
    return allowed


def _absolute(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with every sign dropped."""
    changed = {name: value for name, value in arguments.items() if name not in ("out", "out_dtype")}
    for name in ("bias", "a_scale", "b_scale", "a_global_scale", "b_global_scale"):
        value = changed.get(name)
        if value is not None and value.dtype in _SIGNED:
            changed[name] = _without_sign(value)
    for name in ("a", "b"):
        codes = changed[name]
        changed[name] = (codes.view(torch.uint8) & 0x77) if codes.dtype in PACKED else _without_sign(codes)
    return changed


_SIGNED = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def _without_sign(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.float8_e4m3fn:
        return (tensor.view(torch.uint8) & 0x7F).view(tensor.dtype)
    return tensor.abs()


def _largest_product(arguments: dict[str, Any]) -> float:
    """No product of a row's and a weight's element is larger."""
    b, scale = arguments["b"], arguments["b_scale"]
    geometry = geometry_of_b(scale, b)
    kind = geometry_of_a(arguments["a_scale"], geometry, arguments["a"])
    a = rows_dequantized(arguments["a"], arguments["a_scale"], kind, torch.float32).nan_to_num().abs()
    if not a.numel():
        return 0.0
    largest = 0.0
    for group in range(b.shape[0]):
        weights = weights_dequantized(b[group], of_group(scale, group, b.shape[0]), geometry, torch.float32)
        largest = max(largest, float(weights.abs().max()))
    return float(a.max()) * largest
