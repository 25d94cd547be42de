"""MXFP4 experts padded with zeros to the width that a kernel needs.

A code of zero is zero whatever its scale; a gate and an up of zero join to zero in every activation of `fused_moe`; and
what comes out past the width of a token is cut off. So nothing changes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernelhub.backends.shared.operands import up_to
from kernelhub.ops.moe.experts.adapter import W13
from kernelhub.ops.moe.experts.problem import MXFP4
from kernelhub.ops.moe.experts.weights import FP4_GROUP
from kernelhub.ops.packed import PackedWeight, Tensors

ONE_E8M0 = 127
_GROUP = FP4_GROUP[MXFP4]


class Padded(NamedTuple):
    """One projection: bytes of codes [E, N, K / 2] and of scales [E, N, K / 32], a bias [E, N] or None."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None


def padded(side: str, weight: Tensor, scale: Tensor, bias: Tensor | None, multiple: int) -> Padded:
    """A projection with both widths up to a multiple; gate and up of w13 each."""
    codes, exponents = (item.view(torch.uint8) for item in (weight, scale))
    halves = 2 if side == W13 else 1
    rows, columns = codes.shape[1] // halves, 2 * codes.shape[2]
    below, beside = up_to(rows, multiple) - rows, up_to(columns, multiple) - columns
    if bias is not None:
        bias = pad(bias.unflatten(1, (halves, rows)), (0, below)).flatten(1, 2)
    if not below and not beside:
        return Padded(codes, exponents, bias)
    codes = pad(codes.unflatten(1, (halves, rows)), (0, beside // 2, 0, below)).flatten(1, 2)
    exponents = exponents.unflatten(1, (halves, rows))
    return Padded(codes, pad(exponents, (0, beside // _GROUP, 0, below), value=ONE_E8M0).flatten(1, 2), bias)


def cut(packed: PackedWeight, made: Padded) -> Tensors:
    """The arguments of `pack`, of a projection in their order whose edges are still filled up."""
    halves = 2 if packed.facts["side"] == W13 else 1
    rows, half = packed.shape[1] // halves, packed.shape[2]
    dtype, shape = packed.facts["scale"]

    def inside(rows_of: Tensor, width: int) -> Tensor:
        kept: Tensor = rows_of.unflatten(1, (halves, -1))[:, :, :rows, :width]
        return kept.flatten(1, 2).contiguous()

    codes = inside(made.codes, half).view(packed.dtype)
    scale = inside(made.scale, 2 * half // _GROUP).view(dtype).reshape(shape)
    bias = made.bias
    if bias is not None:
        bias = bias.unflatten(1, (halves, -1))[:, :, :rows].flatten(1, 2).to(packed.facts["bias_dtype"])
    return codes, scale, None, bias
