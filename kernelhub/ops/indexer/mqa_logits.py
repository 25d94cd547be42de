"""`mqa_logits`: the indexer's scores of keys in consecutive rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, describe, dtype_name, usable
from kernelhub.ops.call_plan import CallPlan, prepares
from kernelhub.ops.indexer.adapter import LogitsAdapter
from kernelhub.ops.indexer.arguments import check_tensor
from kernelhub.ops.indexer.problem import DTYPES, MQA_LOGITS, LogitsProblem
from kernelhub.ops.indexer.reference import mqa_logits_reference
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import check_destination, check_operand, is_plain_view, may_overlap
from kernelhub.ops.operators import Traced
from kernelhub.probes.device import facts_of

NAME = "mqa_logits"
_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_INT32, _FLOAT32 = (torch.int32,), (torch.float32,)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> LogitsProblem:
    """The problem that a key means on a device; the key is built in `mqa_logits`."""
    dtype, num_heads, head_dim, has_scale = key
    return LogitsProblem(
        device=facts_of(device),
        dtype=dtype_name(dtype),
        num_heads=num_heads,
        head_dim=head_dim,
        k_scale=has_scale,
    )


def check(q: Any, k: Any, k_scale: Any, weights: Any, cu_seqlen_ks: Any, cu_seqlen_ke: Any, out: Any) -> None:
    """Everything that the contract says of a call."""
    check_operand(NAME, "q", q)
    if q.ndim != 3 or 0 in q.shape[1:]:
        refuse("q", f"has shape {list(q.shape)}", "give [T, H, D]")
    tokens, heads, width = q.shape
    check_tensor(NAME, "q", q, q.shape, _DTYPES, q.device)
    check_operand(NAME, "k", k)
    if k.ndim != 2:
        refuse("k", f"has shape {list(k.shape)}", f"give [S, {width}]")
    keys = k.shape[0]
    check_tensor(NAME, "k", k, (keys, width), (q.dtype,), q.device)
    if k_scale is not None:
        check_tensor(NAME, "k_scale", k_scale, (keys,), _FLOAT32, q.device)
    check_tensor(NAME, "weights", weights, (tokens, heads), _FLOAT32, q.device)
    check_tensor(NAME, "cu_seqlen_ks", cu_seqlen_ks, (tokens,), _INT32, q.device)
    check_tensor(NAME, "cu_seqlen_ke", cu_seqlen_ke, (tokens,), _INT32, q.device)
    if out is not None:
        read = {"q": q, "k": k, "k_scale": k_scale, "weights": weights}
        bounds = {"cu_seqlen_ks": cu_seqlen_ks, "cu_seqlen_ke": cu_seqlen_ke}
        check_destination(NAME, "out", out, (tokens, keys), torch.float32, q.device, read | bounds)


def bind(
    adapter: Any,
    problem: LogitsProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch."""
    launch, calls, repeats = adapter.launch, KnownCalls(adapter.launch), is_repeated(adapter)
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds
    form = (getattr(torch, problem.dtype), problem.num_heads, problem.head_dim, problem.k_scale)
    dtype, num_heads, head_dim, has_scale = form
    float32, int32 = torch.float32, torch.int32

    def known(
        q: Tensor,
        k: Tensor,
        k_scale: Tensor | None,
        weights: Tensor,
        cu_seqlen_ks: Tensor,
        cu_seqlen_ke: Tensor,
        out: Tensor | None,
    ) -> bool:
        """Whether `check` would accept the operands and they fit the kernel."""
        if not usable(q, dtype, device) or not usable(k, dtype, device) or q.ndim != 3 or k.ndim != 2:
            return False
        tokens, heads, width = q.shape
        keys, columns = k.shape
        if not (
            heads == num_heads
            and width == columns == head_dim
            and (alike(k_scale, (keys,), float32, device) if has_scale else k_scale is None)
            and alike(weights, (tokens, heads), float32, device)
            and alike(cu_seqlen_ks, (tokens,), int32, device)
            and alike(cu_seqlen_ke, (tokens,), int32, device)
            and (cu_seqlen_ks.is_contiguous() or is_plain_view(cu_seqlen_ks))
            and (cu_seqlen_ke.is_contiguous() or is_plain_view(cu_seqlen_ke))
            and ((q.is_contiguous() and heads * width > 1) or is_plain_view(q))
            and ((k.is_contiguous() and keys > 1) or is_plain_view(k))
            and (not has_scale or (k_scale.is_contiguous() and keys > 1) or is_plain_view(k_scale))  # type: ignore[union-attr,arg-type]
            and ((weights.is_contiguous() and tokens * heads > 1) or is_plain_view(weights))
        ):
            return False
        if out is None:
            return True
        if not (alike(out, (tokens, keys), float32, device) and out.is_contiguous()):
            return False
        return not may_overlap(out, (q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke))

    def run(
        q: Tensor,
        k: Tensor,
        k_scale: Tensor | None,
        weights: Tensor,
        cu_seqlen_ks: Tensor,
        cu_seqlen_ke: Tensor,
        out: Tensor | None,
    ) -> Tensor:
        if q.get_device() != device:
            result: Tensor = elsewhere(q.get_device())(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out)
            return result
        given, key, again, made = (q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke), None, 0, out
        if not q.is_nested and type(k) is Tensor and not k.is_nested:
            key = q.shape, k.shape, out is None
            if out is None and key in calls and q.layout is torch.strided:
                made = q.new_empty(q.shape[0], k.shape[0], dtype=float32)
            if made is not None:
                again = recognise(key, (*given, made))
                if again == 2:
                    tick()
                    return made
        try:
            right = again == 1 or known(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out)
        except (AttributeError, RuntimeError):  # what has no shape or no memory; `check` names it
            right = False
        if not right:
            check(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out)
            if (q.dtype, *q.shape[1:], k_scale is not None) != form:
                wanted = f"the plan is for {problem.dtype} [T, {num_heads}, {head_dim}]"
                scaled = "with" if has_scale else "without"
                refuse("q", f"is {describe(q)}, k_scale {type(k_scale).__name__}", f"{wanted} {scaled} it")
        if made is None:
            made = q.new_empty(q.shape[0], k.shape[0], dtype=float32)
        if not again:
            calls.learn(key, (*given, made), 1)
        if made.numel():
            tick()
            try:
                launch(*given, made)
            except Exception as error:
                failed(launch, error)
                check(*given, out)
                raise
            if again and repeats:
                calls.attach(key, (*given, made), adapter.repeated, *given, made)
        return made

    return run


