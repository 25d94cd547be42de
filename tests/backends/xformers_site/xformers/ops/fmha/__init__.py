"""Stand-in: attention of [B, M, H, K], or [B, M, G, H, K] with keys that are the same for all H."""

from __future__ import annotations

import math

import torch

from tests.backends.flash_attn_numbers import check_operands, run

from . import cutlass, flash  # noqa: F401
from .attn_bias import (
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalMask,
    LowerTriangularFromBottomRightMask,
)


def memory_efficient_attention_forward(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    return _forward(query, key, value, attn_bias, p, scale, op)[0]


def memory_efficient_attention_forward_requires_grad(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    assert op.GROUPS, "its LSE of packed sequences is padded"
    return _forward(query, key, value, attn_bias, p, scale, op)


def _forward(q, k, v, bias, p, scale, op):
    assert op is not None, "xformers is never asked to choose"
    assert p == 0.0
    assert q.ndim == k.ndim == v.ndim
    assert q.ndim == 4 or op.GROUPS
    assert op.WIDTHS or q.shape[-1] == v.shape[-1]
    assert k.shape[2:] == q.shape[2:], "no broadcasting"
    lead = q.shape[:-1]
    if q.ndim == 5:
        assert k.stride(3) == v.stride(3) == 0
        assert q.stride(2) == q.stride(3) * q.shape[3]
        q, k, v = q.flatten(2, 3), k[:, :, :, 0], v[:, :, :, 0]
    check_operands(q, k, v)
    out = q.new_full((*q.shape[:-1], v.shape[-1]), math.nan)
    causal = isinstance(bias, (BlockDiagonalCausalFromBottomRightMask, LowerTriangularFromBottomRightMask))
    common = (scale, causal, (-1, -1), 0.0, None, math.inf)
    if isinstance(bias, BlockDiagonalMask):
        assert q.shape[0] == 1
        assert bias.q_seqinfo.max_seqlen > 1, "heads are taken for queries"
        cu_q, cu_k = bias.q_seqinfo.seqstart, bias.k_seqinfo.seqstart
        assert (int(cu_q[-1]), int(cu_k[-1])) == (q.shape[1], k.shape[1])
        lse = run(q[0], k[0], v[0], *common, out[0], cu_q, cu_k, None, None, False)[None]
    else:
        assert not causal or q.shape[1] <= k.shape[1]
        lse = run(q, k, v, *common, out, None, None, None, None, False)
    assert not torch.isinf(lse).any(), "a query that sees no key"
    if len(lead) == 4:
        lse = lse.unflatten(1, lead[2:])
    return out.reshape(*lead, v.shape[-1]), lse
