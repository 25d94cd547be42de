"""The adapter interface of `attention` and `paged_attention`.

An adapter is a subclass of `AttentionAdapter`. To write one:

1. In `__init__(problem)` choose what is static: tiles, branches, a library's handle.
2. In `launch` run the kernel into `out` (and `lse`, if it is given) and return nothing.
3. If the library insists on allocating the result, override `compute` too, which spares the copy.
4. If the kernel plans on the host, do that in `begin`, keep the result in ``step.state``, and say
   ``reads_lengths=True`` in its record.

The op has checked everything its contract says before any of them is called, for calls, plans and steps alike, and
brought the values of the features into normal form (see `Values`). q, k, v and `out` may have any strides and begin
anywhere; lengths, offsets, sinks and scales are contiguous, and the rows of the block table are contiguous.
Entries of the block table past a sequence's pages, and pages and tokens that no sequence uses, may have any value.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kernelhub.dispatch.lost import failed
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import AttentionProblem
from kernelhub.ops.host import on_host
from kernelhub.ops.known_calls import Repeatable


class _Lent(threading.local):
    """Whether a call's tensors belong to a compiled graph, which may reuse their memory when the call returns.

    torch's CUDA-graph trees do not accept references to such tensors after the call, so no step made of them is kept.
    """

    now = False


LENT = _Lent()


def lent(run: Callable[[], Any]) -> Any:
    """Run a call whose tensors belong to a compiled graph."""
    LENT.now = True
    try:
        return run()
    finally:
        LENT.now = False


# Refuses values of a parameter of metadata, by its name, that contradict the step.
Check = Callable[[str, list[int]], None]


def _read(tensor: Tensor, parameter: str, check: Check | None) -> list[int]:
    """The values on the host, for kernels that plan there; reading values that are there costs almost nothing."""
    values = on_host(tensor, parameter)
    if check is not None:
        check(parameter, values)
    return values


class DenseStep:
    """Where the sequences of one `attention` call begin; there is nothing in it for batched tensors.

    Attributes:
        cu_seqlens_q: int32 [num_seqs + 1] on the device, or None for batched tensors.
        cu_seqlens_k: int32 [num_seqs + 1] on the device, or None for batched tensors.
        num_seqs: sequences, or 0 for batched tensors.
        max_seqlen_q: an upper bound that the caller gave, or None.
        max_seqlen_k: an upper bound that the caller gave, or None.
        known_q_offsets: the values of cu_seqlens_q, where they are known on the host.
        known_k_offsets: the values of cu_seqlens_k, where they are known on the host.
        state: whatever the adapter's `begin` keeps.
        outlives: whether later calls are given this step, too; see `outlive`.
    """

    __slots__ = (
        "_check",
        "cu_seqlens_k",
        "cu_seqlens_q",
        "known_k_offsets",
        "known_q_offsets",
        "max_seqlen_k",
        "max_seqlen_q",
        "num_seqs",
        "outlives",
        "state",
    )

    def __init__(
        self,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        q_offsets: list[int] | None = None,
        k_offsets: list[int] | None = None,
        check: Check | None = None,
    ) -> None:
        self._check = check
        self.cu_seqlens_q = cu_seqlens_q
        self.cu_seqlens_k = cu_seqlens_k
        self.max_seqlen_q = max_seqlen_q
        self.max_seqlen_k = max_seqlen_k
        self.known_q_offsets: list[int] | None = q_offsets
        self.known_k_offsets: list[int] | None = k_offsets
        self.num_seqs = 0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        self.state: Any = None
        self.outlives = False

    def is_of(
        self,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
    ) -> bool:
        """Whether it was made of these very tensors and bounds."""
        return (
            self.cu_seqlens_q is cu_seqlens_q
            and self.cu_seqlens_k is cu_seqlens_k
            and self.max_seqlen_q == max_seqlen_q
            and self.max_seqlen_k == max_seqlen_k
        )

    def outlive(self) -> None:
        """Serve later calls too, with other values in the same tensors: values read on the host are not kept."""
        self.outlives = True
        self.known_q_offsets = self.known_k_offsets = None

    def q_offsets(self) -> list[int]:
        """The values of cu_seqlens_q on the host; syncs if the caller did not give them."""
        if (offsets := self.known_q_offsets) is None:
            assert self.cu_seqlens_q is not None
            offsets = _read(self.cu_seqlens_q, "cu_seqlens_q", self._check)
            self.known_q_offsets = None if self.outlives else offsets
        return offsets

    def k_offsets(self) -> list[int]:
        """The values of cu_seqlens_k on the host; syncs if the caller did not give them."""
        if (offsets := self.known_k_offsets) is None:
            assert self.cu_seqlens_k is not None
            offsets = _read(self.cu_seqlens_k, "cu_seqlens_k", self._check)
            self.known_k_offsets = None if self.outlives else offsets
        return offsets


class PagedStep:
    """The metadata of one engine step of `paged_attention`, shared by its layers.

    Attributes:
        block_table: int32 [num_seqs, max_pages] on the device.
        seq_lens: int32 [num_seqs] on the device: KV tokens per sequence, the step's own included.
        cu_seqlens_q: int32 [num_seqs + 1] on the device, or None where every sequence has as many queries.
        num_seqs: sequences.
        max_pages: columns of the block table.
        max_seqlen_q: an upper bound on query tokens per sequence that the caller gave, or None.
        num_pages: pages of the cache that the block table was checked for, or 0 where its values were not looked at.
        known_q_offsets: the values of cu_seqlens_q, where they are known on the host.
        state: whatever the adapter's `begin` keeps.
        outlives: whether later calls are given this step, too; see `outlive`.
    """

    __slots__ = (
        "_check",
        "_lengths",
        "block_table",
        "cu_seqlens_q",
        "known_q_offsets",
        "max_pages",
        "max_seqlen_q",
        "num_pages",
        "num_seqs",
        "outlives",
        "seq_lens",
        "state",
    )

    def __init__(
        self,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        lengths: list[int] | None = None,
        q_offsets: list[int] | None = None,
        num_pages: int = 0,
        check: Check | None = None,
    ) -> None:
        self._check = check
        self.block_table = block_table
        self.seq_lens = seq_lens
        self.cu_seqlens_q = cu_seqlens_q
        self.max_seqlen_q = max_seqlen_q
        self.num_seqs, self.max_pages = block_table.shape
        self.state: Any = None
        self.outlives = False
        self._lengths = lengths
        self.known_q_offsets: list[int] | None = q_offsets
        self.num_pages = num_pages

    def is_of(
        self, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None
    ) -> bool:
        """Whether it was made of these very tensors and bound."""
        return (
            self.block_table is block_table
            and self.seq_lens is seq_lens
            and self.cu_seqlens_q is cu_seqlens_q
            and self.max_seqlen_q == max_seqlen_q
        )

    def outlive(self) -> None:
        """Serve later calls too, with other values in the same tensors: values read on the host are not kept."""
        self.outlives = True
        self._lengths = self.known_q_offsets = None

    def lengths(self) -> list[int]:
        """The values of seq_lens on the host; syncs if the caller did not give them."""
        if (lengths := self._lengths) is None:
            lengths = _read(self.seq_lens, "seq_lens", self._check)
            self._lengths = None if self.outlives else lengths
        return lengths

    def q_offsets(self) -> list[int]:
        """The values of cu_seqlens_q on the host; syncs if the caller did not give them."""
        if (offsets := self.known_q_offsets) is None:
            assert self.cu_seqlens_q is not None
            offsets = _read(self.cu_seqlens_q, "cu_seqlens_q", self._check)
            self.known_q_offsets = None if self.outlives else offsets
        return offsets


ProblemT = TypeVar("ProblemT", bound=AttentionProblem)
StepT = TypeVar("StepT", DenseStep, PagedStep)


class AttentionAdapter(Repeatable, abc.ABC, Generic[ProblemT, StepT]):
    """A kernel of an attention op, made for one problem."""

    def __init__(self, problem: ProblemT) -> None:
        self.problem = problem
        # dtype, and the last dimensions, of each operand
        self._q = (getattr(torch, problem.q_dtype), (problem.num_q_heads, problem.head_dim_qk))
        kv_dims: tuple[int, ...] = problem.kv_dims
        kv_dtype: torch.dtype = getattr(torch, problem.kv_dtype)
        self._k = (kv_dtype, (*kv_dims, problem.head_dim_qk))
        self._v = (kv_dtype, (*kv_dims, problem.head_dim_vo))

    def begin(self, step: StepT) -> None:
        """Plan for one step on the host, if the kernel has to."""

    @abc.abstractmethod
    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: StepT,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Run into `out` and `lse`. Shapes are those of the op's docstring; q is never empty."""

    def again(self, step: StepT, values: Values) -> Callable[..., bool] | None:
        """What makes the launches of a call like one before, of this step and these values, with nothing checked again.

        It takes the tensors of `optional_tensors`, the LSE if the problem has one, q, k, v, `out`, the block table and
        the lengths, and returns whether it made the launches. It makes none unless each has type, dtype, device, sizes
        and strides as in one call that `launch` was given, with as many sequences and with these values and bounds, and
        `out` shares no memory with the others. None where calls are not repeated.
        """
        return None

    def compute(self, q: Tensor, k: Tensor, v: Tensor, step: StepT, values: Values) -> Tensor:
        """Run and return the result, contiguous, for a call without `out` and LSE; q is never empty."""
        out = q.new_empty(*q.shape[:-1], self.problem.head_dim_vo)
        self.launch(q, k, v, step, values, out, None)
        return out

    @property
    def allocates(self) -> bool:
        """Whether `compute` does better than `launch` into a new tensor."""
        return type(self).compute is not AttentionAdapter.compute

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Device memory beyond the operands that calls within these bounds take, at most."""
        return 0

    @property
    def repeats(self) -> bool:
        """Whether `again` may give something. An audit, which replaces `launch`, sees all calls."""
        return type(self).again is not AttentionAdapter.again and "launch" not in vars(self)

    @property
    def plans_steps(self) -> bool:
        """Whether `begin` does anything."""
        return type(self).begin is not AttentionAdapter.begin


def plan_step(adapter: Any, step: StepT) -> StepT:
    """The step, for which the kernel has planned."""
    try:
        adapter.begin(step)
    except Exception as error:
        failed(adapter.begin, error)
        raise
    return step
