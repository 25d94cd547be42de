"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.operators import define, names_of

_Names = list[str] | None


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    state_indices: Tensor | None = None,
    out: Tensor | None = None,
    out_state: Tensor | None = None,
    return_state: bool = False,
    backend: Backend = None,
) -> Any:
    """`kernelhub.linear_attention` through its operators."""
    operands = (q, k, v, decay, state, cu_seqlens, scale, state_indices, names_of(backend))
    ops = torch.ops.kernelhub
    if out is None and out_state is None:
        if return_state:
            return ops.linear_attention_state.default(*operands)
        return ops.linear_attention.default(*operands)
    if out is None:
        out = v.new_empty(v.shape)
    if out_state is None and return_state:
        out_state = _new_states(q, v, decay, cu_seqlens)
        ops.linear_attention_out.default(*operands, True, out, out_state)
        return out, out_state
    ops.linear_attention_out.default(*operands, False, out, out_state)
    return out if out_state is None else (out, out_state)


def _result(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    state_indices: Tensor | None,
    backend: _Names,
) -> Tensor:
    from kernelhub.ops.linear_attention.linear_attention import linear_attention as eager

    result: Tensor = eager(plain(q), k, v, decay, state, cu_seqlens, scale, state_indices, backend=backend)
    return result


def _both(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    state_indices: Tensor | None,
    backend: _Names,
) -> tuple[Tensor, Tensor]:
    from kernelhub.ops.linear_attention.linear_attention import linear_attention as eager

    out, states = eager(
        plain(q), k, v, decay, state, cu_seqlens, scale, state_indices, return_state=True, backend=backend
    )
    return out, states


def _mutating(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    state_indices: Tensor | None,
    backend: _Names,
    apart: bool,
    out: Tensor,
    out_state: Tensor | None,
) -> None:
    """`apart`: out_state has a place for each sequence, whatever the indices."""
    from kernelhub.ops.linear_attention.linear_attention import linear_attention as eager

    operands = (plain(q), k, v, decay, state, cu_seqlens, scale, state_indices, out)
    if apart and out_state is not None:
        out_state.copy_(eager(*operands, return_state=True, backend=backend)[1])
    else:
        eager(*operands, out_state, backend=backend)


def _fake_result(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    return v.new_empty(v.shape)


def _fake_both(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Any, cu_seqlens: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), _new_states(q, v, decay, cu_seqlens)


def _new_states(q: Tensor, v: Tensor, decay: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return decay.new_empty((sequences, q.shape[-2], q.shape[-1], v.shape[-1]))


_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? state, Tensor? cu_seqlens, float scale, Tensor? state_indices,"
    " str[]? backend"
)
define(f"linear_attention({_OPERANDS}) -> Tensor", _result, _fake_result)
define(f"linear_attention_state({_OPERANDS}) -> (Tensor, Tensor)", _both, _fake_both)
define(f"linear_attention_out({_OPERANDS}, bool apart, Tensor(a!) out, Tensor(b!)? out_state) -> ()", _mutating)
