"""Operands of FlashInfer's mixtures of experts: the routing, quantised tokens, and scales of weights.

The routing has ids of local experts, each at most once per token: if a token has an expert twice, the library loses
one of the two. Tokens are quantised here, bit for bit as in the op's reference: the library's own quantisers multiply
by rounded reciprocals, which sometimes gives other codes. Scales are row-major.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.backends.shared.operands import row_major
from kernelhub.ops.formats import E2M1_MAX, E4M3_MAX, from_e8m0, to_e2m1, to_e4m3, to_e8m0_up
from kernelhub.ops.moe.experts.activations import LEAST_NVFP4_SCALE, MX_GROUP, NVFP4_GROUP
from kernelhub.ops.moe.experts.adapter import Values
from kernelhub.ops.moe.experts.weights import Matrix


def choices_of(ids: Tensor, weights: Tensor, num_experts: int, expert_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids of local experts; skipped ids are outside their range."""
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        ids = torch.where(known, expert_map[torch.where(known, ids, 0)], -1)
    return each_once(ids, weights, num_experts)


def each_once(ids: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The top-k of a token without duplicates: the first one has the weight of all, the others name no expert."""
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    summed = torch.where(same, weights.unsqueeze(1), 0.0).sum(2)
    again = same.tril(-1).any(2)
    once = torch.where(again, num_experts, ids.clamp(-1, num_experts)).int()
    return once.contiguous(), summed.contiguous()


def scales_of(w13: Matrix, w2: Matrix) -> tuple[Tensor, Tensor]:
    """Scales of groups or blocks of both projections."""
    assert w13.scale is not None
    assert w2.scale is not None
    return row_major(w13.scale), row_major(w2.scale)


def expert_scales(w13: Matrix, w2: Matrix) -> tuple[Tensor, Tensor]:
    """Scales [E] of both projections, one for each expert."""
    assert w13.channel_scale is not None
    assert w2.channel_scale is not None
    return w13.channel_scale[:, 0], w2.channel_scale[:, 0]


def static_scales(values: Values, *shape: int) -> tuple[Tensor, Tensor]:
    """Scales of one element of the tokens and of the activation's result, in a shape."""
    assert values.a1_scale is not None
    assert values.a2_scale is not None
    return values.a1_scale.reshape(shape), values.a2_scale.reshape(shape)


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
