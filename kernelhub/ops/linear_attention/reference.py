"""`linear_attention` in plain torch: the recurrence, token by token."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.precision import at_own_precision


@at_own_precision
def linear_attention_reference(
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
    *,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The op, computed in `dtype` and returned in it; arguments as of the op, `out` ignored.

    Rows past the last offset are 0. With `out_state` the state that is returned is a copy of it with the slots of these
    sequences replaced.
    """
    if cu_seqlens is None:
        parts = [(q[index], k[index], v[index]) for index in range(q.shape[0])]
    else:
        offsets = cu_seqlens.tolist()
        parts = [(q[a:b], k[a:b], v[a:b]) for a, b in itertools.pairwise(offsets)]
    slots = list(range(len(parts))) if state_indices is None else state_indices.tolist()
    results, states = [], []
    for slot, (qs, ks, vs) in zip(slots, parts, strict=True):
        first = None if state is None or slot < 0 else state[slot]
        made, last = _recurrence(qs, ks, vs, decay, first, scale, dtype)
        results.append(made)
        states.append(last)
    if cu_seqlens is None:
        result = torch.stack(results) if results else v.new_empty(v.shape, dtype=dtype)
    else:
        result = torch.zeros(v.shape, dtype=dtype, device=v.device)
        if results:
            result[: offsets[-1]] = torch.cat(results)
    if not return_state and out_state is None:
        return result
    if out_state is None:
        shape = (0, q.shape[-2], q.shape[-1], v.shape[-1])
        return result, torch.stack(states) if states else v.new_empty(shape, dtype=dtype)
    kept = out_state.to(dtype, copy=True)
    for slot, last in zip(slots, states, strict=True):
        if slot >= 0:
            kept[slot] = last
    return result, kept


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of one sequence: q, k [S, H, D], v [S, H, Dv]; the result and the last state [H, D, Dv]."""
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    factor = (-decay.to(dtype)).exp()[:, None, None]
    current = q.new_zeros(*q.shape[1:], v.shape[-1]) if state is None else state.to(dtype)
    result = torch.empty_like(v)
    for token in range(q.shape[0]):
        current = factor * current + k[token, :, :, None] * v[token, :, None, :]
        result[token] = scale * (q[token, :, None, :] @ current).squeeze(1)
    return result, current
