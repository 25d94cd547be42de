"""`scaled_dot_product_attention` for batched tensors; torch picks among its own kernels.

torch aligns a causal mask top left. Its `causal_lower_right` bias requests bottom right where there
are more keys than queries; where there are fewer, the queries that see no key are cut off first, and the others copied:
on an H200 (d 256, float16, 276 queries, 127 keys) the rows of such a slice came back as NaN.

torch selects among its kernels by sizes, not by addresses. A tensor that begins off 16 bytes, or has a stride that is
no multiple of them, ends in "misaligned address", which loses the device, or in "no kernel found to launch". Such
operands are copied.

torch's flash attention for CPUs gives numbers in 16 bits where a score is infinite (torch 2.13). So where one may be,
the scores are computed one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kernelhub.backends.shared.operands import aligned, is_row_major, positive_scale
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem
from kernelhub.ops.precision import without_autocast


class Sdpa(AttentionAdapter[AttentionProblem, DenseStep]):
    """Batched `attention` by torch."""

    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: DenseStep,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        causal = values.window_right == 0
        blind = max(0, q.shape[1] - k.shape[1]) if causal else (0 if k.shape[1] else q.shape[1])
        out[:, :blind] = 0.0
        if blind < q.shape[1]:
            seeing = q[:, blind:].contiguous() if blind else q
            out[:, blind:] = self._attend(seeing, k, v, values.scale, causal)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, step: DenseStep, values: Values) -> Tensor:
        causal = values.window_right == 0
        if not k.shape[1] or (causal and k.shape[1] < q.shape[1]):
            return super().compute(q, k, v, step, values)
        return self._attend(q, k, v, values.scale, causal).contiguous()

    @without_autocast
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        """Attention of queries that all see a key."""
        q, scale = positive_scale(q, scale)  # torch's CUDA kernels give NaN for others
        square = q.shape[1] == k.shape[1]
        bias: Any = causal_lower_right(q.shape[1], k.shape[1]) if causal and not square else None
        q, k, v = (_readable(one).transpose(1, 2) for one in (q, k, v))
        features: dict[str, Any] = {
            "is_causal": causal and square,
            "scale": scale,
            "enable_gqa": self.problem.group_size > 1,
        }
        if q.is_cpu and q.dtype is not torch.float32 and _may_be_infinite(q, k, scale):
            mask = None if bias is None else bias._materialize(q.device)
            return torch._scaled_dot_product_attention_math(q, k, v, mask, **features)[0].transpose(1, 2)
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, **features).transpose(1, 2)


def _may_be_infinite(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether a score may exceed float32, or not be a number."""
    most = abs(scale) * q.shape[-1]
    for one in (q, k):
        low, high = torch.aminmax(one)
        most *= max(-float(low), float(high))  # both are NaN if one element is
    return not most < torch.finfo(torch.float32).max


def _readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that every kernel of torch's can read; a contiguous one gains nothing from a copy."""
    return tensor if is_row_major(tensor) else aligned(tensor)
