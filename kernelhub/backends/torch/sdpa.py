"""`scaled_dot_product_attention` for batched tensors; torch picks among its own kernels.

torch aligns a causal mask top left. Bottom right is asked for by its `causal_lower_right` bias where there
are more keys than queries; where there are fewer, the queries that see no key are cut off first.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem


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
        self.check_operands(q, k, v)
        causal = values.window_right == 0
        blind = max(0, q.shape[1] - k.shape[1]) if causal else (0 if k.shape[1] else q.shape[1])
        out[:, :blind] = 0.0
        if blind == q.shape[1]:
            return
        rows = q[:, blind:].transpose(1, 2)
        tokens, length = rows.shape[2], k.shape[1]
        square = tokens == length
        out[:, blind:] = scaled_dot_product_attention(
            rows,
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=causal_lower_right(tokens, length) if causal and not square else None,
            is_causal=causal and square,
            scale=values.scale,
            enable_gqa=self.problem.group_size > 1,
        ).transpose(1, 2)
