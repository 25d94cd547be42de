"""The adapter interface of the indexer's ops."""

from __future__ import annotations

import abc
from collections.abc import Hashable

from torch import Tensor

from kernelhub.ops.indexer.problem import LogitsProblem, PagedLogitsProblem, TopKProblem
from kernelhub.ops.known_calls import Repeatable


class LogitsAdapter(Repeatable, abc.ABC):
    """A kernel of `mqa_logits`, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static.
    2. In `launch` write every element of `out` and return nothing.

    The op has checked what its contract says. Tensors may have any strides.
    """

    def __init__(self, problem: LogitsProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(
        self,
        q: Tensor,
        k: Tensor,
        k_scale: Tensor | None,
        weights: Tensor,
        cu_seqlen_ks: Tensor,
        cu_seqlen_ke: Tensor,
        out: Tensor,
    ) -> None:
        """q [T, H, D]; k [S, D]; k_scale [S]; weights [T, H]; ranges [T]; out [T, S], T and S > 0."""


class PagedLogitsAdapter(Repeatable, abc.ABC):
    """A kernel of `paged_mqa_logits`, made for one problem; as a `LogitsAdapter`.

    A cache whose pages hold values and scales comes as two views of it.
    """

    def __init__(self, problem: PagedLogitsProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(
        self,
        q: Tensor,
        k_cache: Tensor,
        k_scale_cache: Tensor | None,
        weights: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
    ) -> None:
        """q [B, N, H, D]; k_cache [P, page, D]; k_scale_cache [P, page]; weights [B * N, H]; out [B * N, L].

        Entries of the table beyond a sequence's length may hold anything.
        """


class TopKAdapter(Repeatable, abc.ABC):
    """A kernel of `topk_indices`, made for one problem; as a `LogitsAdapter`."""

    def __init__(self, problem: TopKProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(self, logits: Tensor, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor) -> None:
        """logits float32 [T, S], S may be 0; row_starts and row_ends [T]; out int32 [T, k], T > 0."""

    @staticmethod
    def identified(
        logits: Tensor, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor
    ) -> tuple[Hashable, tuple[Tensor, ...]]:
        """The key and the tensors of a call whose launches may be repeated."""
        return logits.shape, tuple(one for one in (logits, row_starts, row_ends, out) if one is not None)

    def workspace_bytes(self, num_tokens: int, max_kv_len: int) -> int:
        """Device memory that a call with T and S up to these takes beyond operands and result."""
        return 0
