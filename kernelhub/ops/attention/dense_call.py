"""How a call of `attention` becomes a launch: its problem, its checks, its step, its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, contiguous_format, empty_like, strided
from torch.autograd import forward_ad

from kernelhub.dispatch.lost import failed
from kernelhub.ops.arguments import dtype_name, lse_shape, refuse
from kernelhub.ops.attention.adapter import LENT, Check, DenseStep, plan_step
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
from kernelhub.ops.attention.operands import accept_call, check_out
from kernelhub.ops.attention.problem import LONG, MANY, SHORT, AttentionProblem, DenseAttentionProblem
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.known_form import KnownForm
from kernelhub.ops.operands import check_operand, may_overlap_itself_or
from kernelhub.ops.values import checks_devices
from kernelhub.probes.device import facts_of

NAME = "attention"


def problem_of(key: Any, device: int) -> DenseAttentionProblem:
    """The problem that a key means on a device; the key is built in `attention`. A long sequence's queries are many."""
    q_dtype, kv_dtype, num_q_heads, head_dim_qk, num_kv_heads, _, head_dim_vo, q_len, rest = key
    ragged, features = rest or (False, PLAIN)
    return DenseAttentionProblem(
        device=facts_of(device),
        q_dtype=dtype_name(q_dtype),
        kv_dtype=dtype_name(kv_dtype),
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        q_len=MANY if q_len == LONG else q_len,
        length=LONG if q_len == LONG else SHORT,
        ragged=ragged,
        **dict(zip(FEATURES, features, strict=True)),
    )


def check(given: Mapping[str, Any], plain: bool) -> None:
    """All that a key holds, checked when the key is new.

    Args:
        given: the call's arguments by parameter.
        plain: whether it has no feature.
    """
    q, k, v, cu_seqlens_q, cu_seqlens_k = (
        given["q"],
        given["k"],
        given["v"],
        given["cu_seqlens_q"],
        given["cu_seqlens_k"],
    )
    for parameter, tensor in (("q", q), ("k", k), ("v", v)):
        check_operand(NAME, parameter, tensor)
    ragged = cu_seqlens_q is not None
    if ragged != (cu_seqlens_k is not None):
        refuse_half(cu_seqlens_q)
    for parameter, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != (3 if ragged else 4):
            wanted = "[T, H, D] with cu_seqlens" if ragged else "[B, S, H, D], or [T, H, D] with cu_seqlens"
            refuse(NAME, parameter, f"has shape {list(tensor.shape)}", f"give {wanted}")
    check_bound(NAME, "max_seqlen_q", given["max_seqlen_q"])
    check_bound(NAME, "max_seqlen_k", given["max_seqlen_k"])
    check_shapes(q.shape, k.shape, v.shape)
    check_operands(NAME, ("q", "k", "v"), q, k, v, k.shape[-2], None if plain else Given.of(given), given["out"])


def refuse_half(cu_seqlens_q: Tensor | None) -> None:
    """Raise the error for a call with only one of the two offsets."""
    missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
    refuse(NAME, missing, "is missing", "give both cu_seqlens_q and cu_seqlens_k, or neither")


def check_shapes(q_shape: Sequence[int], k_shape: Sequence[int], v_shape: Sequence[int]) -> None:
    """k and v agree in all but width, and with q in the batch."""
    if k_shape != v_shape and k_shape[:-1] != v_shape[:-1]:
        refuse(NAME, "v", f"has shape {list(v_shape)}", f"k has {list(k_shape)}; all but D agree")
    if len(q_shape) == 4 and q_shape[0] != k_shape[0]:
        refuse(NAME, "k", f"has a batch of {k_shape[0]}", f"q has {q_shape[0]}")


