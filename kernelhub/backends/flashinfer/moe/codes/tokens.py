"""Tokens in the codes of formats with small groups, bit for bit as the op's reference has them.

The library's own quantisers multiply by rounded reciprocals, which sometimes gives other codes; products
are given codes and scales instead. Scales are row-major.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import E2M1_MAX, E4M3_MAX, from_e8m0, to_e2m1, to_e4m3, to_e8m0_up
from kernelhub.ops.moe.experts.activations import LEAST_NVFP4_SCALE, MX_GROUP, NVFP4_GROUP


def as_nvfp4(x: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [T, K] as bytes [T, K / 2] and e4m3 scales [T, K / 16], with a second scale of one element."""
    groups, largest = _groups(x, NVFP4_GROUP)
    both = second.reshape(1, 1, 1)
    wanted = largest / torch.full_like(largest, E2M1_MAX) / both
    scale = to_e4m3(wanted.clamp(min=LEAST_NVFP4_SCALE))
    return to_e2m1((groups / (scale.float() * both)).flatten(1)), scale.squeeze(2)


def as_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [T, K] as e4m3 and the bytes of powers of two [T, K / 32]."""
    groups, largest = _groups(x, MX_GROUP)
    power = to_e8m0_up(largest / torch.full_like(largest, E4M3_MAX)).view(torch.uint8)
    return to_e4m3(groups / from_e8m0(power)).flatten(1), power.squeeze(2)


def _groups(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """In float32 [T, K / width, width], and the largest magnitude of each."""
    groups = x.float().unflatten(1, (-1, width))
    return groups, groups.abs().amax(2, keepdim=True)
