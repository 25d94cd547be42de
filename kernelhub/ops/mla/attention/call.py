"""How a call of `mla_attention` becomes a launch: its problem, its checks, its run. A step is `PagedStep`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernelhub.dispatch.lost import failed
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, describe, dtype_name, lse_shape, usable
from kernelhub.ops.attention.adapter import LENT, PagedStep, plan_step
from kernelhub.ops.attention.arguments import check_bound, refuse_grad, same_device
from kernelhub.ops.attention.last_steps import LastSteps
from kernelhub.ops.attention.operands import refuse_batch
from kernelhub.ops.attention.paged_call import checked_step
from kernelhub.ops.attention.problem import FLOATS, FP8, ONE, q_len_bucket
from kernelhub.ops.known_calls import KnownCalls
from kernelhub.ops.layer_calls import Repeats
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.operands import (
    check_count,
    check_destination,
    check_flag,
    check_number,
    check_operand,
    check_untransformed,
    is_plain_view,
    may_overlap,
)
from kernelhub.ops.values import checks_devices, values_to_check
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
    causal: Any,
    topk_indices: Any,
    sinks: Any,
    kv_scale: Any,
    return_lse: Any,
    out: Any,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
) -> None:
    """The facts of a key and the tensors beside it, checked when the key is new; `begin` checks metadata."""
    check_operand(NAME, "q", q)
    check_operand(NAME, "kv_cache", kv_cache)
    if q.ndim not in ((3,) if ragged else (3, 4)):
        wanted = "[T, H, D] with cu_seqlens_q" if ragged else "[num_seqs, H, D] or [num_seqs, tokens, H, D]"
        refuse("q", f"has shape {list(q.shape)}", f"give {wanted}")
    if q.dtype not in _FLOATS:
        refuse("q", f"has dtype {dtype_name(q.dtype)}", f"give {', '.join(FLOATS)}")
    heads, width = q.shape[-2:]
    if 0 in (heads, width):
        refuse("q", f"has shape {list(q.shape)}", "give at least one head and one element of each")
    if kv_cache.ndim not in (3, 4) or (kv_cache.ndim == 4 and kv_cache.shape[2] != 1):
        wanted = f"give [num_pages, page_size, {width}] or [num_pages, page_size, 1, {width}]"
        refuse("kv_cache", f"has shape {list(kv_cache.shape)}", wanted)
    if kv_cache.dtype is not q.dtype and kv_cache.dtype is not _FP8:
        refuse("kv_cache", f"has dtype {dtype_name(kv_cache.dtype)}", f"give {dtype_name(q.dtype)} as q, or {FP8}")
    if kv_cache.shape[-1] != width:
        refuse("kv_cache", f"has rows of {kv_cache.shape[-1]}", f"q has {width}: the latent, then the rotary part")
    if kv_cache.shape[1] == 0:
        refuse("kv_cache", f"has shape {list(kv_cache.shape)}", "a page holds at least one token")
    fix = f"give the width of the latent, from 1 to {width}, that of a row"
    value_dim = check_count(NAME, "value_dim", value_dim, 1, width, fix)
    check_scale(scale)
    check_flag(NAME, "causal", causal)
    check_flag(NAME, "return_lse", return_lse)
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
    beside = {"topk_indices": topk_indices, "sinks": sinks, "kv_scale": kv_scale}
    for name, tensor in {"kv_cache": kv_cache, **beside}.items():
        if isinstance(tensor, Tensor):
            check_operand(NAME, name, tensor)
            same_device(NAME, name, tensor, q)
    refuse_grad(NAME, ("q", "kv_cache"), (q, kv_cache))
    if out is not None:
        metadata = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
        for name, tensor in metadata.items():
            if isinstance(tensor, Tensor):
                check_operand(NAME, name, tensor)
        operands = {"q": q, "kv_cache": kv_cache, **beside, **metadata}
        check_destination(NAME, "out", out, (*q.shape[:-1], value_dim), q.dtype, q.device, operands)


def check_scale(scale: Any) -> float:
    """The factor of q k^T, which has no default: the width of q does not determine it."""
    fix = "give a finite float: one over the root of a head's width before absorption"
    return check_number(NAME, "scale", scale, fix)


def kv_scale_kind(kv_scale: Any) -> str | None:
    """The form of the scale: ``"value"``, ``"tensor"``, or None."""
    if kv_scale is None:
        return None
    if isinstance(kv_scale, Tensor):
        if not is_plain_view(kv_scale):
            check_operand(NAME, "kv_scale", kv_scale)
        if kv_scale.dtype is not torch.float32 or kv_scale.numel() != 1:
            form = f"is {dtype_name(kv_scale.dtype)} {list(kv_scale.shape)}"
            refuse("kv_scale", form, "give a float, or float32 of one element")
        if kv_scale.requires_grad:
            refuse_grad(NAME, ("kv_scale",), (kv_scale,))
        return "tensor"
    check_number(NAME, "kv_scale", kv_scale, "give a finite float, or float32 of one element")
    return "value"


def check_sinks(sinks: Any, heads: int) -> None:
    """One per head."""
    if not isinstance(sinks, Tensor) or not sinks.is_contiguous() or sinks.is_nested or heads == 1:
        check_operand(NAME, "sinks", sinks)
    if sinks.shape != (heads,):
        refuse("sinks", f"has shape {list(sinks.shape)}", f"give [{heads}], one per head")
    if sinks.dtype not in _FLOATS:
        refuse("sinks", f"has dtype {dtype_name(sinks.dtype)}", f"give {', '.join(FLOATS)}")
    if sinks.requires_grad:
        refuse_grad(NAME, ("sinks",), (sinks,))


def check_topk(topk_indices: Any, shape: Sequence[int]) -> None:
    """A list of positions for each token of q."""
    if not isinstance(topk_indices, Tensor) or not topk_indices.is_contiguous() or topk_indices.is_nested:
        check_operand(NAME, "topk_indices", topk_indices)
    if topk_indices.dtype is not torch.int32:
        refuse("topk_indices", f"has dtype {dtype_name(topk_indices.dtype)}", "give int32: .to(torch.int32)")
    if topk_indices.shape[:-1] != tuple(shape[:-2]):
        wanted = f"give [{', '.join(map(str, shape[:-2]))}, topk], a list for each token of q"
        refuse("topk_indices", f"has shape {list(topk_indices.shape)}", wanted)


def check_lists(topk_indices: Tensor, step: PagedStep, causal: bool) -> None:
    """No query lists a position that it sees twice: kernels would count it twice, and do not look."""
    lists = values_to_check(topk_indices)
    lengths = None if lists is None or step.num_seqs == 0 else values_to_check(step.seq_lens)
    if lists is None or lengths is None:
        return
    rows = lists.flatten(0, -2)
    if step.cu_seqlens_q is None:
        tokens = rows.shape[0] // step.num_seqs
        counts, ends = (
            torch.full_like(lengths, tokens),
            torch.arange(1, step.num_seqs + 1, device="cpu", dtype=torch.int64) * tokens,
        )
    else:
        offsets = values_to_check(step.cu_seqlens_q)
        if offsets is None:
            return
        counts, ends = offsets.diff(), offsets[1:]
    seen = lengths.repeat_interleave(counts)
    ordered = rows[: seen.shape[0]].sort(1).values
    if causal:
        seen = seen - (
            ends.repeat_interleave(counts) - 1 - torch.arange(seen.shape[0], device="cpu", dtype=torch.int64)
        )
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0) & (ordered[:, 1:] < seen[:, None])
    if bool(twice.any()):
        row, entry = (int(index) for index in twice.nonzero()[0])
        found = f"lists position {int(ordered[row, entry])} twice for token {row}"
        refuse("topk_indices", found, "list each position once, and -1 in what is left of a list")


def rows_of(kv_cache: Tensor) -> Tensor:
    """A cache [num_pages, page_size, D], or with a dimension of one head, as the former."""
    return kv_cache.squeeze(2) if kv_cache.ndim == 4 else kv_cache


def flat(topk_indices: Tensor | None) -> Tensor | None:
    """Lists of positions as [T, topk]."""
    return topk_indices.flatten(0, 1) if topk_indices is not None and topk_indices.ndim == 3 else topk_indices


def fits_of(problem: MlaProblem, device: int) -> Callable[[Any, Any], bool]:
    """Whether a layer's queries and cache are what a kernel was made for, with nothing that `check` would refuse.

    A plan may be run with others than it was prepared for, and so may a step.
    """
    dtype, kv_dtype = getattr(torch, problem.q_dtype), getattr(torch, problem.kv_dtype)
    heads, width, page_size = problem.num_heads, problem.head_dim, problem.page_size
    ragged, q_len = problem.ragged, problem.q_len

    def fits(q: Any, kv_cache: Any) -> bool:
        if not usable(q, dtype, device) or not usable(kv_cache, kv_dtype, device):
            return False
        if q.layout is not torch.strided or kv_cache.layout is not torch.strided:  # these have no strides to ask for
            return False
        if not ((q.is_contiguous() or is_plain_view(q)) and (kv_cache.is_contiguous() or is_plain_view(kv_cache))):
            return False
        shape, pages = q.shape, kv_cache.shape
        if len(shape) == 3:
            known: bool = shape[1] == heads and shape[2] == width and (ragged or q_len == ONE)
        else:
            known = not ragged and len(shape) == 4 and shape[2:] == (heads, width) and q_len_bucket(shape[1]) == q_len
        return (
            known
            and pages[1] == page_size
            and pages[-1] == width
            and (len(pages) == 3 or (len(pages) == 4 and pages[2] == 1))
        )

    return fits


def check_form(problem: MlaProblem, q: Tensor, kv_cache: Tensor) -> None:
    """Name the difference between a call that is right in itself and what a plan was prepared for."""
    dims = (problem.num_heads, problem.head_dim)
    if dtype_name(q.dtype) != problem.q_dtype or q.shape[-2:] != dims:
        refuse("q", f"is {describe(q)}", f"the plan is for {problem.q_dtype} [..., {dims[0]}, {dims[1]}]")
    q_len = problem.q_len if problem.ragged else ONE if q.ndim == 3 else q_len_bucket(q.shape[1])
    if q_len != problem.q_len:
        tokens = f"{problem.q_len} query tokens per sequence"
        refuse("q", f"is {describe(q)}", f"the plan is for {tokens}; prepare one for this form")
    pages = (problem.page_size, problem.head_dim)
    if dtype_name(kv_cache.dtype) != problem.kv_dtype or (*kv_cache.shape[1:2], *kv_cache.shape[-1:]) != pages:
        wanted = f"the plan is for {problem.kv_dtype} [..., {pages[0]}, {pages[1]}]"
        refuse("kv_cache", f"is {describe(kv_cache)}", wanted)


def recheck(
    problem: MlaProblem, q: Any, kv_cache: Any, max_seqlen_q: Any, topk_indices: Any, values: MlaValues
) -> None:
    """Refuse by name a layer's operands that do not fit, or that a launch could not take."""
    check_operand(NAME, "q", q)
    check_operand(NAME, "kv_cache", kv_cache)
    check_form(problem, q, kv_cache)
    given = (q, kv_cache, values.scale, problem.value_dim, problem.ragged, max_seqlen_q, problem.causal, topk_indices)
    check(*given, values.sinks, values.kv_scale, problem.lse, None, None, None, None)


