"""`paged_mqa_logits`: the indexer's scores of the keys of a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.forms import python_value
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, describe, dtype_name, usable
from kernelhub.ops.call_plan import CallPlan, prepares
from kernelhub.ops.indexer.adapter import PagedLogitsAdapter
from kernelhub.ops.indexer.arguments import check_tensor
from kernelhub.ops.indexer.layout import SCALE_BYTES, is_fused, split_cache
from kernelhub.ops.indexer.problem import DTYPES, FP8, PAGED_MQA_LOGITS, PagedLogitsProblem
from kernelhub.ops.indexer.reference import paged_mqa_logits_reference
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.operands import (
    check_count,
    check_destination,
    check_operand,
    check_untransformed,
    is_plain_view,
    may_overlap,
)
from kernelhub.ops.operators import Traced
from kernelhub.ops.values import checks_devices, values_to_check
from kernelhub.probes.device import facts_of

NAME = "paged_mqa_logits"
_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_INT32, _FLOAT32 = (torch.int32,), (torch.float32,)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> PagedLogitsProblem:
    """The problem that a key means on a device; the key is built in `paged_mqa_logits`."""
    dtype, num_heads, head_dim, page_size, has_scale = key
    return PagedLogitsProblem(
        device=facts_of(device),
        dtype=dtype_name(dtype),
        num_heads=num_heads,
        head_dim=head_dim,
        page_size=page_size,
        k_scale=has_scale,
    )


def check(
    q: Any,
    k_cache: Any,
    k_scale_cache: Any,
    weights: Any,
    block_table: Any,
    seq_lens: Any,
    max_seq_len: Any,
    out: Any,
) -> None:
    """Everything that the contract says of a call."""
    check_operand(NAME, "q", q)
    if q.ndim != 4 or 0 in q.shape[1:]:
        refuse("q", f"has shape {list(q.shape)}", "give [B, next_n, H, D]")
    batch, next_n, heads, _ = q.shape
    check_tensor(NAME, "q", q, q.shape, _DTYPES, q.device)
    _check_cache(q, k_cache, k_scale_cache)
    check_tensor(NAME, "weights", weights, (batch * next_n, heads), _FLOAT32, q.device)
    check_operand(NAME, "block_table", block_table)
    if block_table.ndim != 2:
        refuse("block_table", f"has shape {list(block_table.shape)}", f"give [{batch}, max_pages]")
    check_tensor(NAME, "block_table", block_table, (batch, block_table.shape[1]), _INT32, q.device)
    check_tensor(NAME, "seq_lens", seq_lens, (batch,), _INT32, q.device)
    check_count(NAME, "max_seq_len", max_seq_len)
    if out is not None:
        read = {"q": q, "k_cache": k_cache, "k_scale_cache": k_scale_cache, "weights": weights}
        metadata = {"block_table": block_table, "seq_lens": seq_lens}
        wanted = (batch * next_n, max_seq_len)
        check_destination(NAME, "out", out, wanted, torch.float32, q.device, read | metadata)
    check_values(block_table, seq_lens, k_cache.shape[1], k_cache.shape[0], max_seq_len)


def check_values(block_table: Tensor, seq_lens: Tensor, page_size: int, num_pages: int, max_seq_len: int) -> None:
    """Lengths have room, and pages are the cache's; on a GPU that is looked at with KERNELHUB_CHECK=1 only."""
    lengths, table = values_to_check(seq_lens), values_to_check(block_table)
    if lengths is None or table is None or not lengths.numel():
        return
    room = table.shape[1] * page_size
    least, most = (int(value) for value in torch.aminmax(lengths))
    if least < 0 or most > min(room, max_seq_len):
        wrong = (lengths < 0) | (lengths > min(room, max_seq_len))
        sequence = int(wrong.int().argmax())
        length = int(lengths[sequence])
        if 0 <= length <= room:
            wanted = f"max_seq_len is {max_seq_len}"
        else:
            wanted = f"block_table has room for {room} ({table.shape[1]} pages of {page_size})"
        refuse("seq_lens", f"is {length} for sequence {sequence}", wanted)
    if not table.numel():
        return
    least, most = (int(value) for value in torch.aminmax(table))
    if least >= 0 and most < num_pages:
        return
    used = torch.arange(table.shape[1], device=lengths.device) * page_size < lengths[:, None]
    foreign = used & ((table < 0) | (table >= num_pages))
    if foreign.any():
        row, column = foreign.nonzero()[0].tolist()
        named = f"names page {int(table[row, column])} at [{row}, {column}]"
        refuse("block_table", named, f"k_cache has {num_pages} pages")


