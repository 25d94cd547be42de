"""Shared by both adapters: operands that FlashMLA can read, results in our form."""

from __future__ import annotations

from torch import Tensor

from kernelhub.backends.flash_mla.finish import finish_kernel
from kernelhub.ops.attention.adapter import PagedStep

VALUE_DIM = 512
_HEADS = 8  # rows of 512 float32 values that a program of four warps holds in a quarter of its registers


def finish(
    result: Tensor,
    result_lse: Tensor,
    step: PagedStep,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Write `out` and `lse` from a result [sequences, tokens, heads, 512] and its LSE [sequences, heads, tokens]."""
    ragged = step.cu_seqlens_q is not None
    if lse is None and sinks is None and not ragged and result.shape[2] == out.shape[-2]:
        out.copy_(result.view(out.shape))
        return
    sequences, tokens = result.shape[:2]
    heads = out.shape[-2]
    if out.ndim == 4:
        out_strides = out.stride()
        lse_strides = (0, 0, 0) if lse is None else lse.stride()
    else:  # of decode the rows are sequences, of ragged queries they are tokens
        first, head, entry = out.stride()
        out_strides = (0, first, head, entry) if ragged else (first, 0, head, entry)
        lse_head, last = (0, 0) if lse is None else lse.stride()
        lse_strides = (0, lse_head, last) if ragged else (last, lse_head, 0)
    finish_kernel[(sequences * tokens * -(-heads // _HEADS),)](
        out,
        lse,
        result,
        result_lse,
        sinks,
        step.cu_seqlens_q,
        tokens,
        heads,
        step.num_seqs,
        *out_strides,
        *lse_strides,
        *result.stride()[:3],
        *result_lse.stride(),
        0 if sinks is None else sinks.stride(0),
        0 if step.cu_seqlens_q is None else step.cu_seqlens_q.stride(0),
        HAS_LSE=lse is not None,
        HAS_SINKS=sinks is not None,
        RAGGED=ragged,
        V=VALUE_DIM,
        HEADS=_HEADS,
    )
