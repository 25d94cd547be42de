"""Checks of q, k, v and `out` before the launch of an attention op, once per form.

A call's key and a step's `begin` check most of it; a plan's `run` has no key. So this module checks all of it, once per
form of tensors, and `KnownForm` recognises later tensors of that form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, contiguous_format, empty_like

from kernelhub.errors import InvalidArgument, KernelhubError
from kernelhub.ops.arguments import dtype_name, refuse
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import refuse_grad, same_device
from kernelhub.ops.attention.problem import ONE, AttentionProblem, PagedAttentionProblem
from kernelhub.ops.attention.step_values import check_step_values
from kernelhub.ops.known_form import KnownForm, Sizes
from kernelhub.ops.operands import check_destination, check_operand
from kernelhub.ops.values import checks_devices

_METADATA = ("block_table", "seq_lens", "cu_seqlens_q", "cu_seqlens_k")


def check_run(op: str, problem: AttentionProblem, q: Any, k: Any, v: Any) -> None:
    """q, k and v are what the kernel was selected for, and fit one another.

    Raises:
        InvalidArgument: one is of another type, dtype, layout, device or shape, or requires a gradient.
    """
    names = problem.operand_names
    kv_dims, ragged = problem.kv_dims, problem.ragged
    paged = len(kv_dims) == 2
    ranks = (3,) if ragged else (3, 4) if paged else (4,)
    wanted = (
        (q, problem.q_dtype, (problem.num_q_heads, problem.head_dim_qk), ranks),
        (k, problem.kv_dtype, (*kv_dims, problem.head_dim_qk), (4,) if paged or not ragged else (3,)),
        (v, problem.kv_dtype, (*kv_dims, problem.head_dim_vo), (4,) if paged or not ragged else (3,)),
    )
    for name, tensor in zip(names, (q, k, v), strict=True):
        check_operand(op, name, tensor)
    if k.shape[:-1] != v.shape[:-1]:
        refuse(op, names[2], f"has shape {list(v.shape)}", f"{names[1]} has {list(k.shape)}; all but D agree")
    for name, (tensor, dtype, dims, allowed) in zip(names, wanted, strict=True):
        rank = len(tensor.shape)
        if dtype_name(tensor.dtype) != dtype:
            refuse(op, name, f"has dtype {dtype_name(tensor.dtype)}", f"the kernel was selected for {dtype}; give that")
        if rank not in allowed or tuple(tensor.shape[rank - len(dims) :]) != dims:
            outer = ", ".join(["..."] * (allowed[-1] - len(dims)))
            fix = f"the kernel was selected for [{outer}, {', '.join(map(str, dims))}]; give that"
            refuse(op, name, f"has shape {list(tensor.shape)}", fix)
        same_device(op, name, tensor, q)
    if q.ndim == 4:
        if problem.q_len == ONE and q.shape[1] > 1:
            few = f"has {q.shape[1]} queries per sequence"
            refuse(op, "q", few, "the plan is for one, which sees all keys; prepare it with as many queries")
        if not paged and q.shape[0] != k.shape[0]:
            refuse(op, "k", f"has a batch of {k.shape[0]}", f"q has {q.shape[0]}")
    refuse_grad(op, names, (q, k, v))


def check_rows(op: str, problem: AttentionProblem, step: DenseStep | PagedStep, q: Tensor, k: Tensor) -> None:
    """q has a row for every query that the step speaks of, and k one for every key, all on the step's device."""
    check_step_device(op, q, step.block_table if isinstance(step, PagedStep) else step.cu_seqlens_q)
    if step.cu_seqlens_q is not None:
        offsets = step.known_q_offsets
        if offsets and offsets[-1] > q.shape[0]:
            refuse(op, "q", f"has {q.shape[0]} tokens", f"cu_seqlens_q ends at {offsets[-1]}; give as many")
    elif isinstance(step, PagedStep) and q.shape[0] != step.num_seqs:
        refuse_batch(q.shape, step.num_seqs, op)
    if isinstance(step, DenseStep):
        offsets = step.known_k_offsets
        if offsets and offsets[-1] > k.shape[0]:
            refuse(op, "k", f"has {k.shape[0]} tokens", f"cu_seqlens_k ends at {offsets[-1]}; give as many")
    elif step.num_pages > k.shape[0]:
        name = problem.operand_names[1]
        found = f"the pages of block_table were checked for a cache of {step.num_pages}"
        refuse(op, name, f"has {k.shape[0]} pages", f"{found}; prepare a plan with this cache")


def check_step_device(op: str, q: Tensor, metadata: Tensor | None) -> None:
    """q is on the device of the step's metadata."""
    if metadata is not None and q.device != metadata.device:
        refuse(op, "q", f"is on {q.device}", f"move it to {metadata.device}, where the step's metadata is")


def refuse_batch(shape: Sequence[int], num_seqs: int, op: str) -> None:
    """q has another number of rows than there are sequences."""
    refuse(
        op,
        "q",
        f"has shape {list(shape)}, and seq_lens has {num_seqs} sequences",
        "give one row per sequence, or cu_seqlens_q for ragged queries",
    )


