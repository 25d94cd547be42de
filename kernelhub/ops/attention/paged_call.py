"""How a call of `paged_attention` becomes a launch: its problem, its checks, its step, its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, strided
from torch.autograd import forward_ad

from kernelhub.dispatch.lost import failed
from kernelhub.ops.arguments import dtype_name, lse_shape, refuse
from kernelhub.ops.attention.adapter import LENT, PagedStep, plan_step
from kernelhub.ops.attention.arguments import (
    FEATURES,
    PLAIN,
    Given,
    Values,
    adjacent,
    check_bound,
    check_extras,
    check_index,
    check_offsets,
    check_operands,
    extras_of,
    finite_scale,
    known_values,
)
from kernelhub.ops.attention.last_steps import LastSteps
from kernelhub.ops.attention.operands import accept_call, check_out, empties_of, refuse_batch
from kernelhub.ops.attention.problem import ONE, PagedAttentionProblem
from kernelhub.ops.attention.step_values import check_lengths, check_of_host_values, check_pages
from kernelhub.ops.known_form import KnownForm
from kernelhub.ops.layer_calls import Repeats
from kernelhub.ops.operands import check_operand, may_overlap_itself_or
from kernelhub.ops.values import checks_devices, values_to_check
from kernelhub.probes.device import facts_of

NAME = "paged_attention"
NHD, HND = "NHD", "HND"
_MORE = tuple(map(Values._fields.index, ("sinks", "k_scale", "v_scale")))  # then the offsets, as `optional_tensors`


def problem_of(key: Any, device: int) -> PagedAttentionProblem:
    """The problem that a key means on a device; the key is built in `paged_attention`."""
    q_dtype, kv_dtype, num_q_heads, head_dim_qk, dim1, dim2, _, rest = key
    head_dim_vo, kv_layout, ragged, q_len, features = rest or (head_dim_qk, NHD, False, ONE, PLAIN)
    page_size, num_kv_heads = (dim1, dim2) if kv_layout == NHD else (dim2, dim1)
    return PagedAttentionProblem(
        device=facts_of(device),
        q_dtype=dtype_name(q_dtype),
        kv_dtype=dtype_name(kv_dtype),
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        q_len=q_len,
        kv_layout=kv_layout,
        ragged=ragged,
        **dict(zip(FEATURES, features, strict=True)),
    )


def check(given: Mapping[str, Any], plain: bool) -> None:
    """All that a key holds, checked when the key is new.

    Args:
        given: the call's arguments by parameter.
        plain: whether it has no feature.
    """
    q, k_cache, v_cache, kv_layout = given["q"], given["k_cache"], given["v_cache"], given["kv_layout"]
    ragged = given["cu_seqlens_q"] is not None
    for parameter, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_operand(NAME, parameter, tensor)
    if kv_layout not in (NHD, HND):
        refuse(NAME, "kv_layout", f"is {kv_layout!r}", "give 'NHD' or 'HND'")
    if q.ndim not in ((3,) if ragged else (3, 4)):
        wanted = "[T, H, D] with cu_seqlens_q" if ragged else "[num_seqs, H, D] or [num_seqs, tokens, H, D]"
        refuse(NAME, "q", f"has shape {list(q.shape)}", f"give {wanted}")
    wanted = "[num_pages, page_size, H, D]" if kv_layout == NHD else "[num_pages, H, page_size, D]"
    for parameter, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.ndim != 4:
            refuse(NAME, parameter, f"has shape {list(cache.shape)}", f"give {wanted} for kv_layout={kv_layout!r}")
    k_shape, v_shape = k_cache.shape, v_cache.shape
    if k_shape != v_shape and k_shape[:3] != v_shape[:3]:
        refuse(NAME, "v_cache", f"has shape {list(v_shape)}", f"k_cache has {list(k_shape)}; all but D agree")
    if 0 in k_shape[1:]:
        refuse(NAME, "k_cache", f"has shape {list(k_cache.shape)}", "a page holds at least one token of one head")
    check_bound(NAME, "max_seqlen_q", given["max_seqlen_q"])
    num_kv_heads, names = k_shape[2 if kv_layout == NHD else 1], ("q", "k_cache", "v_cache")
    check_operands(NAME, names, q, k_cache, v_cache, num_kv_heads, None if plain else Given.of(given), given["out"])


def checked_step(
    page_size: int,
    ragged: bool,
    device: torch.device,
    num_pages: int,
    num_tokens: int | None,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    lengths: Sequence[int] | None = None,
    q_offsets: Sequence[int] | None = None,
    op: str = NAME,
    cache: str = "k_cache",
    keep: bool = False,
) -> PagedStep:
    """Check one step's metadata.

    Sizes are always checked; values where they are on the host, given or in CPU tensors, or KERNELHUB_CHECK says so.

    Args:
        page_size, ragged: of the problem.
        device: of q.
        lengths: the values of seq_lens that the caller has on the host.
        q_offsets: the values of cu_seqlens_q that the caller has on the host.
        op, cache: for messages; `cache` is the parameter that holds the pages.
        keep: the metadata is read at later launches, too, with what the caller has written to it by then.
    """
    max_seqlen_q = check_bound(op, "max_seqlen_q", max_seqlen_q)
    check_index(op, "block_table", block_table, 2, "[num_seqs, max_pages]")
    check_index(op, "seq_lens", seq_lens, 1, "[num_seqs]")
    num_seqs, max_pages = block_table.shape
    if seq_lens.shape[0] != num_seqs:
        refuse(op, "seq_lens", f"has {seq_lens.shape[0]} lengths", f"block_table has {num_seqs} sequences")
    if (cu_seqlens_q is not None) != ragged:
        form = "is missing" if ragged else "is given"
        refuse(op, "cu_seqlens_q", f"{form}, unlike when the plan was prepared", "prepare a plan for this form")
    if cu_seqlens_q is not None:
        check_index(op, "cu_seqlens_q", cu_seqlens_q, 1, "[num_seqs + 1]")
        if cu_seqlens_q.shape[0] != num_seqs + 1:
            given = f"has {cu_seqlens_q.shape[0]} offsets for {num_seqs} sequences"
            refuse(op, "cu_seqlens_q", given, f"give {num_seqs + 1}")
    for parameter, tensor in (
        ("block_table", block_table),
        ("seq_lens", seq_lens),
        ("cu_seqlens_q", cu_seqlens_q),
    ):
        if tensor is not None and tensor.device != device:
            refuse(op, parameter, f"is on {tensor.device}", f"move it to {device}, where q is")
    block_table = adjacent(op, "block_table", block_table, keep)
    seq_lens = adjacent(op, "seq_lens", seq_lens, keep)
    lengths = known_values(op, "seq_lens", seq_lens, lengths)
    if lengths is not None:
        check_lengths(op, lengths, num_seqs, max_pages, page_size)
    table = None if lengths is None else values_to_check(block_table)
    if table is not None and lengths is not None:
        check_pages(op, cache, table, lengths, page_size, num_pages)
    if cu_seqlens_q is not None:
        cu_seqlens_q = adjacent(op, "cu_seqlens_q", cu_seqlens_q, keep)
        q_offsets = known_values(op, "cu_seqlens_q", cu_seqlens_q, q_offsets)
    if q_offsets is not None:
        check_offsets(op, "cu_seqlens_q", q_offsets, num_seqs, num_tokens, max_seqlen_q)
    return PagedStep(
        block_table,
        seq_lens,
        cu_seqlens_q,
        max_seqlen_q,
        None if lengths is None else list(lengths),
        None if q_offsets is None else list(q_offsets),
        0 if table is None else num_pages,
        check_of_host_values(op, num_seqs, max_seqlen_q, max_pages, page_size),
    )


def bind(
    adapter: Any,
    problem: PagedAttentionProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a direct call runs: the step's metadata, the destination, the launch."""
    launch = adapter.launch
    ragged = problem.ragged
    head_dim_vo = problem.head_dim_vo
    same_width = head_dim_vo == problem.head_dim_qk
    plain = Values(problem.head_dim_qk**-0.5)
    returns_lse = problem.lse
    extras_at, empty = extras_of(problem), empties_of(problem)
    # The layers of a step share its tensors, so they are checked once. In CPU memory the values behind the
    # same tensors may have changed, and are read anew.
    reusable = problem.device.type != "cpu" and not adapter.plans_steps and not checks_devices()
    steps: LastSteps[PagedStep] = LastSteps()
    learn = adapter.again if reusable and adapter.repeats else None
    bare = not (ragged or returns_lse or extras_at)  # a call that has no tensors but those of each
    more_at = (*[at for at, kept in enumerate(_MORE) if kept in extras_at], *([len(_MORE)] if ragged else []))
    before: _Before | None = None
    known, known_out, known_extras = KnownForm(), KnownForm(), KnownForm()

    def repeat(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        scale: float | None,
        out: Tensor | None,
        values: Values | None = None,
    ) -> Tensor | None:
        """The result of a call like the last one, which `again` compares with it; None, with nothing done, for others.

        Of what `again` does not compare, the caller has made sure: no bound, no offsets, features that `values` has.
        """
        if (
            before is None
            or type(scale) is not before.kind
            or scale != before.scale
            or values != before.values
            or forward_ad._current_level >= 0
            or (out is None and q.layout is not strided)
        ):
            return None
        made = empty(q) if out is None else out
        try:
            if not before.again(q, k_cache, v_cache, made, block_table, seq_lens):
                return None
        except Exception as error:
            failed(launch, error)
            raise
        tick()
        return made

    def found(scale: float | None) -> Repeats | None:
        if before is None or type(scale) is not before.kind or scale != before.scale or before.values is not None:
            return None
        return Repeats(launch, before.again, tick)

    repeat.found = found  # type: ignore[attr-defined]

    def repeats(again: Callable[..., bool]) -> Callable[..., Any]:
        """What makes a call like that of an `again`, or gives None; the caller has compared values and bounds."""

        def repeat(
            q: Tensor,
            k_cache: Tensor,
            v_cache: Tensor,
            block_table: Tensor,
            seq_lens: Tensor,
            out: Tensor | None,
            *more: Any,
        ) -> Any:
            if forward_ad._current_level >= 0 or q.layout is not strided or q.ndim not in (3, 4):
                return None
            made = empty(q) if out is None else out
            given = [more[at] for at in more_at]
            lse = None
            if returns_lse:
                if q.is_nested:
                    return None
                lse = q.new_empty(*lse_shape(q.shape), dtype=torch.float32)
                given.append(lse)
            try:
                if not again(*given, q, k_cache, v_cache, made, block_table, seq_lens):
                    return None
            except Exception as error:
                failed(launch, error)
                raise
            tick()
            return made if lse is None else (made, lse)

        if not returns_lse:
            repeat.found = lambda scale: Repeats(launch, again, tick)  # type: ignore[attr-defined]
        return repeat

    def run(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        shape: Sequence[int],
        scale: float | None,
        out: Tensor | None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        values: Values | None = None,
        checked: bool = False,
        learned: list[Callable[..., Any]] | None = None,
    ) -> Any:
        """Make a call.

        Args:
            checked: the call was checked and this function was built for it; its form is remembered.
            learned: gets what repeats the call, if anything does.
        """
        nonlocal before
        if before is not None and cu_seqlens_q is None and max_seqlen_q is None:
            made = repeat(q, k_cache, v_cache, block_table, seq_lens, scale, out, values)
            if made is not None:
                return made
        given = scale, values
        if q.get_device() != device:
            run_there = elsewhere(q.get_device())
            return run_there(
                q, k_cache, v_cache, block_table, seq_lens, shape, scale, out, cu_seqlens_q, max_seqlen_q, values
            )
        if not checked and (
            forward_ad._current_level >= 0
            or (out is not None and getattr(out, "is_nested", True))
            or not (known.holds(q, k_cache, v_cache) if out is None else known_out.holds(q, k_cache, v_cache, out))
        ):
            accept_call(NAME, problem, known, known_out, q, k_cache, v_cache, out)
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
                pages, rows = k_cache.shape[0], shape[0]
                step = checked_step(problem.page_size, ragged, q.device, pages, rows, *metadata)
                plan_step(adapter, step)
                if reusable and not LENT.now:
                    steps.keep(step)
        if not ragged and shape[0] != step.num_seqs:
            refuse_batch(shape, step.num_seqs, NAME)
        if values is None:
            values = plain if scale is None else Values(finite_scale(NAME, scale))
        elif extras_at:
            extras: list[Any] = [values[at] for at in extras_at]
            if not checked and not known_extras.holds(*extras):
                check_extras(NAME, q, values)
                known_extras.learn(extras, [extra.shape for extra in extras])
        out_shape = shape if same_width else (*shape[:-1], head_dim_vo)
        if out is None:
            out = empty(q)
        else:
            read: list[Any] = [q, k_cache, v_cache, block_table, seq_lens]
            if cu_seqlens_q is not None:
                read.append(cu_seqlens_q)
            if extras_at:
                read += [values[at] for at in extras_at]
            if out.shape != out_shape or may_overlap_itself_or(out, read):
                indices = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
                caches = {"k_cache": k_cache, "v_cache": v_cache}
                check_out(NAME, out, out_shape, q, {**caches, **indices, **values._asdict()})
        lse = q.new_empty(*lse_shape(shape), dtype=torch.float32) if returns_lse else None
        if 0 not in shape and step.num_seqs:
            tick()
            try:
                launch(q, k_cache, v_cache, step, values, out, lse)
            except Exception as error:
                failed(launch, error)
                raise
            if learn is not None and bare and max_seqlen_q is None and learned is None:
                again = learn(step, values)
                before = None if again is None else _Before(type(given[0]), *given, again)
            elif learn is not None and learned is not None and (again := learn(step, values)) is not None:
                learned.append(repeats(again))
        return out if lse is None else (out, lse)

    run.repeat = None if learn is None or not bare else repeat  # type: ignore[attr-defined]
    return run


class _Before(NamedTuple):
    """The last call of a kernel that is repeated.

    Attributes:
        kind: type of the scale.
        scale, values: as they were given, without tensors.
        again: see `AttentionAdapter.again`.
    """

    kind: type
    scale: float | None
    values: Values | None
    again: Callable[..., bool]
