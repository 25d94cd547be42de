"""Rows and weights as float32, times their scales.

Scales are multiplied in but for a factor (`LEFT`): the largest elements are beyond float32.

Where a scale is for a span of columns, products are taken span by span in place: nothing is spread out to the size of
the weights. fp4 is looked up a byte at a time, which holds two values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.torch.attention.sequences import e4m3_values
from kernelhub.backends.torch.gemm.two_scales import LEFT_OF_CODES
from kernelhub.ops import formats
from kernelhub.ops.gemm.grouped.problem import BLOCKS, GROUPS
from kernelhub.runtime.scratch import scratch

E4M3 = torch.float8_e4m3fn
_E8M0 = (torch.float8_e8m0fnu, torch.uint8)
# So that 6 or 448 times the largest scale is finite; the least value of mx over it is still a number of float32.
LEFT = {"mxfp4": 2.0**3} | dict.fromkeys(("mxfp8", "tensor", "token", "channel", *GROUPS, *BLOCKS), LEFT_OF_CODES)


def widened(tag: str, values: Tensor) -> Tensor:
    """Any float dtype as float32 in memory of its own, which the next call with the tag takes again on a CPU."""
    into = scratch(f"grouped {tag}", values.shape, torch.float32, values.device)
    if values.dtype is E4M3 and values.device.type == "cpu":
        e4m3_values(f"grouped {tag}", values, into)
        return into
    return into.copy_(values)


def unpacked(tag: str, packed: Tensor) -> Tensor:
    """fp4 [N, K / 2] as float32 [N, K], in memory as of `widened`."""
    packed = packed.view(torch.uint8)
    pairs = formats.from_e2m1(torch.arange(256, device=packed.device, dtype=torch.int32).to(torch.uint8).unsqueeze(1))
    into = scratch(f"grouped fp4 {tag}", (packed.numel(), 2), torch.float32, packed.device)
    torch.index_select(pairs, 0, packed.reshape(-1).int(), out=into)
    return into.view(packed.shape[0], -1)


def scaled_by_spans(values: Tensor, scale: Tensor, span: int) -> Tensor:
    """values [R, K], in place, times scale [R, ceil(K / span)]."""
    whole = values.shape[1] // span
    values[:, : whole * span].unflatten(1, (whole, span)).mul_(scale[:, :whole].unsqueeze(2))
    if whole * span < values.shape[1]:
        values[:, whole * span :].mul_(scale[:, whole:])
    return values


def floats(scale: Tensor) -> Tensor:
    """A scale of any format as float32."""
    return formats.from_e8m0(scale) if scale.dtype in _E8M0 else scale.float()


def of_group(scale: Tensor, group: int) -> Tensor:
    """One factor of a group, where there is one for each or one for all."""
    return scale.reshape(-1)[group if scale.numel() > 1 else 0]