def checked_step(
    ragged: bool,
    device: torch.device,
    num_tokens: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    q_offsets: Sequence[int] | None = None,
    k_offsets: Sequence[int] | None = None,
    keep: bool = False,
) -> DenseStep:
    """Check where sequences begin.

    Args:
        ragged: of the problem.
        device: of q.
        num_tokens: rows of q and of k, where they are known.
        q_offsets: the values of cu_seqlens_q that the caller has on the host.
        k_offsets: the values of cu_seqlens_k that the caller has on the host.
        keep: the offsets are read at later launches, too, with what the caller has written to them by then.
    """
    max_seqlen_q = check_bound(NAME, "max_seqlen_q", max_seqlen_q)
    max_seqlen_k = check_bound(NAME, "max_seqlen_k", max_seqlen_k)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        refuse_half(cu_seqlens_q)
    if (cu_seqlens_q is not None) != ragged:
        form = "is missing" if ragged else "is given"
        refuse(NAME, "cu_seqlens_q", f"{form}, unlike when the plan was prepared", "prepare a plan for this form")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        for parameter, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check_index(NAME, parameter, offsets, 1, "[num_seqs + 1]")
            if offsets.device != device:
                refuse(NAME, parameter, f"is on {offsets.device}", f"move it to {device}, where q is")
        num_seqs = cu_seqlens_q.shape[0] - 1
        if cu_seqlens_k.shape[0] != num_seqs + 1:
            refuse(
                NAME,
                "cu_seqlens_k",
                f"has {cu_seqlens_k.shape[0]} offsets",
                f"cu_seqlens_q has {num_seqs + 1}",
            )
        if num_seqs < 0:
            refuse(NAME, "cu_seqlens_q", "is empty", "the first offset is 0")
        cu_seqlens_q = adjacent(NAME, "cu_seqlens_q", cu_seqlens_q, keep)
        cu_seqlens_k = adjacent(NAME, "cu_seqlens_k", cu_seqlens_k, keep)
        q_tokens, k_tokens = num_tokens or (None, None)
        q_offsets = known_values(NAME, "cu_seqlens_q", cu_seqlens_q, q_offsets)
        k_offsets = known_values(NAME, "cu_seqlens_k", cu_seqlens_k, k_offsets)
        if q_offsets is not None:
            check_offsets(NAME, "cu_seqlens_q", q_offsets, num_seqs, q_tokens, max_seqlen_q)
        if k_offsets is not None:
            check_offsets(NAME, "cu_seqlens_k", k_offsets, num_seqs, k_tokens, max_seqlen_k)
    return DenseStep(
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        None if q_offsets is None else list(q_offsets),
        None if k_offsets is None else list(k_offsets),
        None if cu_seqlens_q is None else _check_of_host_values(cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k),
    )


def _check_of_host_values(num_seqs: int, max_seqlen_q: int | None, max_seqlen_k: int | None) -> Check:
    """Check offsets that a kernel reads on the host, for every value of KERNELHUB_CHECK."""

    def check(parameter: str, values: list[int]) -> None:
        longest = max_seqlen_q if parameter == "cu_seqlens_q" else max_seqlen_k
        check_offsets(NAME, parameter, values, num_seqs, None, longest)

    return check


