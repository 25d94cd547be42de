"""`write_mla_cache`: latents and rotary parts of new tokens into a paged cache."""

from __future__ import annotations

import math
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
from kernelhub.ops.arguments import alike, check_wants_no_gradient, describe, dtype_name, usable
from kernelhub.ops.attention.problem import FLOATS, FP8
from kernelhub.ops.call_plan import CallPlan, prepares
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.mla.cache.adapter import MlaCacheAdapter
from kernelhub.ops.mla.cache.problem import WRITE_MLA_CACHE, MlaCacheProblem
from kernelhub.ops.mla.cache.reference import write_mla_cache_reference
from kernelhub.ops.operands import (
    check_apart,
    check_number,
    check_operand,
    finite_and_not_zero,
    is_plain_view,
    may_overlap,
    overlaps_itself,
)
from kernelhub.ops.operators import Traced
from kernelhub.ops.slots import check_slot_form, check_slots
from kernelhub.ops.values import checks_devices
from kernelhub.probes.device import facts_of

NAME = "write_mla_cache"
_FLOATS = tuple(getattr(torch, name) for name in FLOATS)
_FP8 = getattr(torch, FP8)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> MlaCacheProblem:
    """The problem that a key means on a device; the key is built in `write_mla_cache`."""
    dtype, kv_dtype, latent_dim, rope_dim, page_size, kv_scale = key
    return MlaCacheProblem(
        device=facts_of(device),
        dtype=dtype_name(dtype),
        kv_dtype=dtype_name(kv_dtype),
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        page_size=page_size,
        kv_scale=kv_scale,
    )


def scale_kind(kv_scale: Any) -> str | None:
    """The form of the scale: ``"value"``, ``"tensor"``, or None."""
    return None if kv_scale is None else "tensor" if isinstance(kv_scale, Tensor) else "value"


def check(kv_c: Any, k_rope: Any, kv_cache: Any, slot_mapping: Any, kv_scale: Any) -> None:
    """Everything that the contract says of a call."""
    given = [("kv_c", kv_c), ("k_rope", k_rope), ("kv_cache", kv_cache), ("slot_mapping", slot_mapping)]
    for parameter, tensor in given:
        check_operand(NAME, parameter, tensor)
    if kv_c.ndim != 2:
        refuse("kv_c", f"has shape {list(kv_c.shape)}", "give [T, V], the latents")
    tokens, latent_dim = kv_c.shape
    if kv_c.dtype not in _FLOATS:
        refuse("kv_c", f"has dtype {dtype_name(kv_c.dtype)}", f"give {', '.join(FLOATS)}")
    if latent_dim == 0:
        refuse("kv_c", f"has shape {list(kv_c.shape)}", "give at least one element of each token")
    if k_rope.ndim not in (2, 3) or k_rope.shape[0] != tokens or (k_rope.ndim == 3 and k_rope.shape[1] != 1):
        refuse("k_rope", f"has shape {list(k_rope.shape)}", f"give [{tokens}, R] or [{tokens}, 1, R]")
    if k_rope.dtype is not kv_c.dtype:
        refuse("k_rope", f"has dtype {dtype_name(k_rope.dtype)}", f"kv_c has {dtype_name(kv_c.dtype)}")
    width = latent_dim + k_rope.shape[-1]
    if kv_cache.ndim not in (3, 4) or (kv_cache.ndim == 4 and kv_cache.shape[2] != 1) or kv_cache.shape[-1] != width:
        wanted = f"give [num_pages, page_size, {width}] or [num_pages, page_size, 1, {width}]"
        refuse("kv_cache", f"has shape {list(kv_cache.shape)}", wanted)
    if kv_cache.shape[1] == 0:
        refuse("kv_cache", f"has shape {list(kv_cache.shape)}", "a page holds at least one token")
    if kv_cache.dtype not in (kv_c.dtype, _FP8):
        refuse(
            "kv_cache", f"has dtype {dtype_name(kv_cache.dtype)}", f"give {dtype_name(kv_c.dtype)} as kv_c, or {FP8}"
        )
    check_slot_form(NAME, slot_mapping, tokens)
    _check_scale(kv_cache, kv_scale)
    if isinstance(kv_scale, Tensor):
        given.append(("kv_scale", kv_scale))
    for parameter, tensor in given:
        if tensor.device != kv_c.device:
            refuse(parameter, f"is on {tensor.device}", f"move it to {kv_c.device}, where kv_c is")
        check_wants_no_gradient(NAME, parameter, tensor)
    slots = kv_cache.shape[0] * kv_cache.shape[1]
    if slots == 0 and tokens:
        refuse("kv_cache", f"has shape {list(kv_cache.shape)}", "give at least one page")
    if overlaps_itself(kv_cache):
        refuse("kv_cache", f"overlaps itself (strides {list(kv_cache.stride())})", "give rows that do not overlap")
    check_apart(NAME, "kv_cache", kv_cache, {name: tensor for name, tensor in given if name != "kv_cache"})
    check_slots(NAME, "kv_cache", slot_mapping, slots)


