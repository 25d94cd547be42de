"""Merging attention states part by part, in float32.

    weight_i = exp(lse_i - max), 0 where a part has no key
    out = sum_i (weight_i / sum of weights) out_i

On a CPU a block of tokens at a time, so that intermediate results stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernelhub.ops.formats import to_e4m3
from kernelhub.ops.merge.adapter import MergeAdapter
from kernelhub.runtime.scratch import scratch

# Of a block, 4 MB in float32: 2 x 512 tokens, 128 heads of 128, take 5.6 ms instead of 27 in one piece and 6.8 in
# blocks of a quarter (2 cores, torch 2.13, bfloat16).
_ELEMENTS = 1 << 20


class Merge(MergeAdapter):
    """`merge_attention_states` anywhere."""

    def launch(
        self,
        outs: Sequence[Tensor] | Tensor,
        lses: Sequence[Tensor] | Tensor,
        out: Tensor,
        lse: Tensor | None,
        out_scale: float | Tensor | None = None,
    ) -> None:
        scores = [torch.where(part == torch.inf, -torch.inf, part) for part in lses]
        top = scores[0]
        for score in scores[1:]:
            top = torch.maximum(top, score)
        finite = torch.where(top == -torch.inf, 0.0, top)
        weights = [(score - finite).exp_() for score in scores]
        total = torch.stack(weights).sum(0)
        divisor = torch.where(total == 0.0, 1.0, total)
        shares = [(weight / divisor).transpose(-1, -2).unsqueeze(-1) for weight in weights]
        tokens, heads, width = out.shape[-3:]
        block = max(1, _ELEMENTS // (heads * width)) if out.device.type == "cpu" else tokens
        for start in range(0, tokens, block):
            rows = (..., slice(start, start + block), slice(None), slice(None))
            _merge_block([part[rows] for part in outs], [share[rows] for share in shares], out[rows], out_scale)
        if lse is not None:
            lse.copy_(top + total.log())


def _merge_block(
    parts: Sequence[Tensor], shares: Sequence[Tensor], out: Tensor, out_scale: float | Tensor | None
) -> None:
    """out [..., T, H, D] from parts of that shape and their shares [..., T, H, 1]."""
    merged = _weighed("merged", parts[0], shares[0])
    for part, share in zip(parts[1:], shares[1:], strict=True):
        merged.add_(_weighed("part", part, share))
    out.copy_(merged if out_scale is None else to_e4m3(merged.div_(out_scale)))


def _weighed(tag: str, part: Tensor, share: Tensor) -> Tensor:
    """The product in float32; where the share is 0, the value counts as 0."""
    product = torch.mul(part, share, out=scratch(f"merge {tag}", part.shape, torch.float32, part.device))
    nothing = share == 0.0
    if part.device.type != "cpu" or nothing.any():
        product.masked_fill_(nothing, 0.0)
    return product