def destination_of(problem: MlaProblem, device: int) -> Callable[..., Tensor]:
    """The function that makes `out`, or checks the one that is given."""
    dtype, value_dim = getattr(torch, problem.q_dtype), problem.value_dim

    def destination(
        out: Any, q: Tensor, kv_cache: Tensor, topk_indices: Tensor | None, values: MlaValues, step: PagedStep
    ) -> Tensor:
        shape = q.shape
        wanted = (shape[0], shape[1], value_dim) if len(shape) == 3 else (*shape[:-1], value_dim)
        if out is None:
            return q.new_empty(*wanted)
        beside = (topk_indices, values.sinks, step.block_table, step.seq_lens, step.cu_seqlens_q)
        if not (
            alike(out, wanted, dtype, device)
            and out.layout is torch.strided
            and out.is_contiguous()
            and not may_overlap(out, (q, kv_cache, *beside))
        ):
            names = ("topk_indices", "sinks", "block_table", "seq_lens", "cu_seqlens_q")
            operands = {"q": q, "kv_cache": kv_cache, **dict(zip(names, beside, strict=True))}
            check_destination(NAME, "out", out, wanted, dtype, q.device, operands)
        made: Tensor = out
        return made

    return destination


def with_plain_sinks(values: MlaValues) -> MlaValues:
    """Contiguous sinks, as kernels read them; every launch makes the copy, so that it is never stale."""
    sinks = values.sinks
    return values if sinks is None or sinks.is_contiguous() else values._replace(sinks=sinks.contiguous())


