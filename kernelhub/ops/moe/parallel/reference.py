"""`expert_parallel_moe` in plain torch: every rank gets all weights, and runs its own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.ops.comm.experts.reference import gathered_rows
from kernelhub.ops.comm.group import resolved
from kernelhub.ops.moe.experts.reference import fused_moe_reference

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SCALES = ("w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale", "w13_bias", "w2_bias")


def expert_parallel_moe_reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    group: ProcessGroup | str,
    *,
    max_tokens: int | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Tensor:
    """The reference of `fused_moe` with the experts of all ranks, in `dtype`; `out` and `max_tokens` are ignored."""
    every = whole_layer(group=group, w13=w13, w2=w2, **options)
    result: Tensor = fused_moe_reference(x, topk_weights=topk_weights, topk_ids=topk_ids, **every, dtype=dtype)
    return result


def whole_layer(*, group: ProcessGroup | str, **arguments: Any) -> dict[str, Any]:
    """Arguments with the weights of all ranks in place of this rank's; all ranks call it."""
    pg = resolved("expert_parallel_moe", group)
    made = dict(arguments)
    for name in ("w13", "w2", *SCALES):
        if made.get(name) is not None:
            made[name] = torch.cat([rows.view(torch.uint8) for rows in gathered_rows(pg, made[name])]).view(
                made[name].dtype
            )
    return made
