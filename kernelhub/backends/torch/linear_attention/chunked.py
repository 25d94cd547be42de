"""Linear attention in chunks of tokens, in float32.

    out = scale * (((q k^T) * decays between tokens) v + decay since the chunk's start * q state)
    state = decay of the chunk * state + (k * decay until the chunk's end)^T v

All powers of the decay have exponents from 0 down, so none overflows.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kernelhub.ops.host import on_host
from kernelhub.ops.linear_attention.adapter import LinearAdapter, States
from kernelhub.ops.precision import at_own_precision

_CHUNK = 64


class Chunked(LinearAdapter):
    """`linear_attention` anywhere."""

    @at_own_precision
    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        states: States,
        out: Tensor,
    ) -> None:
        if cu_seqlens is None:
            current = self._before(states, slice(None), q.shape[0], decay)
            current = _chunks(q, k, v, decay, scale, current, out)
            _keep(states, slice(None), current)
            return
        offsets = on_host(cu_seqlens, "cu_seqlens")
        for index, (first, last) in enumerate(itertools.pairwise(offsets)):
            one, rows = slice(index, index + 1), slice(first, last)
            current = self._before(states, one, 1, decay)
            qs, ks, vs, result = (tensor[rows].unsqueeze(0) for tensor in (q, k, v, out))
            current = _chunks(qs, ks, vs, decay, scale, current, result)
            _keep(states, one, current)

    def _before(self, states: States, sequences: slice, count: int, decay: Tensor) -> Tensor:
        """[count, H, D, Dv] of some sequences, in memory of its own."""
        problem = self.problem
        if states.before is None:
            return decay.new_zeros(count, problem.num_heads, problem.head_dim, problem.value_dim)
        if states.before_at is None:
            return states.before[sequences].clone(memory_format=torch.contiguous_format)
        slots = states.before_at[sequences].long()
        if states.before.shape[0] == 0:
            return decay.new_zeros(count, *states.before.shape[1:])
        nowhere = (slots < 0) | (slots >= states.before.shape[0])
        found = states.before[slots.masked_fill(nowhere, 0)].contiguous()
        if nowhere.any():
            found.masked_fill_(nowhere[:, None, None, None], 0.0)
        return found


def _chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, scale: float, state: Tensor, out: Tensor) -> Tensor:
    """The state [N, H, D, Dv] after q, k, v [N, S, H, ...], whose result goes to out.

    The one given, contiguous, is used up: it is written by a view of it.
    """
    token = torch.arange(min(_CHUNK, q.shape[1]), device=q.device)
    gap = (token[:, None] - token[None, :]).float()
    between = torch.where(gap >= 0, (-decay[:, None, None] * gap.clamp(min=0)).exp(), 0.0)
    since = (-decay[:, None] * (token + 1)).exp()[..., None]
    for first in range(0, q.shape[1], _CHUNK):
        rows = slice(first, min(first + _CHUNK, q.shape[1]))
        qs, ks, vs = (tensor[:, rows].transpose(1, 2).float() for tensor in (q, k, v))
        size = qs.shape[2]
        scores = (qs @ ks.transpose(2, 3)).mul_(between[:, :size, :size])
        result = (scores @ vs).add_((qs @ state).mul_(since[:, :size]))
        out[:, rows] = result.mul_(scale).transpose(1, 2)
        until = (-decay[:, None] * (size - 1 - token[:size])).exp()[..., None]
        state.mul_(since[:, size - 1, :, None])
        state.view(-1, *state.shape[2:]).baddbmm_((ks * until).transpose(2, 3).flatten(0, 1), vs.flatten(0, 1))
    return state


def _keep(states: States, sequences: slice, current: Tensor) -> None:
    if states.after is None:
        return
    if states.after_at is None:
        states.after.detach()[sequences] = current
        return
    slots = states.after_at[sequences].long()
    kept = (slots >= 0) & (slots < states.after.shape[0])
    states.after.detach()[slots[kept]] = current[kept]  # torch lets no tensor of inference mode itself be written
