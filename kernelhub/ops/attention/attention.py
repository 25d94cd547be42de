"""`attention`: softmax attention over tensors, batched or ragged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op, ParsedCall
from kernelhub.dispatch.plan import publish, traced_as
from kernelhub.ops.arguments import NotPlain, lse_shape
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep, lent, plan_step
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
    host_values,
    memory_like,
)
from kernelhub.ops.attention.dense_call import NAME, bind, check, checked_step, problem_of
from kernelhub.ops.attention.operands import StepOperands, empties_of
from kernelhub.ops.attention.problem import (
    ANY,
    ATTENTION,
    FEW,
    FEW_TOKENS,
    LONG,
    LONG_TOKENS,
    MANY,
    ONE,
    DenseAttentionProblem,
    q_len_bucket,
)
from kernelhub.ops.attention.reference import attention_reference
from kernelhub.ops.call_plan import CallPlan, prepares
from kernelhub.ops.operators import Traced

_op: Op[DenseAttentionProblem] = Op(
    Contract.of(
        ATTENTION,
        problem_of=problem_of,
        adapter=AttentionAdapter,
        bind=bind,
        reference=attention_reference,
        example="kernelhub.ops.attention.inputs:attention_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class AttentionStep:
    """One engine step: where the sequences of its layers begin.

    Attributes:
        run: ``run(q, k, v, *, out=None)``, the launch for one layer; returns what the op does.
        metadata: the checked offsets.
    """

    __slots__ = ("metadata", "run")

    def __init__(self, run: Callable[..., Any], metadata: DenseStep) -> None:
        self.run = run
        self.metadata = metadata


class AttentionPlan(CallPlan):
    """A kernel selected for one layer configuration: dtypes, heads, features and their values.

    ``run(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    out=None)`` is a whole call. `begin` makes a step whose `run` is the launch alone.
    """

    __slots__ = ("_device", "_operands", "_values")
    call = "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, out"

    def __init__(self, op: Op[Any], bound: Bound, parsed: ParsedCall) -> None:
        parsed.check_kept(NAME, *KEPT)
        arguments, problem = parsed.arguments, bound.selection.problem
        scale, values = arguments[6], arguments[12] if len(arguments) > 12 else None
        width = problem.head_dim_qk
        self._device: torch.device = arguments[0].device
        self._values: Values = values or Values(width**-0.5 if scale is None else scale)
        self._operands = StepOperands(NAME, problem)
        direct, blame = bound.run, self._operands.blame

        def run(
            q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, longest_q: Any, longest_k: Any, out: Any
        ) -> Any:
            try:
                metadata = cu_seqlens_q, cu_seqlens_k, longest_q, longest_k
                return direct(q, k, v, q.shape, k.shape, v.shape, scale, out, *metadata, values)
            except RAISED_BY_BAD_ARGUMENTS as error:
                blame(error, q, k, v, out)
                raise

        super().__init__(op, bound, parsed, run=run, values=arguments_of(problem, self._values))

    def begin(
        self,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        *,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        cu_seqlens_q_cpu: Sequence[int] | Tensor | None = None,
        cu_seqlens_k_cpu: Sequence[int] | Tensor | None = None,
    ) -> AttentionStep:
        """Check where sequences begin and let the kernel plan for it, once for all layers.

        Args:
            cu_seqlens_q: int32 [num_seqs + 1] for ragged tensors.
            cu_seqlens_k: int32 [num_seqs + 1] for ragged tensors.
            max_seqlen_q: upper bound on the queries of a sequence.
            max_seqlen_k: upper bound on the keys of a sequence.
            cu_seqlens_q_cpu: the values of cu_seqlens_q on the host. With them and `cu_seqlens_k_cpu`
                nothing syncs; without them a plan whose `syncs` is true does.
            cu_seqlens_k_cpu: the values of cu_seqlens_k on the host.

        Raises:
            InvalidArgument: the offsets contradict each other or the plan.
        """
        if GATE.lost:
            GATE.check_device(self.bound.device)
        step = checked_step(
            self.selection.problem.ragged,
            self._device,
            None,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            host_values(NAME, "cu_seqlens_q_cpu", cu_seqlens_q_cpu),
            host_values(NAME, "cu_seqlens_k_cpu", cu_seqlens_k_cpu),
            keep=True,
        )
        return AttentionStep(self._runner(plan_step(self.adapter, step)), step)

    def _runner(self, step: DenseStep) -> Callable[..., Any]:
        launch, compute, values = self.adapter.launch, self.adapter.compute, self._values
        empty = empties_of(self.selection.problem)
        operands = self._operands = self._operands.for_step(step)
        known, known_out, accept = operands.known, operands.known_out, operands.accept
        blame, tick = operands.blame, self.bound.counter.__next__

        def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
            launches = True
            try:  # around all: inside the body it costs Python 3.11 10 ns
                if out is None:
                    if q.is_nested or k.is_nested or v.is_nested or not known.holds(q, k, v):
                        launches = accept(step, q, k, v, None)
                        if not launches:
                            return empty(q)
                    tick()
                    result: Tensor = compute(q, k, v, step, values)
                    return result
                if q.is_nested or k.is_nested or v.is_nested or out.is_nested or not known_out.holds(q, k, v, out):
                    launches = accept(step, q, k, v, out)
                if launches:
                    tick()
                    launch(q, k, v, step, values, out, None)
                return out
            except NotPlain:
                by_operator: Tensor = traced(q, k, v, out)
                return by_operator
            except Exception as error:
                blame(error, q, k, v, out)
                failed(launch, error)
                raise

        def run_with_lse(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
            launches = True
            try:
                if out is None:
                    if q.is_nested or k.is_nested or v.is_nested or not known.holds(q, k, v):
                        launches = accept(step, q, k, v, None)
                    out = empty(q)
                elif q.is_nested or k.is_nested or v.is_nested or out.is_nested or not known_out.holds(q, k, v, out):
                    launches = accept(step, q, k, v, out)
                lse = q.new_empty(*lse_shape(q.shape), dtype=torch.float32)
                if launches:
                    tick()
                    launch(q, k, v, step, values, out, lse)
                return out, lse
            except NotPlain:
                by_operator: tuple[Tensor, Tensor] = traced(q, k, v, out)
                return by_operator
            except Exception as error:
                blame(error, q, k, v, out)
                failed(launch, error)
                raise

        def traced(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Any:
            offsets = step.cu_seqlens_q, step.cu_seqlens_k
            return self.run(q, k, v, *offsets, step.max_seqlen_q, step.max_seqlen_k, out)

        return traced_as(run_with_lse if self.selection.problem.lse else run, traced)


def _memory(q: Tensor, v: Tensor, **others: Any) -> dict[str, Tensor]:
    return memory_like(q, v)


@publish(
    _op,
    prepares(_op, AttentionPlan),
    traced=Traced(_memory, ("out", "lse"), {"lse": "return_lse"}, within=lent),
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Any:
    """Softmax attention over tensors.

    Args:
        q: float32, float16 or bfloat16; ``[B, S, H, D]``, or ``[T, H, D]`` with `cu_seqlens_q`.
        k: ``[B, SK, KH, D]``, or ``[TK, KH, D]`` with `cu_seqlens_k`; dtype of q, or float8_e4m3fn or float8_e5m2 with
            scales. H is a multiple of KH.
        v: as k, with its own width DV.
        cu_seqlens_q: int32 ``[num_seqs + 1]``, offsets in q at which each sequence begins and ends.
            Rows of `out` past the last offset are not written.
        cu_seqlens_k: int32 ``[num_seqs + 1]``, the same for k and v.
        max_seqlen_q: upper bound on the queries of a sequence, for ragged tensors; must be correct.
        max_seqlen_k: upper bound on the keys of a sequence, for ragged tensors; must be correct.
        causal: queries see no later keys; the last query of a sequence sees all its keys.
        window: ``left`` or ``(left, right)``: how many keys before and after its own position a query
            sees, -1 for no limit. A model's "sliding window of w tokens" is ``window=w - 1``.
        softcap: bound of the scores, ``softcap * tanh(scores / softcap)``; None or 0 for none.
        sinks: ``[H]``, one more score per head in the softmax denominator.
        scale: factor of q k^T; by default ``1 / sqrt(D)``.
        k_scale: factor of an fp8 k: a float, or float32 of one element or ``[KH]``.
        v_scale: factor of an fp8 v, in the same form.
        return_lse: also return the log of the softmax denominator.
        out: destination, of the shape and dtype that would be returned.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        ``q.shape[:-1] + (DV,)`` in the dtype of q; with `return_lse` also float32 ``[B, H, S]``, or
        ``[H, T]`` for ragged tensors. A query with no visible key gives zeros.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Example:
        >>> import torch, kernelhub
        >>> q = torch.randn(1, 128, 8, 64)     # 128 tokens, 8 heads of 64
        >>> k, v = torch.randn(2, 1, 128, 2, 64)
        >>> kernelhub.attention(q, k, v, causal=True).shape
        torch.Size([1, 128, 8, 64])
    """
    if type(q) is not Tensor and not isinstance(backend, DryRun):
        return _op.traced(**locals())
    if _op.again is not None:
        again: Any | None = _op.again(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            causal,
            window,
            softcap,
            sinks,
            scale,
            k_scale,
            v_scale,
            return_lse,
            out,
            backend,
        )
        if again is not None:
            return again
    try:
        shape = q.shape
        k_shape = k.shape
        v_shape = v.shape
        if cu_seqlens_q is None:
            _, tokens, heads, width = shape
            _, _, kv_heads, width_k = k_shape
            if tokens > FEW_TOKENS:
                q_len = MANY if tokens < LONG_TOKENS else LONG
            else:
                q_len = ONE if tokens <= 1 else FEW
        else:
            _, heads, width = shape
            _, kv_heads, width_k = k_shape
            q_len = ANY if max_seqlen_q is None else q_len_bucket(max_seqlen_q)
            if max_seqlen_q is not None and type(max_seqlen_q) is not int:
                max_seqlen_q = check_bound(NAME, "max_seqlen_q", max_seqlen_q)
        if (
            cu_seqlens_q is None
            and cu_seqlens_k is None
            and window is None
            and softcap is None
            and sinks is None
            and k_scale is None
            and v_scale is None
            and max_seqlen_q is None
            and max_seqlen_k is None
            and causal is False
            and return_lse is False
        ):
            rest = None
        else:
            ragged = cu_seqlens_q is not None
            features, values = features_of(
                NAME,
                (heads, width),
                kv_heads,
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
            rest = (ragged, features)
        key = (
            q.dtype,
            k.dtype,
            heads,
            width,
            kv_heads,
            width_k,
            v_shape[-1],
            q_len,
            rest,
        )
    except RAISED_BY_BAD_ARGUMENTS:
        check(locals(), plain=False)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(locals(), plain=rest is None and scale is None)
        if isinstance(backend, DryRun) and cu_seqlens_q is not None:
            sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            checked_step(True, q.device, (shape[0], k_shape[0]), *sizes)
        run = _op.decide(key, q.get_device(), backend)
        if rest is None:
            return run(q, k, v, shape, k_shape, v_shape, scale, out, None, None, None, None, None, True)
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return run(q, k, v, shape, k_shape, v_shape, scale, out, *sizes, values, True)
    if rest is None:
        return run(q, k, v, shape, k_shape, v_shape, scale, out)
    return run(
        q,
        k,
        v,
        shape,
        k_shape,
        v_shape,
        scale,
        out,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        values,
    )
