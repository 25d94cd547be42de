"""How a call of `mla_attention` becomes a launch: its problem, its checks, its run. A step is `PagedStep`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, is_grad_enabled

from kernelhub.dispatch.lost import failed
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, dtype_name, lse_shape
from kernelhub.ops.attention.adapter import LENT, PagedStep
from kernelhub.ops.attention.arguments import any_tensor, check_bound, check_out, refuse_grad, same_device
from kernelhub.ops.attention.operands import refuse_batch
from kernelhub.ops.attention.paged_call import begin
from kernelhub.ops.attention.problem import FLOATS, FP8
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.probes.device import facts_of

NAME = "mla_attention"
_FLOATS = tuple(getattr(torch, name) for name in FLOATS)
_FP8 = getattr(torch, FP8)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> MlaProblem:
    """The problem that a key means on a device; the key is built in `mla_attention`."""
    q_dtype, kv_dtype, num_heads, head_dim, page_size, _, value_dim, q_len, features = key
    ragged, causal, sparse, sinks, lse, kv_scale = features
    return MlaProblem(
        device=facts_of(device),
        q_dtype=dtype_name(q_dtype),
        kv_dtype=dtype_name(kv_dtype),
        num_heads=num_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        page_size=page_size,
        q_len=q_len,
        ragged=ragged,
        causal=causal,
        sparse=sparse,
        sinks=sinks,
        lse=lse,
        kv_scale=kv_scale,
    )


def check(
    q: Any,
    kv_cache: Any,
    scale: Any,
    value_dim: Any,
    ragged: bool,
    max_seqlen_q: Any,
    topk_indices: Any,
    sinks: Any,
    kv_scale: Any,
    out: Any,
) -> None:
    """All that a key holds, and the shapes beside it, checked when the key is new."""
    any_tensor(NAME, q=q, kv_cache=kv_cache)
    if q.ndim not in ((3,) if ragged else (3, 4)):
        wanted = "[T, H, D] with cu_seqlens_q" if ragged else "[num_seqs, H, D] or [num_seqs, tokens, H, D]"
        refuse("q", f"has shape {list(q.shape)}", f"give {wanted}")
    if q.dtype not in _FLOATS:
        refuse("q", f"has dtype {dtype_name(q.dtype)}", f"give {', '.join(FLOATS)}")
    if q.is_meta:
        refuse_meta()
    heads, width = q.shape[-2:]
    if 0 in (heads, width):
        refuse("q", f"has shape {list(q.shape)}", "give at least one head and one element of each")
    if kv_cache.ndim not in (3, 4) or (kv_cache.ndim == 4 and kv_cache.shape[2] != 1):
        wanted = f"give [num_pages, page_size, {width}] or [num_pages, page_size, 1, {width}]"
        refuse("kv_cache", f"has shape {list(kv_cache.shape)}", wanted)
    if kv_cache.shape[-1] != width:
        refuse("kv_cache", f"has rows of {kv_cache.shape[-1]}", f"q has {width}: the latent, then the rotary part")
    if kv_cache.shape[1] == 0:
        refuse("kv_cache", f"has shape {list(kv_cache.shape)}", "a page holds at least one token")
    if kv_cache.dtype is not q.dtype and kv_cache.dtype is not _FP8:
        refuse("kv_cache", f"has dtype {dtype_name(kv_cache.dtype)}", f"give {dtype_name(q.dtype)} as q, or {FP8}")
    if type(value_dim) is not int or not 0 < value_dim <= width:
        refuse("value_dim", f"is {value_dim!r}", f"give the width of the latent, from 1 to {width}, that of a row")
    check_scale(scale)
    check_bound(NAME, "max_seqlen_q", max_seqlen_q)
    kv_scale_kind(kv_scale)
    if kv_cache.dtype is _FP8 and kv_scale is None:
        refuse("kv_scale", "is None with an fp8 kv_cache", "give 1.0 if nothing was scaled")
    if kv_cache.dtype is not _FP8 and kv_scale is not None:
        refuse("kv_scale", f"is given with a {dtype_name(kv_cache.dtype)} kv_cache", "scales belong to an fp8 cache")
    if sinks is not None:
        check_sinks(sinks, heads)
    if topk_indices is not None:
        check_topk(topk_indices, q.shape)
    given = (("kv_cache", kv_cache), ("topk_indices", topk_indices), ("sinks", sinks), ("kv_scale", kv_scale))
    for name, tensor in (*given, ("out", out)):
        if isinstance(tensor, Tensor):
            same_device(NAME, name, tensor, q)
    if out is not None:
        any_tensor(NAME, out=out)
        check_out(NAME, out, q, (*q.shape[:-1], value_dim))
    refuse_grad(NAME, ("q", "kv_cache"), (q, kv_cache))


def refuse_meta() -> NoReturn:
    """q has no memory."""
    refuse("q", "is on meta", "give a tensor with memory, or a fake one under torch.compile")


def check_scale(scale: Any) -> None:
    """The factor of q k^T, which has no default: the width of q does not tell it."""
    if not isinstance(scale, float | int) or not math.isfinite(scale):
        refuse("scale", f"is {scale!r}", "give a finite float: one over the root of a head's width before absorption")


def kv_scale_kind(kv_scale: Any) -> str | None:
    """How the scale arrives: ``"value"``, ``"tensor"``, or None."""
    if kv_scale is None:
        return None
    if isinstance(kv_scale, Tensor):
        if kv_scale.dtype is not torch.float32 or kv_scale.numel() != 1:
            form = f"is {dtype_name(kv_scale.dtype)} {list(kv_scale.shape)}"
            refuse("kv_scale", form, "give a float, or float32 of one element")
        if kv_scale.requires_grad:
            refuse_grad(NAME, ("kv_scale",), (kv_scale,))
        return "tensor"
    if not isinstance(kv_scale, float | int) or not math.isfinite(kv_scale):
        refuse("kv_scale", f"is {kv_scale!r}", "give a finite float, or float32 of one element")
    return "value"


def check_sinks(sinks: Any, heads: int) -> None:
    """One per head."""
    any_tensor(NAME, sinks=sinks)
    if sinks.shape != (heads,):
        refuse("sinks", f"has shape {list(sinks.shape)}", f"give [{heads}], one per head")
    if sinks.dtype not in _FLOATS:
        refuse("sinks", f"has dtype {dtype_name(sinks.dtype)}", f"give {', '.join(FLOATS)}")
    if sinks.requires_grad:
        refuse_grad(NAME, ("sinks",), (sinks,))


def check_topk(topk_indices: Any, shape: Sequence[int]) -> None:
    """A list of positions for each token of q."""
    any_tensor(NAME, topk_indices=topk_indices)
    if topk_indices.dtype is not torch.int32:
        refuse("topk_indices", f"has dtype {dtype_name(topk_indices.dtype)}", "give int32: .to(torch.int32)")
    if topk_indices.shape[:-1] != tuple(shape[:-2]):
        wanted = f"give [{', '.join(map(str, shape[:-2]))}, topk], a list for each token of q"
        refuse("topk_indices", f"has shape {list(topk_indices.shape)}", wanted)


def rows_of(kv_cache: Tensor) -> Tensor:
    """A cache [num_pages, page_size, D], or with a dimension of one head, as the former."""
    return kv_cache.squeeze(2) if kv_cache.ndim == 4 else kv_cache


def flat(topk_indices: Tensor | None) -> Tensor | None:
    """Lists of positions as [T, topk]."""
    return topk_indices.flatten(0, 1) if topk_indices is not None and topk_indices.ndim == 3 else topk_indices


def bind(
    adapter: Any,
    problem: MlaProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a direct call runs: the step's metadata, the destination, the launch."""
    launch = adapter.launch
    ragged, value_dim, returns_lse = problem.ragged, problem.value_dim, problem.lse
    dtype = getattr(torch, problem.q_dtype)
    # The layers of a step share its tensors, so they are checked once. In CPU memory the values behind the
    # same tensors may have changed, and are read anew.
    reusable = problem.device.type != "cpu" and not adapter.plans_steps
    last: PagedStep | None = None

    def run(
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor | None,
        max_seqlen_q: int | None,
        topk_indices: Tensor | None,
        values: MlaValues,
        out: Tensor | None,
    ) -> Any:
        nonlocal last
        if q.get_device() != device:
            run_there = elsewhere(q.get_device())
            return run_there(q, kv_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, topk_indices, values, out)
        if device < 0 and q.is_meta:
            refuse_meta()
        if is_grad_enabled() and (q.requires_grad or kv_cache.requires_grad):
            refuse_grad(NAME, ("q", "kv_cache"), (q, kv_cache))
        shape = q.shape
        step = last
        if (
            step is None
            or step.block_table is not block_table
            or step.seq_lens is not seq_lens
            or step.cu_seqlens_q is not cu_seqlens_q
            or step.max_seqlen_q != max_seqlen_q
        ):
            step = begin(
                problem,
                adapter,
                q.device,
                kv_cache.shape[0],
                shape[0],
                block_table,
                seq_lens,
                cu_seqlens_q,
                max_seqlen_q,
                op=NAME,
                cache="kv_cache",
            )
            if reusable and not LENT.now:
                step.outlive()
                last = step
        if kv_cache.device != q.device:
            same_device(NAME, "kv_cache", kv_cache, q)
        if topk_indices is not None:
            check_topk(topk_indices, shape)
            same_device(NAME, "topk_indices", topk_indices, q)
        if values.sinks is not None:
            same_device(NAME, "sinks", values.sinks, q)
        if isinstance(values.kv_scale, Tensor):
            same_device(NAME, "kv_scale", values.kv_scale, q)
        if not ragged and shape[0] != step.num_seqs:
            refuse_batch(shape, step.num_seqs, NAME)
        wanted = (shape[0], shape[1], value_dim) if len(shape) == 3 else (*shape[:-1], value_dim)
        if out is None:
            out = q.new_empty(wanted)
        elif not alike(out, wanted, dtype, device) or out.data_ptr() == q.data_ptr():
            any_tensor(NAME, out=out)
            check_out(NAME, out, q, wanted)
            same_device(NAME, "out", out, q)
        lse = q.new_empty(lse_shape(shape), dtype=torch.float32) if returns_lse else None
        if 0 not in shape:
            tick()
            try:
                launch(q, rows_of(kv_cache), flat(topk_indices), step, values, out, lse)
            except Exception as error:
                failed(launch, error)
                raise
        return out if lse is None else (out, lse)

    return run