def check_out(op: str, out: Any, shape: Sequence[int], q: Tensor, operands: Mapping[str, Any]) -> None:
    """A destination of the right shape and dtype, with memory of its own."""
    check_destination(op, "out", out, shape, q.dtype, q.device, {"q": q, **operands})


def accept_call(
    op: str, problem: AttentionProblem, known: KnownForm, known_out: KnownForm, q: Any, k: Any, v: Any, out: Any
) -> None:
    """Check tensors of a direct call of a new form, and remember it.

    Args:
        known: of q, k and v.
        known_out: of q, k, v and `out`.

    Raises:
        InvalidArgument: one does not fit the problem or the others; it is named.
    """
    check_run(op, problem, q, k, v)
    sizes = sizes_of_call(problem, q, k, v)
    if out is None:
        known.learn((q, k, v), sizes)
        return
    names = problem.operand_names
    check_out(op, out, (*q.shape[:-1], problem.head_dim_vo), q, {names[1]: k, names[2]: v})
    known_out.learn((q, k, v, out), (*sizes, (*sizes[0][:-1], problem.head_dim_vo)))


class StepOperands:
    """q, k, v and `out` of a step's runs: checked where their form is new.

    Attributes:
        known: the form of q, k and v that was let through last.
        known_out: the form of q, k, v and `out` that was.
    """

    __slots__ = ("_op", "_problem", "_serves", "known", "known_out")

    def __init__(self, op: str, problem: AttentionProblem) -> None:
        self._op, self._problem = op, problem
        self._serves: Any = None
        self.known = KnownForm()
        self.known_out = KnownForm()

    def for_step(self, step: DenseStep | PagedStep) -> StepOperands:
        """These, if the tensors that they accept also fit the step, or new ones."""
        keys = step.num_pages if isinstance(step, PagedStep) else _last(step.known_k_offsets)
        serves = step.num_seqs, _last(step.known_q_offsets), keys
        if serves == self._serves:
            return self
        made = StepOperands(self._op, self._problem)
        made._serves = serves
        return made

    def accept(self, step: DenseStep | PagedStep, q: Any, k: Any, v: Any, out: Any) -> bool:
        """Check tensors of a new form and remember it, unless KERNELHUB_CHECK requires a full check of each run.

        Returns:
            Whether there is anything to launch: not for no queries, or no sequences.

        Raises:
            InvalidArgument: one does not fit the plan, the step or the others; it is named.
        """
        op, problem = self._op, self._problem
        check_run(op, problem, q, k, v)
        check_rows(op, problem, step, q, k)
        if out is not None:
            shape = (*q.shape[:-1], problem.head_dim_vo)
            names = problem.operand_names
            metadata = {name: getattr(step, name, None) for name in _METADATA}
            check_out(op, out, shape, q, {names[1]: k, names[2]: v, **metadata})
        if 0 in q.shape or (problem.ragged and not step.num_seqs):
            return False
        if checks_devices():  # every run is checked whole
            page_size = problem.page_size if isinstance(problem, PagedAttentionProblem) else 0
            check_step_values(op, problem.operand_names[1], page_size, step, q.shape[0], k.shape[0])
            return True
        if out is None:
            self.known.learn((q, k, v), (q.shape, k.shape, v.shape))
        else:
            self.known_out.learn((q, k, v, out), (q.shape, k.shape, v.shape, out.shape), strided=(3,))
        return True

    def blame(self, error: Exception, q: Any, k: Any, v: Any, out: Any) -> None:
        """Raise the problem of operands that made a run raise; nothing if they are valid or the error is ours."""
        if isinstance(error, KernelhubError):
            return
        problem = self._problem
        try:
            check_run(self._op, problem, q, k, v)
            if out is not None:
                check_out(self._op, out, (*q.shape[:-1], problem.head_dim_vo), q, {})
        except InvalidArgument as refusal:
            raise refusal from error


def _last(offsets: Sequence[int] | None) -> int | None:
    return offsets[-1] if offsets else None


def empties_of(problem: AttentionProblem) -> Callable[[Tensor], Tensor]:
    """The function that makes a contiguous destination for a q."""
    width = problem.head_dim_vo
    if width == problem.head_dim_qk:  # half the time of forming a shape
        return lambda q: empty_like(q, memory_format=contiguous_format)
    return lambda q: q.new_empty(*q.shape[:-1], width)


def sizes_of_call(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Sizes, Sizes, Sizes]:
    """The sizes of a call's tensors that a plan fixes: all but the numbers of tokens, pages and sequences."""
    dims = problem.kv_dims
    q_rows: tuple[int | None, ...] = (None,) * (q.ndim - 2)
    if q.ndim == 4 and problem.q_len == ONE:
        q_rows = (None, int(q.shape[1]))
    rows = (None,) * (k.ndim - 1 - len(dims))
    return (
        (*q_rows, problem.num_q_heads, problem.head_dim_qk),
        (*rows, *dims, problem.head_dim_qk),
        (*rows, *dims, problem.head_dim_vo),
    )
