"""`merge_attention_states` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3_MAX
from kernelhub.ops.precision import at_own_precision


@at_own_precision
def merge_attention_states_reference(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    out: Tensor | None = None,
    out_lse: Tensor | None = None,
    return_lse: bool = False,
    out_scale: float | Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The op, computed in `dtype` and returned in it; arguments as of the op, destinations ignored.

    With `out_scale` the merged result over the scale, limited to what float8_e4m3fn holds and not rounded to it.
    """
    scores = torch.stack([lse.to(dtype) for lse in lses])
    scores = torch.where(scores == torch.inf, -torch.inf, scores)
    merged_lse = torch.logsumexp(scores, 0)
    weights = (scores - torch.where(merged_lse == -torch.inf, 0.0, merged_lse)).exp().transpose(-1, -2).unsqueeze(-1)
    values = torch.stack([part.to(dtype) for part in outs])
    merged = (torch.where(weights == 0.0, 0.0, values) * weights).sum(0)
    if out_scale is not None:
        scale = out_scale.to(dtype).reshape(()) if isinstance(out_scale, Tensor) else out_scale
        merged = (merged / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return (merged, merged_lse) if return_lse or out_lse is not None else merged
