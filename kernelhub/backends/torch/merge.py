"""Merging attention states part by part, in float32.

weight_i = exp(lse_i - max), 0 where a part has no key
out = sum_i weight_i out_i / sum_i weight_i
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernelhub.ops.merge.adapter import MergeAdapter


class Merge(MergeAdapter):
    """`merge_attention_states` anywhere."""

    def launch(
        self, outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        scores = [torch.where(part == torch.inf, -torch.inf, part) for part in lses]
        top = scores[0]
        for score in scores[1:]:
            top = torch.maximum(top, score)
        finite = torch.where(top == -torch.inf, 0.0, top)
        weights = [(score - finite).exp_() for score in scores]
        total = torch.stack(weights).sum(0)
        divisor = torch.where(total == 0.0, 1.0, total)
        merged: Tensor | None = None
        for part, weight in zip(outs, weights, strict=True):
            share = (weight / divisor).transpose(-1, -2).unsqueeze(-1)
            addend = torch.where(share == 0.0, 0.0, part * share)
            merged = addend if merged is None else merged.add_(addend)
        assert merged is not None
        out.copy_(merged)
        if lse is not None:
            lse.copy_(top + total.log())
