"""The collectives in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernelhub.ops.comm.group import resolved
from kernelhub.ops.fused_quant.reference import rms_norm_quant_reference
from kernelhub.ops.precision import at_own_precision, without_autocast

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
    format: str | None = None,
    scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    ue8m0: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    out_scale: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """The normalised rows and the new residual, computed in `dtype` and returned in it. All ranks call it.

    With `format` the new residual is rounded to the dtype of x, and the rows are `rms_norm_quant_reference` of it.
    """
    total = all_reduce_reference(x, group, dtype=dtype) + residual.to(dtype)
    if format is not None:
        total = total.to(x.dtype)
        options = format, scale, global_scale, ue8m0, scale_dtype
        return *rms_norm_quant_reference(total, weight, eps, None, *options), total
    inverse = (total.square().mean(-1, keepdim=True) + eps).rsqrt()
    return total * inverse * weight.to(dtype), total


@at_own_precision
def reduce_scatter_reference(
    x: Tensor, group: ProcessGroup | str, out: Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """This rank's part of the sum, computed in `dtype` and returned in it. All ranks call it."""
    pg = resolved("reduce_scatter", group)
    return all_reduce_reference(x, group, dtype=dtype).tensor_split(pg.size())[pg.rank()]


@without_autocast
def all_gather_reference(
    x: Tensor, group: ProcessGroup | str, out: Tensor | None = None, rows: Sequence[int] | None = None
) -> Tensor:
    """The rows of all ranks. All ranks call it."""
    pg = resolved("all_gather", group)
    counts = [x.shape[0]] * pg.size() if rows is None else list(rows)
    padded = torch.zeros(max(counts), *x.shape[1:], dtype=x.dtype, device=x.device)
    padded[: x.shape[0]] = x
    sent = padded.view(-1).view(torch.uint8)  # gloo has not every dtype
    parts = [torch.empty_like(sent) for _ in counts]
    if sent.numel():
        pg.allgather([parts], [sent]).wait()
    whole = [part.view(x.dtype).view(padded.shape) for part in parts]
    return torch.cat([part[:count] for part, count in zip(whole, counts, strict=True)])
