"""From a call of `attention` to cuDNN: batched tensors too are packed sequences, of equal lengths."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.cudnn.blank import blank_kernel
from kernelhub.backends.cudnn.graphs import Graphs, Shape, Uid, bound
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem

_BLOCK = 1024  # elements that a program blanks at a time


class Sdpa(AttentionAdapter[AttentionProblem, DenseStep]):
    """`attention` by cuDNN."""

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._graphs = Graphs(problem)

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
        if q.ndim == 4 and not k.shape[1]:  # cuDNN gives NaN where there are no keys
            out.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
            return
        with _device_of(q):
            if q.ndim == 4:
                sequences, q_tokens, k_tokens = q.shape[0], q.shape[1], k.shape[1]
                q_at = torch.arange(0, q.shape[0] * q_tokens + 1, q_tokens, dtype=torch.int32, device=q.device)
                k_at = torch.arange(0, k.shape[0] * k_tokens + 1, k_tokens, dtype=torch.int32, device=q.device)
            else:
                assert step.cu_seqlens_q is not None
                assert step.cu_seqlens_k is not None
                sequences, q_at, k_at = step.num_seqs, step.cu_seqlens_q, step.cu_seqlens_k
                q_tokens = q.shape[0] if step.max_seqlen_q is None else min(q.shape[0], step.max_seqlen_q)
                k_tokens = k.shape[0] if step.max_seqlen_k is None else min(k.shape[0], step.max_seqlen_k)
            if sequences:
                self._run(q, k, v, (q_at, k_at), (sequences, q_tokens, k_tokens), values, out, lse)

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: tuple[Tensor, Tensor],
        sizes: tuple[int, int, int],
        values: Values,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        problem, scale = self.problem, values.scale
        if scale <= 0:  # cuDNN takes the maximum before it scales
            q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
        q, k, v = _packed(q), _packed(k), _packed(v)
        heads, width = problem.num_q_heads, problem.head_dim_vo
        result = _flat(out)
        direct = result is not None and result.is_contiguous() and result.data_ptr() % 16 == 0
        if result is None or not direct:
            result = out.new_empty(q.shape[0], heads, width)
            if out.ndim == 3:
                result.copy_(out)  # tokens past the last offset stay as they are
        sequences = bound_of_sequences(sizes[0])
        q_at, k_at = (_padded(at, sequences + 1) for at in offsets)
        wide = max(t.shape[0] * t.stride(0) for t in (q, k, v, result)) >= 1 << 31
        q_bound = bound(sizes[1])
        shape = Shape(
            sequences,
            q_bound,
            max(q_bound, bound(sizes[2])),  # a band aligned bottom right asks for no fewer
            (q.stride(0), q.stride(1)),
            (k.stride(0), k.stride(1)),
            (v.stride(0), v.stride(1)),
            wide,
            float(scale),
            values.window_left,
            values.window_right,
        )
        q_wide, k_wide = (q_at.long(), k_at.long()) if wide else (q_at, k_at)
        tensors: dict[int, Any] = {
            Uid.Q: q,
            Uid.K: k,
            Uid.V: v,
            Uid.Q_LENS: q_at.diff(),
            Uid.K_LENS: k_at.diff(),
            Uid.Q_AT: q_wide * q.stride(0),
            Uid.K_AT: k_wide * k.stride(0),
            Uid.V_AT: k_wide * v.stride(0),
            Uid.OUT: result,
            Uid.OUT_AT: q_wide * (heads * width),
        }
        stats = None
        if lse is not None:
            stats = torch.empty(q.shape[0], heads, dtype=torch.float32, device=q.device)
            tensors |= {Uid.LSE: stats, Uid.LSE_AT: q_wide * heads}
        self._graphs.run(shape, tensors)
        if problem.ragged:
            blank_kernel[(sequences,)](
                result, stats, q_at, k_at, heads * width, heads, HAS_LSE=stats is not None, BLOCK=_BLOCK
            )
        if not direct:
            out.copy_(result.view(out.shape))
        if lse is not None and stats is not None:
            lse.copy_(stats.T if out.ndim == 3 else stats.view(*out.shape[:3]).transpose(1, 2))


def bound_of_sequences(number: int) -> int:
    """A power of two that is no less; the added ones are empty."""
    return 1 << (number - 1).bit_length()


def _padded(offsets: Tensor, length: int) -> Tensor:
    """Offsets with sequences added that are empty."""
    if offsets.shape[0] == length:
        return offsets.contiguous()
    return torch.cat([offsets, offsets[-1:].expand(length - offsets.shape[0])])


def _flat(tensor: Tensor) -> Tensor | None:
    """[tokens, heads, width] of batched or packed tokens, or None where that is no view."""
    if tensor.ndim == 3:
        return tensor
    batch, tokens, heads, width = tensor.shape
    step, token, head, entry = tensor.stride()
    if step != tokens * token and batch > 1:
        return None
    return tensor.as_strided((batch * tokens, heads, width), (token, head, entry))


def _packed(tensor: Tensor) -> Tensor:
    """[tokens, heads, width] that cuDNN can read: rows side by side, steps of 16 bytes."""
    flat = _flat(tensor)
    if flat is not None:
        token, head, entry = flat.stride()
        if entry == 1 and token > 0 and head > 0 and (token | head) % 8 == 0 and flat.data_ptr() % 16 == 0:
            return flat
    return tensor.contiguous().view(-1, *tensor.shape[-2:])


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """cuDNN's handles belong to the current device, so that must be the operands' one."""
    if tensor.is_cuda and torch.cuda.current_device() != tensor.get_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
