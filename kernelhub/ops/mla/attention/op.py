"""`mla_attention`: latent attention with absorbed projections over a paged cache.

One function serves decode, speculative decode with the same number of queries for every sequence, and ragged batches,
each over all tokens of a sequence or over those that an indexer selected.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.forms import python_value
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, Before, DryRun, Op, ParsedCall
from kernelhub.dispatch.plan import publish, traced_as
from kernelhub.errors import InvalidArgument, KernelhubError
from kernelhub.ops.arguments import NotPlain, lse_shape
from kernelhub.ops.attention.adapter import PagedStep, lent
from kernelhub.ops.attention.arguments import check_bound, same_device
from kernelhub.ops.attention.operands import check_step_device, refuse_batch
from kernelhub.ops.attention.paged_call import checked_step
from kernelhub.ops.attention.paged_plan import PagedPlan
from kernelhub.ops.attention.problem import ANY, ONE, q_len_bucket
from kernelhub.ops.attention.step_values import check_step_values
from kernelhub.ops.call_plan import prepares
from kernelhub.ops.known_form import KnownForm
from kernelhub.ops.layer_calls import Repeats
from kernelhub.ops.mla.attention.adapter import MlaAdapter, MlaValues
from kernelhub.ops.mla.attention.call import (
    NAME,
    bind,
    check,
    check_lists,
    check_scale,
    check_sinks,
    check_topk,
    destination_of,
    flat,
    kv_scale_kind,
    problem_of,
    recheck,
    refuse,
    rows_of,
    with_plain_sinks,
)
from kernelhub.ops.mla.attention.problem import MLA_ATTENTION, MlaProblem
from kernelhub.ops.mla.attention.reference import mla_attention_reference
from kernelhub.ops.operands import check_flag, check_operand
from kernelhub.ops.operators import Traced
from kernelhub.ops.values import checks_devices

_op: Op[MlaProblem] = Op(
    Contract.of(
        MLA_ATTENTION,
        problem_of=problem_of,
        adapter=MlaAdapter,
        bind=bind,
        reference=mla_attention_reference,
        example="kernelhub.ops.mla.attention.inputs:mla_attention_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class MlaAttentionPlan(PagedPlan):
    """A kernel selected for one layer configuration: dtypes, heads, page layout, features and their values.

    ``run(q, kv_cache, block_table, seq_lens, cu_seqlens_q=None, max_seqlen_q=None, topk_indices=None, out=None)``
    is a whole call. `begin` makes a step whose ``run(q, kv_cache, topk_indices=None, *, out=None)`` is the launch
    alone.
    """

    __slots__ = ("_again", "_operands", "_values")
    cache = "kv_cache"
    call = "q, kv_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, topk_indices, out"

    def __init__(self, op: Op[Any], bound: Bound, parsed: ParsedCall) -> None:
        parsed.check_kept(NAME, "sinks", "kv_scale")
        arguments, problem = parsed.arguments, bound.selection.problem
        self._values: MlaValues = arguments[7]
        direct, values, sparse = bound.run, self._values, problem.sparse
        self._operands = _StepOperands(problem, bound.device, values, arguments[1].shape[0])
        self._again: Callable[..., bool] | None = None

        def run(*operands: Any) -> Any:
            *rest, out = operands
            _check_listed(sparse, rest[-1])
            return direct(*rest, values, out)

        kept = {"causal": problem.causal, "value_dim": problem.value_dim, "return_lse": problem.lse}
        super().__init__(op, bound, parsed, run=run, values=kept | values._asdict())

    def _runner(self, step: PagedStep) -> Callable[..., Any]:
        launch, values, problem = self.adapter.launch, self._values, self.selection.problem
        tick, returns_lse, value_dim = self.bound.counter.__next__, problem.lse, problem.value_dim
        operands = self._operands = self._operands.for_step(step)
        known, known_out, accept = operands.known, operands.known_out, operands.accept
        known_listed, known_listed_out = operands.known_listed, operands.known_listed_out
        strided = values is not with_plain_sinks(values)
        learn = self.adapter.again if self.adapter.repeats and not checks_devices() else None
        again: Callable[..., bool] | None = None if learn is None else self._again
        block_table, seq_lens, pages = step.block_table, step.seq_lens, self._num_pages

        def run(q: Tensor, kv_cache: Tensor, topk_indices: Tensor | None = None, *, out: Tensor | None = None) -> Any:
            nonlocal again
            try:  # around all: inside the body it costs Python 3.11 10 ns
                # It compares more than the forms below, and the memory; but this plan may need a larger cache.
                if again is not None and topk_indices is None and kv_cache.shape[0] >= pages:
                    made = q.new_empty(*q.shape[:-1], value_dim) if out is None else out
                    if again(q, rows_of(kv_cache), made, block_table, seq_lens):
                        tick()
                        return made
                if topk_indices is None:
                    if out is None:
                        unknown = q.is_nested or kv_cache.is_nested or not known.holds(q, kv_cache)
                    else:
                        unknown = (
                            again is not None  # other tensors than before, or the same memory
                            or q.is_nested
                            or kv_cache.is_nested
                            or out.is_nested
                            or not known_out.holds(q, kv_cache, out)
                        )
                elif q.is_nested or kv_cache.is_nested or topk_indices.is_nested:
                    unknown = True
                elif out is None:
                    unknown = not known_listed.holds(q, kv_cache, topk_indices)
                else:
                    unknown = out.is_nested or not known_listed_out.holds(q, kv_cache, topk_indices, out)
                launches = not unknown or accept(step, q, kv_cache, topk_indices, out)
                if out is None:
                    out = q.new_empty(*q.shape[:-1], value_dim)
                lse = q.new_empty(*lse_shape(q.shape), dtype=torch.float32) if returns_lse else None
                if launches:
                    plain = with_plain_sinks(values) if strided else values
                    tick()
                    launch(q, rows_of(kv_cache), flat(topk_indices), step, plain, out, lse)
                    if learn is not None:
                        again = self._again = learn(step, plain)
                return out if lse is None else (out, lse)
            except NotPlain:
                return traced(q, kv_cache, topk_indices, out=out)
            except Exception as error:
                failed(launch, error)
                operands.blame(error, step, q, kv_cache, topk_indices, out)
                raise

        def traced(
            q: Tensor, kv_cache: Tensor, topk_indices: Tensor | None = None, *, out: Tensor | None = None
        ) -> Any:
            metadata = step.block_table, step.seq_lens, step.cu_seqlens_q, step.max_seqlen_q
            return self.run(q, kv_cache, *metadata, topk_indices, out)

        return traced_as(run, traced)


def _check_listed(sparse: bool, topk_indices: Tensor | None) -> None:
    """A plan is for all tokens of a sequence or for those that are listed."""
    if (topk_indices is not None) != sparse:
        form = "is missing" if sparse else "is given"
        refuse("topk_indices", f"{form}, unlike when the plan was prepared", "prepare a plan for this form")


class _StepOperands:
    """What a step asks of q, the cache, the lists and `out` of its runs: checked where their form is new.

    Attributes:
        known: the form of q and the cache that was let through last.
        known_out: the form of q, the cache and `out` that was.
        known_listed: the form of q, the cache and the lists that was.
        known_listed_out: the form of q, the cache, the lists and `out` that was.
    """

    __slots__ = (
        "_device",
        "_num_pages",
        "_problem",
        "_serves",
        "_values",
        "known",
        "known_listed",
        "known_listed_out",
        "known_out",
    )

    def __init__(self, problem: MlaProblem, device: int, values: MlaValues, num_pages: int) -> None:
        self._problem, self._device, self._values, self._num_pages = problem, device, values, num_pages
        self._serves: Any = None
        self.known = KnownForm()
        self.known_out = KnownForm()
        self.known_listed = KnownForm()
        self.known_listed_out = KnownForm()

    def for_step(self, step: PagedStep) -> _StepOperands:
        """These, if the tensors that they accept also fit the step, or new ones."""
        serves = step.num_seqs, self._rows(step)
        if serves == self._serves:
            return self
        made = _StepOperands(self._problem, self._device, self._values, self._num_pages)
        made._serves = serves
        return made

    def accept(self, step: PagedStep, q: Any, kv_cache: Any, topk_indices: Any, out: Any) -> bool:
        """Check tensors of a new form and remember it, unless KERNELHUB_CHECK requires a full check of each run.

        Returns:
            Whether there is anything to launch: not for no queries.

        Raises:
            InvalidArgument: one does not fit the plan, the step or the others; it is named.
        """
        self._check(step, q, kv_cache, topk_indices, out)
        if 0 in q.shape:
            return False
        if checks_devices():  # every run is checked whole
            page_size, pages = self._problem.page_size, kv_cache.shape[0]
            check_step_values(NAME, "kv_cache", page_size, step, q.shape[0], pages)
            return True
        tensors: list[Tensor] = [tensor for tensor in (q, kv_cache, topk_indices, out) if tensor is not None]
        if topk_indices is None:
            form = self.known if out is None else self.known_out
        else:
            form = self.known_listed if out is None else self.known_listed_out
        form.learn(tensors, [tensor.shape for tensor in tensors], strided=() if out is None else (len(tensors) - 1,))
        return True

    def blame(self, error: Exception, step: PagedStep, q: Any, kv_cache: Any, topk_indices: Any, out: Any) -> None:
        """Raise the problem of operands that made a run raise; nothing if they are valid or the error is ours."""
        if not isinstance(error, KernelhubError):
            try:
                self._check(step, q, kv_cache, topk_indices, out)
            except InvalidArgument as refusal:
                raise refusal from error

    def _check(self, step: PagedStep, q: Any, kv_cache: Any, topk_indices: Any, out: Any) -> None:
        problem, values = self._problem, self._values
        _check_listed(problem.sparse, topk_indices)
        recheck(problem, q, kv_cache, None, None, values)
        check_step_device(NAME, q, step.block_table)
        self._check_rows(step, q, kv_cache)
        if topk_indices is not None:
            check_operand(NAME, "topk_indices", topk_indices)
            check_topk(topk_indices, q.shape)
            same_device(NAME, "topk_indices", topk_indices, q)
            check_lists(topk_indices, step, problem.causal)
        if out is not None:
            destination_of(problem, self._device)(out, q, kv_cache, topk_indices, values, step)

    def _rows(self, step: PagedStep) -> int:
        """Rows that q has, or at least has if it is ragged."""
        if not self._problem.ragged:
            return step.num_seqs
        return step.known_q_offsets[-1] if step.known_q_offsets else 0

    def _check_rows(self, step: PagedStep, q: Tensor, kv_cache: Tensor) -> None:
        """The rows of q and the pages of the cache that a step's metadata speaks of."""
        rows, needed, ragged = q.shape[0], self._rows(step), self._problem.ragged
        if rows != needed and (not ragged or rows < needed):
            if not ragged:
                refuse_batch(q.shape, step.num_seqs, NAME)
            refuse("q", f"has {rows} rows", f"cu_seqlens_q of the step ends at {needed}")
        if kv_cache.shape[0] < self._num_pages:
            wanted = f"the plan was prepared for {self._num_pages}, and the step's block_table may name any of them"
            refuse("kv_cache", f"has {kv_cache.shape[0]} pages", wanted)


