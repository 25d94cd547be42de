"""The collectives in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernelhub.ops.comm.group import resolved
from kernelhub.ops.precision import at_own_precision

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@at_own_precision
def all_reduce_reference(
    x: Tensor, group: ProcessGroup | str, out: Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The sum in the order of ranks, computed in `dtype` and returned in it; `out` is ignored. All ranks call it."""
    pg = resolved("all_reduce", group)
    own = x.to(dtype).contiguous()
    parts = [torch.empty_like(own) for _ in range(pg.size())]
    pg.allgather([parts], [own]).wait()
    total = torch.zeros_like(own)
    for part in parts:
        total += part
    return total


@at_own_precision
def all_reduce_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: ProcessGroup | str,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The normalised rows and the new residual, computed in `dtype` and returned in it. All ranks call it."""
    total = all_reduce_reference(x, group, dtype=dtype) + residual.to(dtype)
    scale = (total.square().mean(-1, keepdim=True) + eps).rsqrt()
    return total * scale * weight.to(dtype), total
