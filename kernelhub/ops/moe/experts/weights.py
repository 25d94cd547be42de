"""The formats of experts' weights, derived from dtypes and the shapes of scales, and their common form.

For weights ``[E, N, K]`` (N is 2I of w13 and H of w2):

===================  ================================  =====================================================
format               weights                           scale
===================  ================================  =====================================================
plain                dtype of the tokens               none
fp8_tensor           float8_e4m3fn                     float32 [E] or [E, 1]
fp8_channel          float8_e4m3fn                     float32 [E, N] or [E, N, 1]
fp8_block            float8_e4m3fn                     float32 [E, ceil(N / 128), ceil(K / 128)]
fp8_block_ue8m0      float8_e4m3fn                     the same in float8_e8m0fnu
mxfp4                uint8 [E, N, K / 2], two a byte   float8_e8m0fnu or uint8 [E, N, K / 32]
nvfp4                uint8 [E, N, K / 2], two a byte   float8_e4m3fn [E, N, K / 16], and float32 [E] or [E, 1]
mxint4               uint8 [E, N, K / 2], two a byte   bfloat16 [E, N, K / 32]
===================  ================================  =====================================================
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3, E8M0, from_e2m1, from_e8m0, from_int4
from kernelhub.ops.moe.experts.problem import (
    BLOCK_FORMATS,
    FOUR_BIT_FORMATS,
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    MXINT4,
    NVFP4,
    PLAIN,
)
from kernelhub.ops.packed import PackedWeight

BLOCK = 128
FP4_GROUP = {MXFP4: 32, NVFP4: 16}
GROUP = {**FP4_GROUP, MXINT4: 32}  # columns that share a scale
PACKED_PARTS = ("weight", "scale", "global_scale", "bias")  # of a `PackedWeight`
PACKED = (torch.uint8, *((torch.float4_e2m1fn_x2,) if hasattr(torch, "float4_e2m1fn_x2") else ()))


class Matrix(NamedTuple):
    """One projection of all experts in the form that kernels are given.

    Attributes:
        weight: [E, N, K], or bytes [E, N, K / 2] of codes of four bits; float8_e4m3fn stays what it is.
        scale: of blocks or groups along K, as in the table above, e8m0 as its bytes (uint8); else None.
        channel_scale: float32 [E, N], of stride 0 where an expert has one; None where there is none.
        bias: [E, N], or None.
    """

    weight: Tensor
    scale: Tensor | None
    channel_scale: Tensor | None
    bias: Tensor | None


def format_of(
    weight_dtype: torch.dtype, rows: int, scale_dtype: torch.dtype | None, scale_shape: tuple[int, ...]
) -> str:
    """The format's name, from these alone; `check.check` then checks the shape of the scale.

    Args:
        weight_dtype: of the weights.
        rows: N of the weights.
        scale_dtype: of their scale; None if there is none.
        scale_shape: the shape of the scale without the experts.
    """
    if weight_dtype in PACKED:
        if weight_dtype is torch.uint8 and scale_dtype is torch.bfloat16:
            return MXINT4
        return NVFP4 if scale_dtype is E4M3 else MXFP4
    if weight_dtype is not E4M3:
        return PLAIN
    if scale_shape in ((), (1,)):
        return FP8_TENSOR
    if scale_shape in ((rows,), (rows, 1)):
        return FP8_CHANNEL
    return FP8_BLOCK_UE8M0 if scale_dtype is E8M0 else FP8_BLOCK


def scale_shapes(weights: str, num_experts: int, rows: int, columns: int) -> tuple[list[int], ...]:
    """Shapes that the scale of weights [E, rows, columns] may have, the usual one first."""
    if weights == FP8_TENSOR:
        return [num_experts], [num_experts, 1]
    if weights == FP8_CHANNEL:
        return [num_experts, rows], [num_experts, rows, 1]
    if weights in BLOCK_FORMATS:
        return ([num_experts, -(-rows // BLOCK), -(-columns // BLOCK)],)
    if weights in FOUR_BIT_FORMATS:
        return ([num_experts, rows, columns // GROUP[weights]],)
    return ()


def scale_dtypes(weights: str) -> tuple[torch.dtype, ...]:
    """Dtypes that the scale may have."""
    if weights == MXFP4:
        return E8M0, torch.uint8
    if weights == NVFP4:
        return (E4M3,)
    if weights == MXINT4:
        return (torch.bfloat16,)
    return (E8M0,) if weights == FP8_BLOCK_UE8M0 else (torch.float32,)


def matrix(
    weights: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
) -> Matrix:
    """The common form."""
    if weights == PLAIN:
        return Matrix(weight, None, None, bias)
    if weights in BLOCK_FORMATS:
        assert scale is not None
        return Matrix(weight, scale.view(torch.uint8) if scale.dtype is E8M0 else scale, None, bias)
    experts, rows = weight.shape[:2]
    if weights in FOUR_BIT_FORMATS:
        assert scale is not None
        channel = None if global_scale is None else global_scale.reshape(experts, 1).expand(experts, rows)
        raw = scale.view(torch.uint8) if scale.dtype is E8M0 else scale
        return Matrix(weight if weight.dtype is torch.uint8 else weight.view(torch.uint8), raw, channel, bias)
    assert scale is not None
    return Matrix(weight, None, scale.reshape(experts, -1).expand(experts, rows), bias)


def form_of_scale(weight: Tensor | PackedWeight, scale: Tensor | None) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Dtype and shape of the scale as in a checkpoint."""
    if isinstance(weight, PackedWeight):
        form: tuple[torch.dtype, tuple[int, ...]] | None = weight.facts["scale"]
        return form
    return None if scale is None else (scale.dtype, scale.shape)


def given_matrix(
    weights: str,
    weight: Tensor | PackedWeight,
    scale: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
) -> Matrix:
    """The common form of a projection as a call has it: in a checkpoint's tensors, or packed with all that it has."""
    if not isinstance(weight, PackedWeight):
        return matrix(weights, weight, scale, global_scale, bias)
    first, scale, global_scale, bias = (weight.tensors[name] for name in PACKED_PARTS)
    assert first is not None
    return matrix(weights, first, scale, global_scale, bias)


def dequantized(weights: str, given: Matrix, expert: int, dtype: torch.dtype) -> Tensor:
    """The weights [N, K] of one expert in `dtype`, all scales multiplied in."""
    weight, scale = given.weight[expert], None if given.scale is None else given.scale[expert]
    if weights in FOUR_BIT_FORMATS:
        values = (from_int4 if weights == MXINT4 else from_e2m1)(weight, dtype)
    else:
        values = weight.to(dtype)
    if scale is not None:
        factors = from_e8m0(scale) if scale.dtype is torch.uint8 else scale.float()
        factors = factors.to(dtype)
        if weights in FOUR_BIT_FORMATS:
            factors = factors.repeat_interleave(GROUP[weights], 1)
        else:
            factors = factors.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        values = values * factors[: values.shape[0], : values.shape[1]]
    if given.channel_scale is not None:
        values = values * given.channel_scale[expert].to(dtype).unsqueeze(1)
    return values
