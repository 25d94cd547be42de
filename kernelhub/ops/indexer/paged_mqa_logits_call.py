"""How a call of `paged_mqa_logits` becomes a launch: its problem, its checks, its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.lost import failed
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, describe, dtype_name, usable
from kernelhub.ops.indexer.arguments import any_tensor, check_tensor
from kernelhub.ops.indexer.layout import SCALE_BYTES, is_fused, split_cache
from kernelhub.ops.indexer.problem import DTYPES, FP8, PagedLogitsProblem
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
    any_tensor(NAME, "q", q)
    if q.ndim != 4 or 0 in q.shape[1:]:
        refuse("q", f"has shape {list(q.shape)}", "give [B, next_n, H, D]")
    batch, next_n, heads, _ = q.shape
    check_tensor(NAME, "q", q, q.shape, _DTYPES, q.device)
    _check_cache(q, k_cache, k_scale_cache)
    check_tensor(NAME, "weights", weights, (batch * next_n, heads), _FLOAT32, q.device)
    any_tensor(NAME, "block_table", block_table)
    if block_table.ndim != 2:
        refuse("block_table", f"has shape {list(block_table.shape)}", f"give [{batch}, max_pages]")
    check_tensor(NAME, "block_table", block_table, (batch, block_table.shape[1]), _INT32, q.device)
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        refuse("block_table", f"has strides {block_table.stride()}", "give rows without gaps: .contiguous()")
    check_tensor(NAME, "seq_lens", seq_lens, (batch,), _INT32, q.device)
    if not isinstance(max_seq_len, int) or isinstance(max_seq_len, bool) or max_seq_len < 0:
        refuse("max_seq_len", f"is {max_seq_len!r}", "give an int from 0 up")
    if out is not None:
        check_tensor(NAME, "out", out, (batch * next_n, max_seq_len), _FLOAT32, q.device)


def _check_cache(q: Tensor, k_cache: Any, k_scale_cache: Any) -> None:
    width = q.shape[-1]
    any_tensor(NAME, "k_cache", k_cache)
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
    whole = k_cache.stride(-1) == 1 and k_cache.stride(1) == row
    if not whole or k_cache.stride(0) % SCALE_BYTES or k_cache.data_ptr() % SCALE_BYTES:
        refuse(
            "k_cache", f"has strides {k_cache.stride()}", "give pages without gaps that start at multiples of 4 bytes"
        )


def bind(
    adapter: Any,
    problem: PagedLogitsProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the views of the cache, the destination, the launch."""
    launch = adapter.launch
    form = (
        getattr(torch, problem.dtype),
        problem.num_heads,
        problem.head_dim,
        problem.page_size,
        problem.k_scale,
    )
    dtype, num_heads, head_dim, page_size, has_scale = form
    float32, int32, row = torch.float32, torch.int32, head_dim + SCALE_BYTES
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
        """Nothing that `check` would refuse, and what the kernel was made for."""
        if not usable(q, dtype, device) or q.ndim != 4 or not usable(block_table, int32, device):
            return False
        batch, next_n, heads, width = q.shape
        if heads != num_heads or width != head_dim or not next_n or block_table.ndim != 2:
            return False
        rows, most_pages = block_table.shape
        tokens = batch * next_n
        return (
            rows == batch
            and (most_pages < 2 or block_table.stride()[1] == 1)
            and type(max_seq_len) is int
            and max_seq_len >= 0
            and known_cache(k_cache, k_scale_cache)
            and alike(weights, (tokens, heads), float32, device)
            and alike(seq_lens, (batch,), int32, device)
            and (out is None or alike(out, (tokens, max_seq_len), float32, device))
        )

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
            and (alike(k_scale_cache, (shape[0], page_size), float32, device) if has_scale else k_scale_cache is None)
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
        if known(q, k_cache, k_scale_cache, weights, block_table, seq_lens, max_seq_len, out):
            k_cache, k_scale_cache = split_cache(k_cache, k_scale_cache, head_dim)
        else:
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
        if out is None:
            out = q.new_empty((weights.shape[0], max_seq_len), dtype=float32)
        if out.numel():
            tick()
            try:
                launch(q, k_cache, k_scale_cache, weights, block_table, seq_lens, out)
            except Exception as error:
                failed(launch, error)
                raise
        return out

    return run