def _check_cache(q: Tensor, k_cache: Any, k_scale_cache: Any) -> None:
    width = q.shape[-1]
    check_operand(NAME, "k_cache", k_cache)
    if is_fused(k_cache):
        _check_fused(q, k_cache)
        if k_scale_cache is not None:
            refuse("k_scale_cache", "is given with a k_cache that holds scales", "give None")
        return
    if k_cache.ndim != 3 or 0 in k_cache.shape[1:]:
        refuse("k_cache", f"has shape {list(k_cache.shape)}", f"give [pages, page_size, {width}]")
    check_tensor(NAME, "k_cache", k_cache, (*k_cache.shape[:2], width), (q.dtype,), q.device)
    if k_scale_cache is not None:
        check_tensor(NAME, "k_scale_cache", k_scale_cache, k_cache.shape[:2], _FLOAT32, q.device)


def _check_fused(q: Tensor, k_cache: Tensor) -> None:
    row = q.shape[-1] + SCALE_BYTES
    if dtype_name(q.dtype) != FP8:
        refuse("k_cache", f"is uint8 with a q of {dtype_name(q.dtype)}", f"give {dtype_name(q.dtype)}, or a q of {FP8}")
    if row % SCALE_BYTES:
        refuse("k_cache", f"is uint8 with heads of {q.shape[-1]}", "its scales need a width divisible by 4")
    shape = list(k_cache.shape)
    if len(shape) not in (3, 4) or shape[1] == 0 or shape[-1] != row or (len(shape) == 4 and shape[2] != 1):
        refuse(
            "k_cache", f"is uint8 of shape {shape}", f"give [pages, page_size, {row}] or [pages, page_size, 1, {row}]"
        )
    check_tensor(NAME, "k_cache", k_cache, k_cache.shape, (torch.uint8,), q.device)
    whole = k_cache.stride(-1) == 1 and (k_cache.stride(1) == row or shape[1] == 1)
    if not whole or (k_cache.stride(0) % SCALE_BYTES and shape[0] > 1) or k_cache.data_ptr() % SCALE_BYTES:
        refuse(
            "k_cache", f"has strides {k_cache.stride()}", "give pages without gaps that start at multiples of 4 bytes"
        )


def _adjacent(block_table: Tensor) -> Tensor:
    """With contiguous rows, as kernels read them; the stride between rows is free."""
    return block_table if block_table.stride(1) == 1 else block_table.contiguous()