_op: Op[LogitsProblem] = Op(
    Contract.of(
        MQA_LOGITS,
        problem_of=problem_of,
        adapter=LogitsAdapter,
        bind=bind,
        reference=mqa_logits_reference,
        example="kernelhub.ops.indexer.inputs:logits_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class LogitsPlan(CallPlan):
    """A kernel selected for queries like these: ``run`` takes the arguments of `mqa_logits` but ``backend``."""

    __slots__ = ()
    call = "q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out"


def _memory(q: Tensor, k: Tensor, weights: Tensor, **others: Any) -> dict[str, Tensor]:
    return {"out": weights.new_empty((q.shape[0], k.shape[0]), dtype=torch.float32)}


@publish(_op, prepares(_op, LogitsPlan), traced=Traced(_memory))
def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Score keys for each query: a weighted sum over the indexer's heads of the positive parts of q k^T.

    Args:
        q: ``[T, H, D]``, float8_e4m3fn, bfloat16, float16 or float32.
        k: ``[S, D]`` in the same dtype: the keys of all sequences, one head that all heads of q share.
        k_scale: float32 ``[S]``, positive: factor of the scores of each key, or None.
        weights: float32 ``[T, H]``; they include the scales of q, of the heads and of the softmax.
        cu_seqlen_ks: int32 ``[T]``: the first key of each query.
        cu_seqlen_ke: int32 ``[T]``: the key after each query's last one. Positions outside k are ignored.
        out: destination, float32 ``[T, S]``; it must overlap no operand.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        float32 ``[T, S]``: ``k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])``, and -inf outside of a
        query's range.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        DeepSeek-V3.2 (2025), equation 1; `fp8_mqa_logits` of DeepGEMM with ``clean_logits=True``.

    Example:
        >>> import torch, kernelhub
        >>> q, k, weights = torch.randn(4, 64, 128), torch.randn(10, 128), torch.rand(4, 64)
        >>> ends = torch.arange(7, 11, dtype=torch.int32)
        >>> logits = kernelhub.mqa_logits(q, k, None, weights, torch.zeros_like(ends), ends)
        >>> logits.shape, logits[0].isinf().sum()
        (torch.Size([4, 10]), tensor(3))
    """
    if type(q) is not Tensor and isinstance(q, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(**locals())
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out, backend)
        if again is not None:
            return again
    try:
        _, heads, width = q.shape
        key = (q.dtype, heads, width, k_scale is not None)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out)
        run = _op.decide(key, q.get_device(), backend)
    result: Tensor = run(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out)
    return result