def bind(
    adapter: Any,
    problem: AttentionProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a direct call runs: where sequences begin, the destination, the launch."""
    launch = adapter.launch
    compute = adapter.compute if adapter.allocates and not problem.lse else None
    ragged = problem.ragged
    head_dim_vo = problem.head_dim_vo
    same_width = head_dim_vo == problem.head_dim_qk
    plain = Values(problem.head_dim_qk**-0.5)
    returns_lse = problem.lse
    extras_at = extras_of(problem)
    # Batched calls have no metadata. Ragged layers share theirs, so it is checked once; in CPU memory the
    # values behind the same tensors may have changed, and are read anew.
    reusable = not ragged or (problem.device.type != "cpu" and not adapter.plans_steps and not checks_devices())
    steps: LastSteps[DenseStep] = LastSteps()
    known, known_out, known_extras = KnownForm(), KnownForm(), KnownForm()
    # A batched call without sinks and scales on the device has no tensors but q, k, v and `out`.
    calls, repeats = KnownCalls(launch), is_repeated(adapter) and not (ragged or returns_lse or extras_at)

    def destination(q: Tensor, shape: Sequence[int]) -> Tensor:
        return empty_like(q, memory_format=contiguous_format) if same_width else q.new_empty(*shape[:-1], head_dim_vo)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shape: Sequence[int],
        k_shape: Sequence[int],
        v_shape: Sequence[int],
        scale: float | None,
        out: Tensor | None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        values: Values | None = None,
        checked: bool = False,
    ) -> Any:
        """`checked`: the call was checked and this function was built for it; its form is remembered."""
        if q.get_device() != device:
            run_there = elsewhere(q.get_device())
            sizes = (max_seqlen_q, max_seqlen_k)
            return run_there(q, k, v, shape, k_shape, v_shape, scale, out, cu_seqlens_q, cu_seqlens_k, *sizes, values)
        key: Any = None
        again, made = 0, out
        if (
            repeats
            # 0.0 and -0.0 would be one key
            and (values.scale if values is not None else scale is None or (type(scale) is float and scale))
            and cu_seqlens_q is None
            and cu_seqlens_k is None
            and max_seqlen_q is None
            and max_seqlen_k is None
            and (out is not None or compute is None)
        ):
            key = shape, k_shape, scale if values is None else values, out is None
            if key in calls and q.layout is strided and not q.is_nested:
                if out is None:
                    made = destination(q, shape)
                again = calls.launches(key, (q, k, v, made))
                if again == 2:
                    tick()
                    return made
        if not (checked or again) and (
            forward_ad._current_level >= 0
            or (out is not None and getattr(out, "is_nested", True))
            or not (known.holds(q, k, v) if out is None else known_out.holds(q, k, v, out))
        ):
            accept_call(NAME, problem, known, known_out, q, k, v, out)
        step = steps.last
        if (
            step is None
            or step.cu_seqlens_q is not cu_seqlens_q
            or step.cu_seqlens_k is not cu_seqlens_k
            or step.max_seqlen_q != max_seqlen_q
            or step.max_seqlen_k != max_seqlen_k
        ):
            step = steps.find(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            if step is None:
                offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
                rows = (shape[0], k_shape[0]) if ragged else None
                step = plan_step(adapter, checked_step(ragged, q.device, rows, *offsets))
                if reusable and not LENT.now:
                    steps.keep(step)
        if (k_shape != v_shape and k_shape[:-1] != v_shape[:-1]) or (not ragged and shape[0] != k_shape[0]):
            check_shapes(shape, k_shape, v_shape)
        if values is None:
            values = plain if scale is None else Values(finite_scale(NAME, scale))
        elif extras_at:
            extras: list[Any] = [values[at] for at in extras_at]
            if not checked and not known_extras.holds(*extras):
                check_extras(NAME, q, values)
                known_extras.learn(extras, [extra.shape for extra in extras])
        nothing = 0 in shape or (ragged and not step.num_seqs)
        if out is None:
            if compute is not None and not nothing:
                tick()
                try:
                    return compute(q, k, v, step, values)
                except Exception as error:
                    failed(compute, error)
                    raise
            if made is None:
                made = destination(q, shape)
        elif not again and (ragged or not checked):  # a batched call's check looked at all of this
            read: list[Any] = [q, k, v]
            if cu_seqlens_q is not None and cu_seqlens_k is not None:
                read += [cu_seqlens_q, cu_seqlens_k]
            if extras_at:
                read += [values[at] for at in extras_at]
            out_shape = shape if same_width else (*shape[:-1], head_dim_vo)
            if out.shape != out_shape or may_overlap_itself_or(out, read):
                metadata = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
                check_out(NAME, out, out_shape, q, {"k": k, "v": v, **metadata, **values._asdict()})
        if not again:
            calls.learn(key, (q, k, v, made), 1)
        lse = q.new_empty(*lse_shape(shape), dtype=torch.float32) if returns_lse else None
        if not nothing:
            tick()
            try:
                launch(q, k, v, step, values, made, lse)
            except Exception as error:
                failed(launch, error)
                raise
            if again:
                calls.attach(key, (q, k, v, made), adapter.repeated, q, k, v, step, values, made, lse)
        return made if lse is None else (made, lse)

    return run