def bind(
    adapter: Any,
    problem: PagedLogitsProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the views of the cache, the destination, the launch."""
    launch, calls, repeats = adapter.launch, KnownCalls(adapter.launch), is_repeated(adapter)
    form = (
        getattr(torch, problem.dtype),
        problem.num_heads,
        problem.head_dim,
        problem.page_size,
        problem.k_scale,
    )
    dtype, num_heads, head_dim, page_size, has_scale = form
    float32, int32, row = torch.float32, torch.int32, head_dim + SCALE_BYTES
    looks = problem.device.type == "cpu" or checks_devices()
    repeats = repeats and not looks
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds
    fusable = has_scale and dtype is torch.float8_e4m3fn and row % SCALE_BYTES == 0

    def known(
        q: Tensor,
        k_cache: Tensor,
        k_scale_cache: Tensor | None,
        weights: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        out: Tensor | None,
    ) -> bool:
        """Whether `check` would accept the operands and they fit the kernel."""
        if not usable(q, dtype, device) or q.ndim != 4 or not usable(block_table, int32, device):
            return False
        batch, next_n, heads, width = q.shape
        if heads != num_heads or width != head_dim or not next_n or block_table.ndim != 2:
            return False
        rows = block_table.shape[0]
        tokens = batch * next_n
        if not (
            rows == batch
            and type(max_seq_len) is int
            and max_seq_len >= 0
            and known_cache(k_cache, k_scale_cache)
            and alike(weights, (tokens, heads), float32, device)
            and alike(seq_lens, (batch,), int32, device)
            and (block_table.is_contiguous() or is_plain_view(block_table))
            and (seq_lens.is_contiguous() or is_plain_view(seq_lens))
            and ((q.is_contiguous() and heads * width > 1) or is_plain_view(q))
            and ((weights.is_contiguous() and tokens * heads > 1) or is_plain_view(weights))
        ):
            return False
        if out is None:
            return True
        if not (alike(out, (tokens, max_seq_len), float32, device) and out.is_contiguous()):
            return False
        return not may_overlap(out, (q, k_cache, k_scale_cache, weights, block_table, seq_lens))

    def known_cache(k_cache: Tensor, k_scale_cache: Tensor | None) -> bool:
        if not isinstance(k_cache, Tensor):
            return False
        shape = k_cache.shape
        if k_cache.dtype is not dtype:
            strides = k_cache.stride()
            return (
                fusable
                and k_scale_cache is None
                and usable(k_cache, torch.uint8, device)
                and (len(shape) == 3 or (len(shape) == 4 and shape[2] == 1))
                and (shape[1], shape[-1], strides[1], strides[-1]) == (page_size, row, row, 1)
                and not strides[0] % SCALE_BYTES
                and not k_cache.data_ptr() % SCALE_BYTES
            )
        return (
            usable(k_cache, dtype, device)
            and len(shape) == 3
            and shape[1] == page_size
            and shape[2] == head_dim
            and (k_cache.is_contiguous() or is_plain_view(k_cache))
            and (
                (
                    alike(k_scale_cache, (shape[0], page_size), float32, device)
                    and k_scale_cache is not None
                    and ((k_scale_cache.is_contiguous() and shape[0] * page_size > 1) or is_plain_view(k_scale_cache))
                )
                if has_scale
                else k_scale_cache is None
            )
        )

    def run(
        q: Tensor,
        k_cache: Tensor,
        k_scale_cache: Tensor | None,
        weights: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        out: Tensor | None,
    ) -> Tensor:
        if q.get_device() != device:
            result: Tensor = elsewhere(q.get_device())(
                q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out
            )
            return result
        passed, key, again, made = (q, k_cache, k_scale_cache, weights, block_table, seq_lens), None, 0, out
        # A form does not say where memory begins, and scales of whole pages have to begin at multiples of their size.
        if not q.is_nested and type(k_cache) is Tensor and not k_cache.is_nested and type(max_seq_len) is int:
            key = q.shape, k_cache.shape, max_seq_len, out is None
            if (
                key in calls
                and k_cache.layout is torch.strided
                and not (k_cache.dtype is torch.uint8 and k_cache.data_ptr() % SCALE_BYTES)
            ):
                if out is None and q.layout is torch.strided:
                    made = q.new_empty(q.shape[0] * q.shape[1], max_seq_len, dtype=float32)
                if made is not None:
                    again = recognise(key, (*passed, made))
                    if again == 2:
                        tick()
                        return made
        try:
            right = again == 1 or known(q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out)
        except (AttributeError, RuntimeError):  # what has no shape or no memory; `check` names it
            right = False
        given = (k_cache, k_scale_cache)
        if right:
            if not again:
                check_untransformed(NAME, {"q": q, "k_cache": k_cache, "weights": weights})
            if looks:
                check_values(block_table, seq_lens, page_size, k_cache.shape[0], max_seq_len)
            k_cache, k_scale_cache = split_cache(k_cache, k_scale_cache, head_dim)
        else:
            max_seq_len = python_value(max_seq_len)
            check(q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out)
            k_cache, k_scale_cache = split_cache(k_cache, k_scale_cache, q.shape[-1])
            if (q.dtype, *q.shape[2:], k_cache.shape[1], k_scale_cache is not None) != form:
                wanted = f"{problem.dtype} [B, next_n, {num_heads}, {head_dim}]"
                scaled = "with" if has_scale else "without"
                refuse(
                    "q",
                    f"is {describe(q)}, k_cache {describe(k_cache)}",
                    f"the plan is for {wanted} and pages of {page_size} {scaled} scales",
                )
        if made is None:
            made = q.new_empty(weights.shape[0], max_seq_len, dtype=float32)
        if not again:
            calls.learn(key, (*passed, made), 1)
        if made.numel():
            tick()
            pages = block_table if block_table.is_contiguous() else _adjacent(block_table)
            launched = (q, k_cache, k_scale_cache, weights, pages, seq_lens, made)
            try:
                launch(*launched)
            except Exception as error:
                failed(launch, error)
                check(q, *given, weights, block_table, seq_lens, max_seq_len, out)
                raise
            if again and repeats:
                calls.attach(key, (*passed, made), adapter.repeated, *launched)
        return made

    return run


_op: Op[PagedLogitsProblem] = Op(
    Contract.of(
        PAGED_MQA_LOGITS,
        problem_of=problem_of,
        adapter=PagedLogitsAdapter,
        bind=bind,
        reference=paged_mqa_logits_reference,
        example="kernelhub.ops.indexer.inputs:paged_logits_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class PagedLogitsPlan(CallPlan):
    """A kernel selected for queries like these: ``run`` takes the arguments of `paged_mqa_logits` but ``backend``."""

    __slots__ = ()
    call = "q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out"


def _memory(q: Tensor, weights: Tensor, max_seq_len: int, **others: Any) -> dict[str, Tensor]:
    return {"out": weights.new_empty((q.shape[0] * q.shape[1], max_seq_len), dtype=torch.float32)}


@publish(_op, prepares(_op, PagedLogitsPlan), traced=Traced(_memory))
def paged_mqa_logits(
    q: Tensor,
    k_cache: Tensor,
    k_scale_cache: Tensor | None,
    weights: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Score the keys of a paged cache for the last tokens of each sequence: `mqa_logits` of a decode step.

    Args:
        q: ``[B, next_n, H, D]``, float8_e4m3fn, bfloat16, float16 or float32: the last `next_n` tokens of each
            sequence, more than one with speculation.
        k_cache: ``[pages, page_size, D]`` in the same dtype. Or, for a float8_e4m3fn q, uint8
            ``[pages, page_size, D + 4]`` or ``[pages, page_size, 1, D + 4]``: each page has the bytes of all its
            values, then all its float32 scales.
        k_scale_cache: float32 ``[pages, page_size]``, positive: factor of the scores of each key. None if there are no
            scales or `k_cache` contains them.
        weights: float32 ``[B * next_n, H]``; they include the scales of q, of the heads and of the softmax.
        block_table: int32 ``[B, max_pages]``: the pages of each sequence; entries past its length are not read.
        seq_lens: int32 ``[B]``: keys of each sequence, including its last `next_n` tokens.
        max_seq_len: columns of the result; no sequence may be longer. On a GPU only ``KERNELHUB_CHECK=1`` checks
            lengths and pages.
        out: destination, float32 ``[B * next_n, max_seq_len]``; it must overlap no operand.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        float32 ``[B * next_n, max_seq_len]``: token i of `next_n` sees the first ``seq_lens - next_n + 1 + i`` keys,
        the columns after them are -inf.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        DeepSeek-V3.2 (2025), equation 1; `fp8_paged_mqa_logits` of DeepGEMM with ``clean_logits=True``. The uint8
        cache is that of DeepGEMM, vLLM and SGLang.

    Example:
        >>> import torch, kernelhub
        >>> q, weights = torch.randn(2, 1, 64, 128), torch.rand(2, 64)
        >>> k_cache, table = torch.randn(5, 16, 128), torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
        >>> lengths = torch.tensor([20, 3], dtype=torch.int32)
        >>> logits = kernelhub.paged_mqa_logits(q, k_cache, None, weights, table, lengths, 32)
        >>> logits.isfinite().sum(1)
        tensor([20,  3])
    """
    if type(q) is not Tensor and isinstance(q, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(**locals())
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(
            q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out, backend
        )
        if again is not None:
            return again
    try:
        _, _, heads, width = q.shape
        key = (q.dtype, heads, width, k_cache.shape[1], k_scale_cache is not None or is_fused(k_cache))
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out)
        run = _op.decide(key, q.get_device(), backend)
    result: Tensor = run(q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out)
    return result
