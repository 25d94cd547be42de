"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import lse_shape, plain
from kernelhub.ops.attention.adapter import LENT
from kernelhub.ops.attention.arguments import any_tensor
from kernelhub.ops.operators import define, names_of


def mla_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    value_dim: int = 512,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    topk_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_scale: float | Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Any:
    """`kernelhub.mla_attention` through its operator."""
    any_tensor("mla_attention", q=q, kv_cache=kv_cache)
    split = (None, kv_scale) if isinstance(kv_scale, Tensor) else (kv_scale, None)
    operands = (q, kv_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, topk_indices, scale, value_dim)
    arguments = (*operands, causal, sinks, *split, return_lse, names_of(backend))
    ops = torch.ops.kernelhub
    if out is None:
        result, lse = ops.mla_attention.default(*arguments)
    else:
        result, lse = out, ops.mla_attention_out.default(*arguments, out)
    return (result, lse) if return_lse else result


def _run(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    topk_indices: Tensor | None,
    scale: float,
    value_dim: int,
    causal: bool,
    sinks: Tensor | None,
    kv_scale_value: float | None,
    kv_scale: Tensor | None,
    return_lse: bool,
    backend: list[str] | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from kernelhub.ops.mla.attention.mla_attention import mla_attention as eager

    LENT.now = True
    try:
        result = eager(
            plain(q),
            kv_cache,
            block_table,
            seq_lens,
            scale=scale,
            value_dim=value_dim,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            causal=causal,
            topk_indices=topk_indices,
            sinks=sinks,
            kv_scale=kv_scale if kv_scale_value is None else kv_scale_value,
            return_lse=return_lse,
            out=out,
            backend=backend,
        )
    finally:
        LENT.now = False
    return result if return_lse else (result, result.new_empty(0, dtype=torch.float32))


def _mutating(*arguments: Any) -> Tensor:
    return _run(*arguments)[1]


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, value_dim, return_lse = arguments[0], arguments[8], arguments[13]
    lse = q.new_empty(lse_shape(q.shape) if return_lse else (0,), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], value_dim)), lse


def _fake_mutating(*arguments: Any) -> Tensor:
    return _fake(*arguments)[1]


_GIVEN = (
    "Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor? cu_seqlens_q, SymInt? max_seqlen_q, "
    "Tensor? topk_indices, float scale, int value_dim, bool causal, Tensor? sinks, float? kv_scale_value, "
    "Tensor? kv_scale, bool return_lse, str[]? backend"
)
define(f"mla_attention({_GIVEN}) -> (Tensor, Tensor)", _run, _fake)
define(f"mla_attention_out({_GIVEN}, Tensor(a!) out) -> Tensor", _mutating, _fake_mutating)
