"""`attention` by operators of xformers, each named by its class.

They take batched tensors with a mask for all, or one batch of packed sequences with a block-diagonal mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from xformers import _cpp_lib
from xformers.ops.fmha import (
    cutlass,
    flash,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)
from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

from kernelhub.backends.shared.operands import aligned, on_device_of, positive_scale
from kernelhub.backends.xformers.masks import Sequences, sequences
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem


class Xformers(AttentionAdapter[AttentionProblem, DenseStep]):
    """Shared by the operators.

    Attributes:
        operator: xformers' class of it.
        repeats: whether keys and values are copied for every head of a group, which otherwise reads them in place.
    """

    operator: Any
    repeats = False

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        if problem.device.type == "cuda" and not _cpp_lib._built_with_cuda:
            raise ImportError(
                "xformers cannot load its own library with this torch, and then rejects every call on a GPU, also "
                f"for torch's kernels ({_cpp_lib._cpp_library_load_exception!r}); install a build for this torch"
            )
        if not self.operator.is_available():
            raise ImportError(f"xformers has no {self.operator.NAME} with this torch")

    def begin(self, step: DenseStep) -> None:
        if step.cu_seqlens_q is not None:
            step.state = sequences(step.q_offsets(), step.k_offsets(), self.problem.causal, step.cu_seqlens_q.device)

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, step: DenseStep, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        q, scale = positive_scale(q, values.scale)
        values = values._replace(scale=scale)
        with on_device_of(q):
            if step.cu_seqlens_q is None:
                self._batched(q, k, v, values, out, lse)
            else:
                if step.state is None:
                    self.begin(step)
                self._ragged(q, k, v, step.state, values, out, lse)

    def _batched(self, q: Tensor, k: Tensor, v: Tensor, values: Values, out: Tensor, lse: Tensor | None) -> None:
        queries, keys = q.shape[1], k.shape[1]
        causal = values.window_right == 0
        blind = max(0, queries - keys) if causal else 0 if keys else queries
        out[:, :blind] = 0.0
        if lse is not None:
            lse[:, :, :blind] = -torch.inf
        if blind == queries:
            return
        bias = LowerTriangularFromBottomRightMask() if causal else None
        made, found = self._attend(q[:, blind:], k, v, bias, values.scale, lse is not None)
        out[:, blind:] = made
        if lse is not None and found is not None:
            lse[:, :, blind:] = found

    def _ragged(
        self, q: Tensor, k: Tensor, v: Tensor, of: Sequences, values: Values, out: Tensor, lse: Tensor | None
    ) -> None:
        own, own_lse = out[: of.queries], None if lse is None else lse[:, : of.queries]
        if of.seeing < of.queries:
            own.zero_()
            if own_lse is not None:
                own_lse.fill_(-torch.inf)
        if of.mask is None:
            return
        bias = of.mask.make_causal_from_bottomright() if values.window_right == 0 else of.mask
        picked = q[: of.queries] if of.rows is None else q.index_select(0, of.rows)
        operands = (picked[None], k[None, : of.keys], v[None, : of.keys])
        made, found = self._attend(*operands, bias, values.scale, lse is not None)
        if of.rows is None:
            own.copy_(made[0])
        else:
            own.index_copy_(0, of.rows, made[0])
        if own_lse is not None and found is not None:
            if of.rows is None:
                own_lse.copy_(found[0])
            else:
                own_lse.index_copy_(1, of.rows, found[0])

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Any, scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Result [B, S, H, DV], and LSE [B, H, S] if it is wanted, where every query sees a key."""
        batch, queries, heads, _ = q.shape
        kv_heads = k.shape[2]
        q, k, v = aligned(q), aligned(k), aligned(v)
        if heads != kv_heads:
            k, v = (tensor.unsqueeze(3).expand(-1, -1, -1, heads // kv_heads, -1) for tensor in (k, v))
            if self.repeats:
                k, v = aligned(k.flatten(2, 3)), aligned(v.flatten(2, 3))
            else:
                q = q.unflatten(2, (kv_heads, -1))
        if wants_lse:
            made, found = memory_efficient_attention_forward_requires_grad(q, k, v, bias, 0.0, scale, op=self.operator)
            return made.reshape(batch, queries, heads, -1), found.reshape(batch, heads, queries)
        made = memory_efficient_attention_forward(q, k, v, bias, 0.0, scale, op=self.operator)
        return made.reshape(batch, queries, heads, -1), None

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """The result and its LSE; and keys and values of every head, where they are copied."""
        problem = self.problem
        copies = 2 * (problem.head_dim_qk + problem.head_dim_vo) * max(1, num_seqs) * max_kv_len if self.repeats else 0
        return problem.num_q_heads * (num_tokens * (2 * problem.head_dim_vo + 4) + copies)


class Flash(Xformers):
    """FlashAttention-2."""

    operator = flash.FwOp


class Cutlass(Xformers):
    """The CUTLASS kernel that torch has from xformers. Groups of heads would run one after the other."""

    operator = cutlass.FwOp
    repeats = True