def _check_scale(kv_cache: Tensor, kv_scale: Any) -> None:
    if kv_cache.dtype is not _FP8:
        if kv_scale is not None:
            refuse(
                "kv_scale", f"is given with a {dtype_name(kv_cache.dtype)} kv_cache", "scales belong to an fp8 cache"
            )
    elif kv_scale is None:
        refuse("kv_scale", "is None with an fp8 kv_cache", "give 1.0 to store values as they are")
    elif isinstance(kv_scale, Tensor):
        check_operand(NAME, "kv_scale", kv_scale)
        if kv_scale.dtype is not torch.float32 or kv_scale.numel() != 1:
            refuse("kv_scale", f"is {describe(kv_scale)}", "give a float, or float32 of one element")
    else:
        fix = "give a finite float other than 0, or float32 of one element"
        check_number(NAME, "kv_scale", kv_scale, fix, finite_and_not_zero)


def bind(
    adapter: Any,
    problem: MlaCacheProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the launch."""
    launch = adapter.launch
    form = (problem.dtype, problem.kv_dtype, problem.latent_dim, problem.rope_dim, problem.page_size, problem.kv_scale)
    dtype, kv_dtype = getattr(torch, problem.dtype), getattr(torch, problem.kv_dtype)
    latent_dim, rope_dim, page_size, kind = form[2:]
    width, looks = latent_dim + rope_dim, problem.device.type == "cpu" or checks_devices()
    calls, repeats = KnownCalls(adapter.launch), is_repeated(adapter) and not looks
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds

    def known(kv_c: Tensor, k_rope: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Any) -> bool:
        """Whether `check` would accept the operands, slots aside, and they fit the kernel."""
        if not usable(kv_c, dtype, device) or not usable(kv_cache, kv_dtype, device) or kv_c.ndim != 2:
            return False
        if not isinstance(k_rope, Tensor):
            return False
        tokens, columns = kv_c.shape
        pages = kv_cache.shape
        if columns != latent_dim or not (len(pages) == 3 or (len(pages) == 4 and pages[2] == 1)):
            return False
        if pages[1] != page_size or pages[-1] != width or not pages[0]:
            return False
        if not alike(k_rope, (tokens, rope_dim) if k_rope.ndim == 2 else (tokens, 1, rope_dim), dtype, device):
            return False
        if not alike(slot_mapping, (tokens,), torch.int64, device):
            return False
        if not (kv_cache.is_contiguous() and slot_mapping.is_contiguous()):  # its own overlaps take a longer look
            return False
        if not (is_plain_view(kv_c) and is_plain_view(k_rope)):  # both are views, as a rule
            return False
        if may_overlap(kv_cache, (kv_c, k_rope, slot_mapping, kv_scale if kind == "tensor" else None)):
            return False
        if kind is None:
            return kv_scale is None
        if kind == "tensor":
            return usable(kv_scale, torch.float32, device) and kv_scale.numel() == 1 and is_plain_view(kv_scale)
        return type(kv_scale) is float and math.isfinite(kv_scale) and kv_scale != 0

    def run(
        kv_c: Tensor, k_rope: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float | Tensor | None
    ) -> Tensor:
        if kv_c.get_device() != device:
            result: Tensor = elsewhere(kv_c.get_device())(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)
            return result
        on_device = kind == "tensor"
        given = (kv_c, k_rope, slot_mapping, kv_scale if on_device else None, kv_cache)
        key: Any = None
        state: int = 0
        if not kv_c.is_nested and (on_device or kv_scale is None or type(kv_scale) is float):
            key = kv_c.shape, None if on_device else kv_scale
            state = recognise(key, given)
            if state == 2:
                tick()
                return kv_cache
        try:
            right = state == 1 or known(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)
        except (AttributeError, RuntimeError):  # what has no shape or no memory; `check` names it
            right = False
        if right:
            if looks:
                check_slots(NAME, "kv_cache", slot_mapping, kv_cache.shape[0] * page_size)
        else:
            check(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)
            check_form(kv_c, k_rope, kv_cache, kv_scale)
            kv_scale = python_value(kv_scale)
        if not state:
            calls.learn(key, given, 1)
        if kv_c.shape[0]:
            tick()
            rows = kv_cache.squeeze(2) if kv_cache.ndim == 4 else kv_cache
            rope = k_rope.squeeze(1) if k_rope.ndim == 3 else k_rope
            try:
                launch(kv_c, rope, rows, slot_mapping, kv_scale)
            except Exception as error:
                failed(launch, error)
                check(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)
                raise
            if state and repeats:
                calls.attach(key, given, adapter.repeated, kv_c, rope, rows, slot_mapping, kv_scale)
        return kv_cache

    def check_form(kv_c: Tensor, k_rope: Tensor, kv_cache: Tensor, kv_scale: float | Tensor | None) -> None:
        """The call is what the kernel was made for: a plan may be run with another than it was prepared for."""
        got = (
            dtype_name(kv_c.dtype),
            dtype_name(kv_cache.dtype),
            kv_c.shape[1],
            k_rope.shape[-1],
            kv_cache.shape[1],
            scale_kind(kv_scale),
        )
        if got != form:
            wanted = f"{form[0]} of {form[2]} + {form[3]} to {form[1]} pages of {form[4]}, kv_scale {form[5]}"
            form_got = f"{describe(kv_c)} and {describe(k_rope)} to {describe(kv_cache)}, kv_scale {got[5]}"
            refuse("kv_c", f"is of a call of {form_got}", f"the plan is for {wanted}")

    return run


_op: Op[MlaCacheProblem] = Op(
    Contract.of(
        WRITE_MLA_CACHE,
        problem_of=problem_of,
        adapter=MlaCacheAdapter,
        bind=bind,
        reference=write_mla_cache_reference,
        example="kernelhub.ops.mla.cache.inputs:write_mla_cache_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class MlaCachePlan(CallPlan):
    """A kernel selected for tokens and a cache like these.

    ``run(kv_c, k_rope, kv_cache, slot_mapping, kv_scale=None)`` is a whole call.
    """

    __slots__ = ()
    call = "kv_c, k_rope, kv_cache, slot_mapping, kv_scale"


@publish(_op, prepares(_op, MlaCachePlan), traced=Traced(dict, ("kv_cache",)))
def write_mla_cache(
    kv_c: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: float | Tensor | None = None,
    backend: Backend = None,
) -> Tensor:
    """Write the latents and rotary parts of new tokens into the pages of a latent cache.

    Args:
        kv_c: ``[T, V]``, float32, float16 or bfloat16: the normalised latents.
        k_rope: ``[T, R]`` or ``[T, 1, R]`` in the same dtype: the rotary part of the keys, which all heads share.
        kv_cache: ``[num_pages, page_size, V + R]`` or ``[num_pages, page_size, 1, V + R]`` in the same dtype, or
            float8_e4m3fn with `kv_scale`. The op writes to it: the latent, followed by the rotary part.
        slot_mapping: int64 ``[T]``, the slot of each token: ``page * page_size + offset in the page``. A token with a
            negative slot is not written. Slots must be distinct; on a GPU only ``KERNELHUB_CHECK=1`` checks that.
        kv_scale: factor of an fp8 cache, a float or float32 of one element. The cache stores ``value / kv_scale``,
            rounded to nearest even and saturated at 448.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        `kv_cache` itself.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        vLLM's ``concat_and_cache_mla``; FlashInfer's ``append_paged_mla_kv_cache``.

    Example:
        >>> import torch, kernelhub
        >>> kv_cache = torch.zeros(4, 64, 576)
        >>> slots = torch.tensor([0, 130, -1])
        >>> _ = kernelhub.write_mla_cache(torch.ones(3, 512), torch.ones(3, 64), kv_cache, slots)
        >>> kv_cache.sum(2).nonzero().tolist()
        [[0, 0], [2, 2]]
    """
    if type(kv_c) is not Tensor and isinstance(kv_c, Tensor) and not isinstance(backend, DryRun):
        traced: Tensor = _op.traced(**locals())
        return traced
    if _op.again is not None:
        again: Tensor | None = _op.again(kv_c, k_rope, kv_cache, slot_mapping, kv_scale, backend)
        if again is not None:
            return again
    try:
        key = (
            kv_c.dtype,
            kv_cache.dtype,
            kv_c.shape[1],
            k_rope.shape[-1],
            kv_cache.shape[1],
            scale_kind(kv_scale),
        )
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None:
        check(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)
        run = _op.decide(key, kv_c.get_device(), backend)
    result: Tensor = run(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)
    return result