def repeats_of(scale: float, value_dim: int) -> Repeats | None:
    """What makes calls of one query each like the last one, without features and ``backend=``; None if nothing does.

    It takes q, kv_cache, `out`, block_table and seq_lens.
    """
    before = _op.before
    if before is None or before.generation != HUB.generation or before.backend is not None:
        return None
    repeats: Repeats | None = before.repeat.found(scale, value_dim)  # type: ignore[attr-defined]
    return None if repeats is None else repeats._replace(generation=before.generation)


def _memory(q: Tensor, value_dim: int, **others: Any) -> dict[str, Tensor]:
    return {
        "out": q.new_empty((*q.shape[:-1], value_dim)),
        "lse": q.new_empty(lse_shape(q.shape), dtype=torch.float32),
    }


@publish(
    _op, prepares(_op, MlaAttentionPlan), traced=Traced(_memory, ("out", "lse"), {"lse": "return_lse"}, within=lent)
)
def mla_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    value_dim: int = 512,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    topk_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_scale: float | Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Any:
    """Multi-head latent attention over a paged cache, with the up-projections absorbed into queries and output.

    A row c of the cache is the key of every head and, in its first `value_dim` elements, the value of every head:
    ``softmax(scale * q c^T) c[:value_dim]``.

    Args:
        q: float32, float16 or bfloat16; ``[num_seqs, H, D]`` for decode, ``[num_seqs, tokens, H, D]`` for
            speculative decode with the same number of queries for every sequence, ``[T, H, D]`` with `cu_seqlens_q`
            for ragged batches. Each head is its non-rotary part times the up-projection of its keys (`value_dim`
            elements), followed by its rotary part. Queries are the last tokens of their sequence.
        kv_cache: ``[num_pages, page_size, D]`` or ``[num_pages, page_size, 1, D]``, each row the latent followed by
            the rotary part of the keys, as `write_mla_cache` writes it; dtype of q, or float8_e4m3fn with `kv_scale`.
        block_table: int32 ``[num_seqs, max_pages]``, the pages of each sequence in order; entries past a
            sequence's last page are not read.
        seq_lens: int32 ``[num_seqs]``, cached tokens of each sequence including those of `q`; 0 is allowed.
        scale: factor of q c^T. There is no default, because D does not determine it: it is the head width before
            absorption to the power -0.5, ``(128 + 64) ** -0.5`` where D is 512 + 64, times the factor of the rotary
            embedding's scaling for long contexts, if any.
        value_dim: width of the latent; the rest of D is the rotary part, which may be empty.
        cu_seqlens_q: int32 ``[num_seqs + 1]``, offsets in q at which each sequence begins and ends.
            Rows of `out` past the last offset are not written.
        max_seqlen_q: upper bound on the queries of a sequence, for ragged batches; must be correct. A small bound
            allows tiles for few queries.
        causal: queries see no later tokens; the last query sees all of its sequence.
        topk_indices: int32 ``q.shape[:-2] + (topk,)``: each query sees only these tokens of its sequence, in addition
            to the causal mask. They are positions in the sequence, counted from 0, in any order, each at most once, as
            an indexer's top-k over scores ``[T, max_len]`` returns them. -1 and positions outside the sequence are
            ignored. (Some libraries use slots of the cache instead:
            ``block_table[sequence, position // page_size] * page_size + position % page_size``.)
        sinks: ``[H]``, one more score per head in the softmax denominator.
        kv_scale: factor of an fp8 cache: a float, or float32 of one element.
        return_lse: also return the log of the softmax denominator.
        out: destination, of the shape and dtype that would be returned.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``q.shape[:-1] + (value_dim,)`` in the dtype of q, to be multiplied by the up-projection of the values; with
        `return_lse` also float32 ``[H, T]``, or ``[num_seqs, H, tokens]`` for speculative decode. A query with no
        visible token gives zeros.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        DeepSeek-V2 (2024), section 2.1; for `topk_indices` DeepSeek-V3.2 (2025), section 2.1.

    Example:
        >>> import torch, kernelhub
        >>> q = torch.randn(2, 16, 576)                      # 2 sequences, 16 heads of 512 + 64
        >>> kv_cache = torch.randn(5, 64, 576)               # 5 pages of 64 tokens
        >>> block_table = torch.tensor([[0, 1], [4, 2]], dtype=torch.int32)
        >>> seq_lens = torch.tensor([70, 128], dtype=torch.int32)
        >>> kernelhub.mla_attention(q, kv_cache, block_table, seq_lens, scale=192**-0.5).shape
        torch.Size([2, 16, 512])
    """
    if type(q) is not Tensor and isinstance(q, Tensor) and not isinstance(backend, DryRun):
        return _op.traced(**locals())
    before = _op.before
    if (
        before is not None
        and cu_seqlens_q is None
        and max_seqlen_q is None
        and topk_indices is None
        and sinks is None
        and kv_scale is None
        and return_lse is False
        and (causal is True or causal is False)
        and before.generation == HUB.generation
        and before.backend == backend
        and not (_contexts_used and _contexts())
    ):
        repeated = before.repeat(q, kv_cache, block_table, seq_lens, scale, value_dim, out)
        if repeated is not None:
            return repeated
    generation, ragged = HUB.generation, cu_seqlens_q is not None
    # 512.0 would be taken for the key's 512, and 1 for its True
    if not (type(value_dim) is int and type(causal) is bool and type(return_lse) is bool):
        value_dim = python_value(value_dim)
        causal = check_flag(NAME, "causal", causal)
        return_lse = check_flag(NAME, "return_lse", return_lse)
    features = (causal, topk_indices, sinks, kv_scale, return_lse)
    given = (q, kv_cache, scale, value_dim, ragged, max_seqlen_q, *features, out, block_table, seq_lens, cu_seqlens_q)
    try:
        *_, heads, width = shape = q.shape
        _, page_size, *one, row = kv_cache.shape
        if ragged:
            q_len = ANY if max_seqlen_q is None else q_len_bucket(max_seqlen_q)
        else:
            q_len = ONE if len(shape) == 3 else q_len_bucket(shape[1])
        kinds = (
            ragged,
            causal and (ragged or q_len != ONE),
            topk_indices is not None,
            sinks is not None,
            return_lse,
            None if kv_scale is None else kv_scale_kind(kv_scale),
        )
        rows = (row, len(shape), *one)
        key = (q.dtype, kv_cache.dtype, heads, width, page_size, rows, value_dim, q_len, kinds)
        if sinks is not None:
            check_sinks(sinks, heads)
        if type(scale) is not float or not isfinite(scale):
            scale = check_scale(scale)
        if type(value_dim) is not int:
            check(*given)
        if kv_scale is not None and not isinstance(kv_scale, Tensor):
            kv_scale = python_value(kv_scale)
        if max_seqlen_q is not None:
            max_seqlen_q = check_bound(NAME, "max_seqlen_q", max_seqlen_q)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(*given)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(*given)
        if isinstance(backend, DryRun):
            metadata = block_table, seq_lens, cu_seqlens_q, max_seqlen_q
            pages = kv_cache.shape[0]
            checked_step(page_size, ragged, q.device, pages, shape[0], *metadata, op=NAME, cache="kv_cache")
        run = _op.decide(key, q.get_device(), backend)
        repeat = getattr(run, "repeat", None)
        if repeat is not None and not (_contexts_used and _contexts()):
            _op.before = Before(generation, backend, repeat)
        if not isinstance(backend, DryRun):
            metadata = block_table, seq_lens, cu_seqlens_q, max_seqlen_q
            return run(q, kv_cache, *metadata, topk_indices, MlaValues(scale, sinks, kv_scale), out, True)
    values = MlaValues(scale, sinks, kv_scale)
    return run(q, kv_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, topk_indices, values, out)