def bind(
    adapter: Any,
    problem: MlaProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a direct call runs: the checks, the step's metadata, the destination, the launch."""
    launch = adapter.launch
    ragged, returns_lse = problem.ragged, problem.lse
    fits, destination = fits_of(problem, device), destination_of(problem, device)
    # The layers of a step share its tensors, so they are checked once. In CPU memory the values behind the
    # same tensors may have changed, and are read anew.
    reusable = problem.device.type != "cpu" and not adapter.plans_steps and not checks_devices()
    steps: LastSteps[PagedStep] = LastSteps()
    learn = adapter.again if reusable and adapter.repeats and not ragged and not problem.sparse else None
    before: _Before | None = None
    calls, value_dim = KnownCalls(), problem.value_dim

    def repeat(
        q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float, width: int, out: Tensor | None
    ) -> Tensor | None:
        """The result of a call like the last one, which `again` compares with it; None, with nothing done, for others.

        Of what `again` does not compare, the caller has made sure: no offsets, no bound and no features.
        """
        if (
            before is None
            or type(scale) is not float
            or before.values != (scale, None, None)
            or type(width) is not int
            or width != value_dim
            or type(q) is not Tensor
            or q.ndim != 3
            or type(kv_cache) is not Tensor
            or kv_cache.ndim != 3
            or forward_ad._current_level >= 0
            or (out is None and (q.layout is not torch.strided or q.is_nested))
        ):
            return None
        made = q.new_empty(*q.shape[:-1], value_dim) if out is None else out
        try:
            if not before.again(q, kv_cache, made, block_table, seq_lens):
                return None
        except Exception as error:
            failed(launch, error)
            raise
        tick()
        return made

    def found(scale: float, width: int) -> Repeats | None:
        if before is None or type(scale) is not float or before.values != (scale, None, None) or width != value_dim:
            return None
        return Repeats(launch, before.again, tick)

    repeat.found = found  # type: ignore[attr-defined]

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
        checked: bool = False,
    ) -> Any:
        """`checked`: the call was checked, and this function made for it."""
        nonlocal before
        if (
            before is not None  # it compares the forms of all tensors, and whether `out` is apart
            and values == before.values
            and topk_indices is None
            and cu_seqlens_q is None
            and max_seqlen_q is None
            and forward_ad._current_level < 0
            and (out is not None or q.layout is torch.strided)
        ):
            made = q.new_empty(*q.shape[:-1], value_dim) if out is None else out
            try:
                if before.again(q, rows_of(kv_cache), made, block_table, seq_lens):
                    tick()
                    return made
            except Exception as error:
                failed(launch, error)
                raise
        if q.get_device() != device:
            run_there = elsewhere(q.get_device())
            return run_there(q, kv_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, topk_indices, values, out)
        given = (q, kv_cache, topk_indices, values.sinks, block_table, seq_lens, cu_seqlens_q, out)
        key = None if q.is_nested else (q.shape, out is None)
        as_before = checked or calls.holds(key, given)
        if as_before:
            pass
        elif not fits(q, kv_cache):
            recheck(problem, q, kv_cache, max_seqlen_q, topk_indices, values)
        else:
            check_untransformed(NAME, {"q": q, "kv_cache": kv_cache})
        step = steps.last
        if (
            step is None
            or step.block_table is not block_table
            or step.seq_lens is not seq_lens
            or step.cu_seqlens_q is not cu_seqlens_q
            or step.max_seqlen_q != max_seqlen_q
        ):
            step = steps.find(block_table, seq_lens, cu_seqlens_q, max_seqlen_q)
            if step is None:
                metadata = block_table, seq_lens, cu_seqlens_q, max_seqlen_q
                pages, rows = kv_cache.shape[0], q.shape[0]
                step = checked_step(
                    problem.page_size, ragged, q.device, pages, rows, *metadata, op=NAME, cache="kv_cache"
                )
                plan_step(adapter, step)
                if reusable and not LENT.now:
                    steps.keep(step)
        if topk_indices is not None:
            check_topk(topk_indices, q.shape)
            same_device(NAME, "topk_indices", topk_indices, q)
            check_lists(topk_indices, step, problem.causal)
        if values.sinks is not None:
            same_device(NAME, "sinks", values.sinks, q)
            values = with_plain_sinks(values)
        if isinstance(values.kv_scale, Tensor):
            same_device(NAME, "kv_scale", values.kv_scale, q)
        shape = q.shape
        if not ragged and shape[0] != step.num_seqs:
            refuse_batch(shape, step.num_seqs, NAME)
        if out is None or not as_before:
            out = destination(out, q, kv_cache, topk_indices, values, step)
        if checked or not as_before:
            calls.learn(key, given, 1)
        lse = q.new_empty(*lse_shape(shape), dtype=torch.float32) if returns_lse else None
        if 0 not in shape:
            tick()
            try:
                launch(q, rows_of(kv_cache), flat(topk_indices), step, values, out, lse)
            except Exception as error:
                failed(launch, error)
                recheck(problem, q, kv_cache, max_seqlen_q, topk_indices, values)
                raise
            if learn is not None and cu_seqlens_q is None and max_seqlen_q is None:
                again = learn(step, values)
                before = None if again is None else _Before(values, again)
        return out if lse is None else (out, lse)

    if learn is not None and not returns_lse:
        run.repeat = repeat  # type: ignore[attr-defined]

    return run


class _Before(NamedTuple):
    """The last call of a kernel that is repeated.

    Attributes:
        values: as they were given, without tensors.
        again: see `MlaAdapter.again`.
    """

    values: MlaValues
    again: Callable[..., bool]
