"""FlashAttention-2 that torch ships, of ragged sequences: what `torch.nn.attention.varlen.varlen_attn` runs.

The operator is called itself. `varlen_attn` may take cuDNN instead from torch 2.14 on, has an argument for grouped
heads only from 2.13 on, and goes through a custom operator that fills memory of random numbers' state in each call.

It takes a side of a window that is no narrower than the bound on keys for one without a limit, and that for the bound:
both are wrong for sequences of more queries than that, so no bound on keys is below the one on queries. It takes the
largest score before it scales, reads 16 bytes at once without checking, gives an LSE of +inf where a row
sees no key, and, for a bound of one query, takes heads for queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from kernelhub.backends.shared.operands import aligned, most_tokens, positive_scale
from kernelhub.backends.shared.operators import mismatch
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem
from kernelhub.ops.precision import without_autocast

_NAME = "_flash_attention_forward"
# As torch 2.11, 2.13 and 2.14 declare it, up to what is passed.
SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None) -> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
    "Tensor debug_attn_mask)"
)
_NO_LIMIT = 1 << 30  # a wider window sees everything; sums of positions stay within 32 bits


class VarlenAttn(AttentionAdapter[AttentionProblem, DenseStep]):
    """`attention`, batched as ragged of equal lengths."""

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._forward = getattr(torch.ops.aten, _NAME).default
        reason = mismatch(self._forward._schema, f"aten::{_NAME}", SCHEMA)
        if reason is not None:
            raise ImportError(f"torch.ops.aten.{_NAME} {reason}")
        other = current_flash_attention_impl()
        if other is not None:
            raise ImportError(f"{other} has been activated in torch, and runs in place of FlashAttention-2")

    @without_autocast
    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, step: DenseStep, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        if step.cu_seqlens_q is None or step.cu_seqlens_k is None:
            batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
            offsets = _every(queries, batch, q), _every(keys, batch, q)
            bounds = queries, keys
        else:
            offsets = step.cu_seqlens_q.contiguous(), step.cu_seqlens_k.contiguous()
            bounds = most_tokens(step.max_seqlen_q, q.shape[0]), most_tokens(step.max_seqlen_k, k.shape[0])
        ragged = step.cu_seqlens_q is not None
        if not k.shape[-3]:
            made, found = torch.zeros_like(out), None
        else:
            q, k, v = (tensor if ragged else tensor.flatten(0, 1) for tensor in (q, k, v))
            made, found = self._attend(q, k, v, offsets, bounds, values)
            made = made.view(out.shape)
        if ragged:  # tokens past the last sequence are left as they are
            within = torch.arange(out.shape[0], device=out.device) < offsets[0][-1]
            made = torch.where(within[:, None, None], made, out)
        out.copy_(made)
        if lse is not None:
            if found is None:
                lse.fill_(-torch.inf)
            else:
                lse.copy_(found if ragged else found.unflatten(1, (batch, queries)).transpose(0, 1))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Tensor, Tensor], bounds: tuple[int, int], values: Values
    ) -> tuple[Tensor, Tensor]:
        """Result [T, H, D] and LSE [H, T] of ragged operands."""
        q, scale = positive_scale(q, values.scale)
        left, right = (min(side, _NO_LIMIT) for side in (values.window_left, values.window_right))
        queries = max(2, bounds[0])
        made, found, *_ = self._forward(
            aligned(q),
            aligned(k),
            aligned(v),
            *offsets,
            queries,
            max(queries, bounds[1]) if right != 0 and max(left, right) >= 0 else bounds[1],
            0.0,
            left < 0 and right == 0,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return made, torch.where(found == torch.inf, -torch.inf, found)

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """The result and its LSE, twice each where tokens past the last sequence are kept."""
        return 2 * num_tokens * self.problem.num_q_heads * (2 * self.problem.head_dim_vo + 4)


def _every(length: int, count: int, like: Tensor) -> Tensor:
    """Offsets of so many sequences of one length."""
    if not length:
        return torch.zeros(count + 1, dtype=torch.int32, device=like.device)
    return torch.arange(0, count * length + 1, length, dtype=torch.int32, device=like.device)
