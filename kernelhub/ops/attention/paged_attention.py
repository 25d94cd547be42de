"""`paged_attention`: softmax attention over a paged KV cache.

One function serves decode, speculative decode with as many queries for every sequence, and ragged
batches that mix prefill and decode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, strided

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, Before, DryRun, Op, ParsedCall
from kernelhub.dispatch.plan import publish, traced_as
from kernelhub.ops.arguments import NotPlain, lse_shape
from kernelhub.ops.attention.adapter import AttentionAdapter, PagedStep, lent
from kernelhub.ops.attention.arguments import (
    KEPT,
    RAISED_BY_BAD_ARGUMENTS,
    Scale,
    Values,
    Window,
    arguments_of,
    check_bound,
    check_kept,
    features_of,
    likeness,
    memory_like,
    optional_tensors,
)
from kernelhub.ops.attention.operands import StepOperands, empties_of
from kernelhub.ops.attention.paged_call import HND, NAME, NHD, bind, check, checked_step, problem_of
from kernelhub.ops.attention.paged_plan import PagedPlan
from kernelhub.ops.attention.problem import (
    ANY,
    ONE,
    PAGED_ATTENTION,
    PagedAttentionProblem,
    q_len_bucket,
)
from kernelhub.ops.attention.reference import paged_attention_reference
from kernelhub.ops.call_plan import prepares
from kernelhub.ops.layer_calls import Repeats
from kernelhub.ops.operators import Traced
from kernelhub.ops.values import checks_devices

_op: Op[PagedAttentionProblem] = Op(
    Contract.of(
        PAGED_ATTENTION,
        problem_of=problem_of,
        adapter=AttentionAdapter,
        bind=bind,
        reference=paged_attention_reference,
        example="kernelhub.ops.attention.inputs:paged_attention_inputs",
    )
)
_MOST_LIKE = 64  # calls with features that are recognised; bounds of queries change from step to step
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class PagedAttentionPlan(PagedPlan):
    """A kernel selected for one layer configuration: dtypes, heads, page layout, features and their values.

    ``run(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q=None, max_seqlen_q=None, out=None)``
    is a whole call. `begin` makes a step whose ``run(q, k_cache, v_cache, *, out=None)`` is the launch alone.
    """

    __slots__ = ("_again", "_operands", "_values")
    call = "q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, out"

    def __init__(self, op: Op[Any], bound: Bound, parsed: ParsedCall) -> None:
        parsed.check_kept(NAME, *KEPT)
        arguments, problem = parsed.arguments, bound.selection.problem
        scale, values = arguments[6], arguments[10] if len(arguments) > 10 else None
        width = problem.head_dim_qk
        self._values: Values = values or Values(width**-0.5 if scale is None else scale)
        self._operands = StepOperands(NAME, problem)
        self._again: Callable[..., bool] | None = None
        direct, blame = bound.run, self._operands.blame

        def run(
            q: Any, k: Any, v: Any, block_table: Any, seq_lens: Any, cu_seqlens_q: Any, longest: Any, out: Any
        ) -> Any:
            try:
                return direct(q, k, v, block_table, seq_lens, q.shape, scale, out, cu_seqlens_q, longest, values)
            except RAISED_BY_BAD_ARGUMENTS as error:
                blame(error, q, k, v, out)
                raise

        kept = arguments_of(problem, self._values) | {"kv_layout": problem.kv_layout}
        super().__init__(op, bound, parsed, run=run, values=kept)

    def _runner(self, step: PagedStep) -> Callable[..., Any]:
        launch, values = self.adapter.launch, self._values
        empty = empties_of(self.selection.problem)
        learn = None if not self.adapter.repeats or checks_devices() else self.adapter.again
        more = optional_tensors(values, step.cu_seqlens_q)
        # From the first layer on, but not of a step whose bound or offsets may not fit what the last step's fitted.
        kept = learn is not None and step.max_seqlen_q is None and step.cu_seqlens_q is None
        again: Callable[..., bool] | None = _with(self._again, more) if kept else None
        block_table, seq_lens = step.block_table, step.seq_lens
        operands = self._operands = self._operands.for_step(step)
        known, known_out, accept = operands.known, operands.known_out, operands.accept
        blame, tick = operands.blame, self.bound.counter.__next__

        def run(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None = None) -> Tensor:
            nonlocal again
            launches = True
            try:  # around all: inside the body it costs Python 3.11 10 ns
                if again is not None:  # it compares more than the forms below, and the memory too
                    made = empty(q) if out is None else out
                    if again(q, k_cache, v_cache, made, block_table, seq_lens):
                        tick()
                        return made
                if out is None:
                    if q.is_nested or k_cache.is_nested or v_cache.is_nested or not known.holds(q, k_cache, v_cache):
                        launches = accept(step, q, k_cache, v_cache, None)
                    out = empty(q)
                elif (
                    again is not None  # other tensors than before, or the same memory
                    or q.is_nested
                    or k_cache.is_nested
                    or v_cache.is_nested
                    or out.is_nested
                    or not known_out.holds(q, k_cache, v_cache, out)
                ):
                    launches = accept(step, q, k_cache, v_cache, out)
                if launches:
                    tick()
                    launch(q, k_cache, v_cache, step, values, out, None)
                    if learn is not None:
                        found = learn(step, values)
                        again = _with(found, more)
                        if kept:
                            self._again = found
                return out
            except NotPlain:
                by_operator: Tensor = traced(q, k_cache, v_cache, out)
                return by_operator
            except Exception as error:
                blame(error, q, k_cache, v_cache, out)
                failed(launch, error)
                raise

        def run_with_lse(
            q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            nonlocal again
            launches = True
            try:
                if again is not None and q.layout is strided and q.ndim in (3, 4) and not q.is_nested:
                    made = empty(q) if out is None else out
                    made_lse = q.new_empty(*lse_shape(q.shape), dtype=torch.float32)
                    if again(made_lse, q, k_cache, v_cache, made, block_table, seq_lens):
                        tick()
                        return made, made_lse
                if out is None:
                    if q.is_nested or k_cache.is_nested or v_cache.is_nested or not known.holds(q, k_cache, v_cache):
                        launches = accept(step, q, k_cache, v_cache, None)
                    out = empty(q)
                elif (
                    again is not None
                    or q.is_nested
                    or k_cache.is_nested
                    or v_cache.is_nested
                    or out.is_nested
                    or not known_out.holds(q, k_cache, v_cache, out)
                ):
                    launches = accept(step, q, k_cache, v_cache, out)
                lse = q.new_empty(*lse_shape(q.shape), dtype=torch.float32)
                if launches:
                    tick()
                    launch(q, k_cache, v_cache, step, values, out, lse)
                    if learn is not None:
                        found = learn(step, values)
                        again = _with(found, more)
                        if kept:
                            self._again = found
                return out, lse
            except NotPlain:
                by_operator: tuple[Tensor, Tensor] = traced(q, k_cache, v_cache, out)
                return by_operator
            except Exception as error:
                blame(error, q, k_cache, v_cache, out)
                failed(launch, error)
                raise

        def traced(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None = None) -> Any:
            metadata = step.block_table, step.seq_lens, step.cu_seqlens_q, step.max_seqlen_q
            return self.run(q, k_cache, v_cache, *metadata, out)

        return traced_as(run_with_lse if self.selection.problem.lse else run, traced)


def repeats_of(
    q: Tensor,
    causal: bool,
    window: Window,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    k_scale: Scale,
    v_scale: Scale,
) -> Repeats | None:
    """What makes calls like the last one with these values, without offsets, bounds, LSE or ``backend=``.

    It takes `optional_tensors` of the values, q, k_cache, v_cache, `out`, block_table and seq_lens. None: nothing does.
    """
    features = window, softcap, sinks, k_scale, v_scale
    before = _op.before
    if q.ndim == 4 or any(feature is not None for feature in features):
        like = likeness(causal, window, softcap, sinks, scale, k_scale, v_scale, False, NHD, None, None)
        before = _op.befores.get(like)
    if before is None or before.generation != HUB.generation or before.backend is not None:
        return None
    found: Callable[[float | None], Repeats | None] | None = getattr(before.repeat, "found", None)
    repeats = None if found is None else found(scale)
    return None if repeats is None else repeats._replace(generation=before.generation)


def _with(again: Callable[..., bool] | None, more: list[Tensor]) -> Callable[..., bool] | None:
    """What repeats the runs of a step, which has these tensors at each of them."""
    return again if again is None or not more else functools.partial(again, *more)


def _memory(q: Tensor, v_cache: Tensor, **others: Any) -> dict[str, Tensor]:
    return memory_like(q, v_cache)


@publish(
    _op, prepares(_op, PagedAttentionPlan), traced=Traced(_memory, ("out", "lse"), {"lse": "return_lse"}, within=lent)
)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    kv_layout: str = NHD,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Any:
    """Attend to a paged KV cache.

    Args:
        q: float32, float16 or bfloat16; ``[num_seqs, H, D]`` for decode, ``[num_seqs, tokens, H, D]`` for
            speculative decode with the same number of queries for every sequence, ``[T, H, D]`` with
            `cu_seqlens_q` for ragged batches. Queries are the last tokens of their sequence.
        k_cache: ``[num_pages, page_size, KH, D]``, or ``[num_pages, KH, page_size, D]`` for
            ``kv_layout="HND"``; dtype of q, or float8_e4m3fn or float8_e5m2 with scales. H is a multiple of KH.
        v_cache: as k_cache, with its own width DV.
        block_table: int32 ``[num_seqs, max_pages]``, the pages of each sequence in order; entries past a
            sequence's last page are not read.
        seq_lens: int32 ``[num_seqs]``, KV tokens of each sequence including those of `q`; 0 is allowed.
        cu_seqlens_q: int32 ``[num_seqs + 1]``, offsets in q at which each sequence begins and ends.
            Rows of `out` past the last offset are not written.
        max_seqlen_q: upper bound on the queries of a sequence, for ragged batches; must be correct. A small bound
            allows the selection of a kernel for few queries.
        causal: queries see no later keys; the last query sees all of its sequence.
        window: ``left`` or ``(left, right)``: how many keys before and after its own position a query
            sees, -1 for no limit. A model's "sliding window of w tokens" is ``window=w - 1``.
        softcap: bound of the scores, ``softcap * tanh(scores / softcap)``; None or 0 for none.
        sinks: ``[H]``, one more score per head in the softmax denominator.
        scale: factor of q k^T; by default ``1 / sqrt(D)``.
        k_scale: factor of an fp8 k_cache: a float, or float32 of one element or ``[KH]``.
        v_scale: factor of an fp8 v_cache, in the same form.
        kv_layout: ``"NHD"`` or ``"HND"``.
        return_lse: also return the log of the softmax denominator.
        out: destination, of the shape and dtype that would be returned.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``q.shape[:-1] + (DV,)`` in the dtype of q; with `return_lse` also float32 ``[H, T]``, or
        ``[num_seqs, H, tokens]`` for speculative decode. A query with no visible key gives zeros.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Example:
        >>> import torch, kernelhub
        >>> q = torch.randn(2, 8, 64)                        # 2 sequences, 8 heads of 64
        >>> k_cache, v_cache = torch.randn(2, 5, 16, 2, 64)  # 5 pages of 16 tokens, 2 KV heads
        >>> block_table = torch.tensor([[0, 1], [4, 2]], dtype=torch.int32)
        >>> seq_lens = torch.tensor([20, 32], dtype=torch.int32)
        >>> kernelhub.paged_attention(q, k_cache, v_cache, block_table, seq_lens).shape
        torch.Size([2, 8, 64])
    """
    if type(q) is not Tensor and not isinstance(backend, DryRun):
        return _op.traced(**locals())
    plain = (
        cu_seqlens_q is None
        and window is None
        and softcap is None
        and sinks is None
        and k_scale is None
        and v_scale is None
        and max_seqlen_q is None
        and return_lse is False
        and (causal is True or causal is False)
        and kv_layout == "NHD"
    )
    before = _op.before
    if (
        before is not None
        and plain
        and before.generation == HUB.generation
        and before.backend == backend
        and not (_contexts_used and _contexts())
    ):
        repeated = before.repeat(q, k_cache, v_cache, block_table, seq_lens, scale, out)
        if repeated is not None:
            return repeated
    like = None
    if not plain or q.ndim == 4:
        like = likeness(
            causal,
            window,
            softcap,
            sinks,
            scale,
            k_scale,
            v_scale,
            return_lse,
            kv_layout,
            cu_seqlens_q,
            max_seqlen_q,
        )
        before = _op.befores.get(like)
        if (
            before is not None
            and before.generation == HUB.generation
            and before.backend == backend
            and not (_contexts_used and _contexts())
        ):
            repeated = before.repeat(
                q, k_cache, v_cache, block_table, seq_lens, out, sinks, k_scale, v_scale, cu_seqlens_q
            )
            if repeated is not None:
                return repeated
    generation, learned = HUB.generation, None if like is None else list[Any]()
    try:
        shape = q.shape
        k_shape = k_cache.shape
        v_shape = v_cache.shape
        _, dim1, dim2, width_k = k_shape
        if plain and v_shape == k_shape and len(shape) == 3:
            rest = None
            _, heads, width = shape
        else:
            ragged = cu_seqlens_q is not None
            if ragged:
                _, heads, width = shape
                q_len = ANY if max_seqlen_q is None else q_len_bucket(max_seqlen_q)
                if max_seqlen_q is not None and type(max_seqlen_q) is not int:
                    max_seqlen_q = check_bound(NAME, "max_seqlen_q", max_seqlen_q)
            elif len(shape) == 3:
                _, heads, width = shape
                q_len = ONE
            else:
                _, tokens, heads, width = shape
                q_len = q_len_bucket(tokens)
            features, values = features_of(
                NAME,
                (heads, width),
                dim2 if kv_layout == NHD else dim1,
                q_len == ONE and not ragged,
                causal,
                window,
                softcap,
                sinks,
                scale,
                k_scale,
                v_scale,
                return_lse,
            )
            if isinstance(backend, DryRun):
                check_kept(NAME, values, locals())
            if (v_shape != k_shape and (len(v_shape) != 4 or v_shape[:3] != k_shape[:3])) or (
                kv_layout != NHD and kv_layout != HND
            ):
                check(locals(), plain=False)
            rest = (v_shape[3], kv_layout, ragged, q_len, features)
        key = (q.dtype, k_cache.dtype, heads, width, dim1, dim2, width_k, rest)
    except RAISED_BY_BAD_ARGUMENTS:
        check(locals(), plain=False)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(locals(), plain=rest is None and scale is None)
        if isinstance(backend, DryRun):
            page_size, pages = (dim1 if kv_layout == NHD else dim2), k_shape[0]
            metadata = block_table, seq_lens, cu_seqlens_q, max_seqlen_q
            checked_step(page_size, cu_seqlens_q is not None, q.device, pages, shape[0], *metadata)
        run = _op.decide(key, q.get_device(), backend)
        repeat = getattr(run, "repeat", None)
        if rest is None and repeat is not None and not (_contexts_used and _contexts()):
            _op.before = Before(generation, backend, repeat)
        rows = (None, None, None) if rest is None else (cu_seqlens_q, max_seqlen_q, values)
        return run(q, k_cache, v_cache, block_table, seq_lens, shape, scale, out, *rows, True)
    if rest is None:  # plain decode, the call that engines make most
        return run(q, k_cache, v_cache, block_table, seq_lens, shape, scale, out)
    metadata = cu_seqlens_q, max_seqlen_q
    result = run(q, k_cache, v_cache, block_table, seq_lens, shape, scale, out, *metadata, values, learned=learned)
    if learned and not (_contexts_used and _contexts()):
        if len(_op.befores) >= _MOST_LIKE:
            _op.befores.clear()
        _op.befores[like] = Before(generation, backend, learned[0])
    return result
