"""The adapter interface of `mla_attention`."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.problem import MlaProblem


class MlaValues(NamedTuple):
    """The values of a call's features in normal form, as a kernel gets them.

    Attributes:
        scale: factor of q k^T.
        sinks: [H] or None.
        kv_scale: None unless the cache is fp8; then a float, or float32 of one element.
    """

    scale: float
    sinks: Tensor | None = None
    kv_scale: float | Tensor | None = None


class MlaAdapter(abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static: tiles, branches, a library's handle.
    2. In `launch` run the kernel into `out` (and `lse`, if it is given) and return nothing.
    3. If the kernel plans on the host, do that in `begin`, keep the result in ``step.state``, and say
       ``reads_lengths=True`` in its record.

    The op has checked everything its contract says before any of them is called. Operands may have any strides.
    """

    def __init__(self, problem: MlaProblem) -> None:
        self.problem = problem
        self._q = (getattr(torch, problem.q_dtype), (problem.num_heads, problem.head_dim))
        self._kv = (getattr(torch, problem.kv_dtype), (problem.page_size, problem.head_dim))

    def begin(self, step: PagedStep) -> None:
        """Plan for one step on the host, if the kernel has to."""
        step.state = None

    @abc.abstractmethod
    def launch(
        self,
        q: Tensor,
        kv_cache: Tensor,
        topk_indices: Tensor | None,
        step: PagedStep,
        values: MlaValues,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Run into `out` and `lse`; q is never empty.

        Args:
            q: [num_seqs, H, D], [num_seqs, tokens, H, D], or [T, H, D] if ragged.
            kv_cache: [num_pages, page_size, D], the latent before the rotary part.
            topk_indices: int32 [T, topk] if sparse, one row per token of q; -1 for none.
            step: lengths and tables.
            values: of the features.
            out: as q with value_dim in the place of D.
            lse: float32 [H, T], or [num_seqs, H, tokens]; None if it is not wanted.
        """

    def again(self, step: PagedStep, values: MlaValues) -> Callable[..., bool] | None:
        """As `AttentionAdapter.again`; given q, kv_cache, `out`, the block table and the lengths."""
        return None

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Device memory beyond the operands that calls within these bounds take, at most.

        `max_kv_len` is topk if the problem is sparse.
        """
        return 0

    @property
    def repeats(self) -> bool:
        """As `AttentionAdapter.repeats`."""
        return type(self).again is not MlaAdapter.again and "launch" not in vars(self)

    @property
    def plans_steps(self) -> bool:
        """Whether `begin` does anything."""
        return type(self).begin is not MlaAdapter.begin
