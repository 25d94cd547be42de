"""The attention ops under torch.compile, torch.export and fake tensors.

Traced code sees one opaque operator per op, so no graph can freeze a choice: the operator dispatches when
it runs, under the policy of that moment. Eager calls never come here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import lse_shape, plain
from kernelhub.ops.attention.adapter import LENT
from kernelhub.ops.attention.arguments import Scale, Window, any_tensor
from kernelhub.ops.operators import define, names_of

_FEATURES = (
    "bool causal, int[]? window, float? softcap, Tensor? sinks, float? scale, float? k_scale_value, "
    "Tensor? k_scale, float? v_scale_value, Tensor? v_scale"
)
_OPERANDS = {
    "attention": "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k",
    "paged_attention": "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor? cu_seqlens_q, SymInt? max_seqlen_q, str kv_layout",
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Any:
    """`kernelhub.attention` through its operator."""
    any_tensor("attention", q=q, k=k, v=v)
    operands = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    features = _flat_features(causal, window, softcap, sinks, scale, k_scale, v_scale)
    ops = torch.ops.kernelhub
    return _call(ops.attention, ops.attention_out, (*operands, *features), return_lse, backend, out)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Any:
    """`kernelhub.paged_attention` through its operator."""
    any_tensor("paged_attention", q=q, k_cache=k_cache, v_cache=v_cache)
    operands = (q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, kv_layout)
    features = _flat_features(causal, window, softcap, sinks, scale, k_scale, v_scale)
    ops = torch.ops.kernelhub
    return _call(ops.paged_attention, ops.paged_attention_out, (*operands, *features), return_lse, backend, out)


def _flat_features(
    causal: bool,
    window: Window,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    k_scale: Scale,
    v_scale: Scale,
) -> tuple[Any, ...]:
    """The features as an operator's schema can hold them: scales split into value and tensor."""
    left_right = None if window is None else [window, -1] if isinstance(window, int) else list(window)
    k_split = (None, k_scale) if isinstance(k_scale, Tensor) else (k_scale, None)
    v_split = (None, v_scale) if isinstance(v_scale, Tensor) else (v_scale, None)
    return (causal, left_right, softcap, sinks, scale, *k_split, *v_split)


def _call(
    functional: Any,
    mutating: Any,
    arguments: tuple[Any, ...],
    return_lse: bool,
    backend: Backend,
    out: Tensor | None,
) -> Any:
    names = names_of(backend)
    if out is None:
        result, lse = functional.default(*arguments, return_lse, names)
    else:
        result, lse = out, mutating.default(*arguments, return_lse, names, out)
    return (result, lse) if return_lse else result


def _features_by_name(
    causal: bool,
    window: list[int] | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    k_scale_value: float | None,
    k_scale: Tensor | None,
    v_scale_value: float | None,
    v_scale: Tensor | None,
    return_lse: bool,
    backend: list[str] | None,
    out: Tensor | None = None,
) -> dict[str, Any]:
    """The features as the public functions take them."""
    return {
        "causal": causal,
        "window": None if window is None else tuple(window),
        "softcap": softcap,
        "sinks": sinks,
        "scale": scale,
        "k_scale": k_scale if k_scale_value is None else k_scale_value,
        "v_scale": v_scale if v_scale_value is None else v_scale_value,
        "return_lse": return_lse,
        "backend": None if backend is None else tuple(backend),
        "out": out,
    }


def _run_attention(*arguments: Any) -> Any:
    from kernelhub.ops.attention.attention import attention as eager

    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *features = arguments
    return eager(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        **_features_by_name(*features),
    )


def _run_paged_attention(*arguments: Any) -> Any:
    from kernelhub.ops.attention.paged_attention import paged_attention as eager

    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, kv_layout, *features = arguments
    return eager(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        kv_layout=kv_layout,
        **_features_by_name(*features),
    )


def _lse_of(result: Any) -> Tensor:
    lse: Tensor = result[1] if isinstance(result, tuple) else result.new_empty(0, dtype=torch.float32)
    return lse


def _run_lent(run: Any, q: Tensor, *arguments: Any) -> Any:
    LENT.now = True
    try:
        return run(plain(q), *arguments)
    finally:
        LENT.now = False


def _functional(run: Any) -> Any:
    def implementation(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        result = _run_lent(run, q, *arguments)
        return (result[0] if isinstance(result, tuple) else result), _lse_of(result)

    return implementation


def _mutating(run: Any) -> Any:
    def implementation(q: Tensor, *arguments: Any) -> Tensor:
        return _lse_of(_run_lent(run, q, *arguments))

    return implementation


def _fake(q: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(lse_shape(q.shape) if return_lse else (0,), dtype=torch.float32)


def _fake_functional(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _fake(arguments[0], arguments[2], arguments[-2])


def _fake_mutating(*arguments: Any) -> Tensor:
    return _fake(arguments[0], arguments[2], arguments[-3])[1]


for _name, _run in (("attention", _run_attention), ("paged_attention", _run_paged_attention)):
    _given = f"{_OPERANDS[_name]}, {_FEATURES}, bool return_lse, str[]? backend"
    define(f"{_name}({_given}) -> (Tensor, Tensor)", _functional(_run), _fake_functional)
    define(f"{_name}_out({_given}, Tensor(a!) out) -> Tensor", _mutating(_run), _fake_mutating)
