"""`write_kv_cache`: keys and values of new tokens into a paged cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any, ClassVar, NoReturn

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
from kernelhub.ops.attention.problem import FLOATS, QUANTISED
from kernelhub.ops.call_plan import CallPlan, Fixed, prepares
from kernelhub.ops.checked import Checked
from kernelhub.ops.known_calls import KnownCalls, is_repeated
from kernelhub.ops.kv_cache.adapter import KvCacheAdapter
from kernelhub.ops.kv_cache.problem import HND, NEOX, NHD, WRITE_KV_CACHE, KvCacheProblem
from kernelhub.ops.kv_cache.reference import write_kv_cache_reference
from kernelhub.ops.kv_cache.rope import Rope, check_positions, check_rope, style_of
from kernelhub.ops.layer_calls import Repeats
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

NAME = "write_kv_cache"
_FLOATS = tuple(getattr(torch, name) for name in FLOATS)
_QUANTISED = tuple(getattr(torch, name) for name in QUANTISED)
_checked = Checked()
_MOST_PAIRS = 1024  # pairs of caches that are kept as checked: a model has one for each layer


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> KvCacheProblem:
    """The problem that a key means on a device; the key is built in `write_kv_cache`."""
    dtype, kv_dtype, *rest = key
    return KvCacheProblem(facts_of(device), dtype_name(dtype), dtype_name(kv_dtype), *rest)


def scale_kind(k_scale: Any, v_scale: Any, num_kv_heads: int) -> str | None:
    """The form of the scales: ``"value"``, ``"tensor"``, ``"head"``, or None."""
    kind = _kind("k_scale", k_scale, num_kv_heads)
    if kind != _kind("v_scale", v_scale, num_kv_heads):
        refuse("v_scale", "has another form than k_scale", "give both as floats, or both as tensors of one shape")
    return kind


def _kind(parameter: str, scale: Any, num_kv_heads: int) -> str | None:
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        return "value"
    check_operand(NAME, parameter, scale)
    if scale.dtype is not torch.float32:
        refuse(parameter, f"has dtype {dtype_name(scale.dtype)}", "scales are float32")
    if scale.numel() == 1:
        return "tensor"
    if scale.shape == (num_kv_heads,):
        return "head"
    refuse(parameter, f"has shape {list(scale.shape)}", f"give one element, or [{num_kv_heads}], one per KV head")


def check(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    k_scale: Any,
    v_scale: Any,
    kv_layout: Any,
    q: Any = None,
    positions: Any = None,
    cos_sin_cache: Any = None,
    is_neox: Any = True,
) -> None:
    """Everything that the contract says of a call."""
    given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
    for parameter, tensor in given.items():
        check_operand(NAME, parameter, tensor)
    if kv_layout not in (NHD, HND):
        refuse("kv_layout", f"is {kv_layout!r}", "give 'NHD' or 'HND'")
    if k.ndim != 3 or not k.shape[1] or not k.shape[2]:
        refuse("k", f"has shape {list(k.shape)}", "give [T, KH, D] with at least one head and one column")
    tokens, heads, _ = k.shape
    if k.dtype not in _FLOATS:
        refuse("k", f"has dtype {dtype_name(k.dtype)}", f"give {', '.join(FLOATS)}")
    if v.ndim != 3 or v.shape[:2] != k.shape[:2] or not v.shape[2]:
        refuse("v", f"has shape {list(v.shape)}", f"give [{tokens}, {heads}, DV]")
    if v.dtype is not k.dtype:
        refuse("v", f"has dtype {dtype_name(v.dtype)}", f"k has {dtype_name(k.dtype)}")
    _check_cache("k_cache", k_cache, k, kv_layout)
    _check_cache("v_cache", v_cache, v, kv_layout)
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        refuse("v_cache", f"has shape {list(v_cache.shape)}", f"give {[*k_cache.shape[:-1], v.shape[2]]} as k_cache")
    if v_cache.dtype is not k_cache.dtype:
        refuse("v_cache", f"has dtype {dtype_name(v_cache.dtype)}", f"k_cache has {dtype_name(k_cache.dtype)}")
    check_slot_form(NAME, slot_mapping, tokens)
    _check_scales(k_cache, k_scale, v_scale, heads)
    given |= {name: scale for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)) if isinstance(scale, Tensor)}
    for parameter, tensor in given.items():
        if tensor.device != k.device:
            refuse(parameter, f"is on {tensor.device}", f"move it to {k.device}, where k is")
        check_wants_no_gradient(NAME, parameter, tensor)
    given |= check_rope(k, given, positions, cos_sin_cache, q, is_neox)
    slots = k_cache.numel() // (heads * k_cache.shape[-1])
    if slots == 0 and tokens:
        refuse("k_cache", f"has shape {list(k_cache.shape)}", "give at least one page")
    for name in ("k_cache", "v_cache"):
        cache = given.pop(name)
        if overlaps_itself(cache):
            refuse(name, f"overlaps itself (strides {list(cache.stride())})", "give places that do not overlap")
        check_apart(NAME, name, cache, given)  # k_cache from v_cache too
    check_slots(NAME, "k_cache", slot_mapping, slots)
    if cos_sin_cache is not None:
        check_positions(positions, cos_sin_cache, slot_mapping)


def _check_cache(parameter: str, cache: Tensor, new: Tensor, kv_layout: str) -> None:
    _, heads, width = new.shape
    head_axis = 2 if kv_layout == NHD else 1
    if cache.ndim != 4 or cache.shape[head_axis] != heads or cache.shape[3] != width:
        page = f"page_size, {heads}" if kv_layout == NHD else f"{heads}, page_size"
        refuse(parameter, f"has shape {list(cache.shape)}", f"give [num_pages, {page}, {width}] for {kv_layout}")
    if cache.shape[3 - head_axis] == 0:
        refuse(parameter, f"has shape {list(cache.shape)}", "a page holds at least one token")
    if cache.dtype not in (new.dtype, *_QUANTISED):
        wanted = f"give {dtype_name(new.dtype)} as k, or {' or '.join(QUANTISED)}"
        refuse(parameter, f"has dtype {dtype_name(cache.dtype)}", wanted)


def _check_scales(k_cache: Tensor, k_scale: Any, v_scale: Any, heads: int) -> None:
    kind = scale_kind(k_scale, v_scale, heads)
    if k_cache.dtype not in _QUANTISED:
        if kind is not None:
            refuse("k_scale", f"is given with a {dtype_name(k_cache.dtype)} k_cache", "scales belong to an fp8 cache")
    elif kind is None:
        refuse("k_scale", f"is None with a {dtype_name(k_cache.dtype)} k_cache", "give 1.0 to store values as they are")
    elif kind == "value":
        fix = "give a finite float other than 0, or float32 of one element or of one per KV head"
        for parameter, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            check_number(NAME, parameter, scale, fix, finite_and_not_zero)


def bind(
    adapter: Any,
    problem: KvCacheProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the launch."""
    launch, looks = adapter.launch, problem.device.type == "cpu" or checks_devices()
    dtype, kv_dtype = getattr(torch, problem.dtype), getattr(torch, problem.kv_dtype)
    heads, kind, layout = problem.num_kv_heads, problem.kv_scale, problem.kv_layout
    k_tail, v_tail = (heads, problem.head_dim_qk), (heads, problem.head_dim_vo)
    page = (problem.page_size, heads) if layout == NHD else (heads, problem.page_size)
    k_page, v_page = (*page, problem.head_dim_qk), (*page, problem.head_dim_vo)
    form = (dtype, kv_dtype, heads, k_tail[1], v_tail[1], problem.page_size, kind)
    rope_form, is_neox = (problem.rope is not None, problem.rotary_dim, problem.q), problem.rope in (None, NEOX)
    scale_shape = (heads,) if kind == "head" else (1,)
    calls, repeats = KnownCalls(adapter.launch), is_repeated(adapter) and not looks
    recognise: Callable[[Any, Any], int] = calls.launches if repeats else calls.holds
    apart: set[Any] = set()  # pairs of caches, by their memory, that overlap neither themselves nor each other

    def memory_of(k_cache: Tensor, v_cache: Tensor) -> Any:
        return (
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.shape[0],
            k_cache.stride(),
            v_cache.stride(),
        )

    def known_scale(scale: Any) -> bool:
        if kind is None:
            return scale is None
        if kind == "value":
            return type(scale) is float and math.isfinite(scale) and scale != 0
        return (
            usable(scale, torch.float32, device)
            and (scale.shape == scale_shape or (kind == "tensor" and scale.numel() == 1))
            and is_plain_view(scale)
        )

    def known(
        k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: Any, v_scale: Any
    ) -> bool:
        """Whether `check` would accept the operands, slots aside, and they fit the kernel."""
        if not usable(k, dtype, device) or k.ndim != 3 or k.shape[1:] != k_tail:
            return False
        tokens = k.shape[0]
        if not alike(v, (tokens, *v_tail), dtype, device) or not alike(slot_mapping, (tokens,), torch.int64, device):
            return False
        pages = k_cache.shape[0]
        if not alike(k_cache, (pages, *k_page), kv_dtype, device) or not pages:
            return False
        if not alike(v_cache, (pages, *v_page), kv_dtype, device):
            return False
        if not (is_plain_view(k_cache) and is_plain_view(v_cache) and slot_mapping.is_contiguous()):
            return False
        if not (is_plain_view(k) and is_plain_view(v)):  # both are views of a projection's result, as a rule
            return False
        if memory_of(k_cache, v_cache) not in apart:
            return False
        read = (k, v, slot_mapping, k_scale, v_scale) if kind in ("tensor", "head") else (k, v, slot_mapping)
        if not (known_scale(k_scale) and known_scale(v_scale)) or rope_form[0]:
            return False  # what is rotated is checked in full until `calls` knows it
        return not may_overlap(k_cache, read) and not may_overlap(v_cache, read)

    def run(
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Any,
        v_scale: Any,
        q: Tensor | None = None,
        positions: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        if k.get_device() != device:
            result: tuple[Tensor, ...] = elsewhere(k.get_device())(
                k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, q, positions, cos_sin_cache
            )
            return result
        results = (k_cache, v_cache) if q is None else (k_cache, v_cache, q)
        rotates = not (cos_sin_cache is None and positions is None and q is None)
        values = kind == "value"
        scales = (None, None) if values else (k_scale, v_scale)
        embedding = (positions, cos_sin_cache) if rotates else ()
        given = (k, v, slot_mapping, *scales, *embedding, *results)
        key: Hashable = None
        try:
            if not values:
                key = k.shape
            elif type(k_scale) is float and type(v_scale) is float:
                key = (k.shape, k_scale, v_scale)
            if rotates and key is not None:
                key = (key, q is None)
        except (AttributeError, RuntimeError):  # what has no shape; `check` names it
            pass
        state: int = 0
        if key is not None:
            state = recognise(key, given)
            if state == 2:
                tick()
                return results
        operands = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, layout, q, positions, cos_sin_cache)
        checked = not state and _checked.holds(operands)
        try:
            right = state == 1 or (not checked and known(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale))
        except (AttributeError, RuntimeError):  # what has no shape or no memory
            right = False
        if right:
            if rotates and not rope_form[0]:
                check(*operands, is_neox)
                check_rope_form(cos_sin_cache, q)
            if looks:
                check_slots(NAME, "k_cache", slot_mapping, k_cache.shape[0] * problem.page_size)
                if positions is not None and cos_sin_cache is not None:
                    check_positions(positions, cos_sin_cache, slot_mapping)
        else:
            if not checked:
                check(*operands, is_neox)
            check_form(k, v, k_cache, k_scale, v_scale)
            check_rope_form(cos_sin_cache, q)
            if len(apart) >= _MOST_PAIRS:
                apart.clear()
            apart.add(memory_of(k_cache, v_cache))
            k_scale, v_scale = python_value(k_scale), python_value(v_scale)
        if not state:
            calls.learn(key, given, len(results))
        if k.shape[0]:
            tick()
            if kind == "head" or kind == "tensor":
                k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
            rope: tuple[Rope, ...] = ()
            if positions is not None and cos_sin_cache is not None:
                rope = (Rope(positions, cos_sin_cache, q),)
            pages = (k_cache, v_cache) if layout == NHD else (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
            try:
                launch(k, v, *pages, slot_mapping, k_scale, v_scale, *rope)
            except Exception as error:
                failed(launch, error)
                check(*operands, is_neox)
                raise
            if state and repeats:
                calls.attach(key, given, adapter.repeated, k, v, *pages, slot_mapping, k_scale, v_scale, *rope)
        return results

    def check_form(k: Tensor, v: Tensor, k_cache: Tensor, k_scale: Any, v_scale: Any) -> None:
        """The call is what the kernel was made for: a plan may be run with another than it was prepared for."""
        size = k_cache.shape[1 if layout == NHD else 2]
        found = scale_kind(k_scale, v_scale, k.shape[1])
        if (k.dtype, k_cache.dtype, *k.shape[1:], v.shape[2], size, found) != form:
            wanted = f"{problem.dtype} of {list(k_tail)} and {list(v_tail)} to {problem.kv_dtype} pages of {form[5]}"
            got = f"is of a call of {describe(k)} and {describe(v)} to {describe(k_cache)}, scales {found}"
            refuse("k", got, f"the plan is for {wanted}, scales {kind}")

    def check_rope_form(cos_sin_cache: Tensor | None, q: Tensor | None) -> None:
        """The same of the rotary embedding."""
        if (cos_sin_cache is not None, 1 if cos_sin_cache is None else cos_sin_cache.shape[1]) != rope_form[:2]:
            got = "is missing" if cos_sin_cache is None else f"is {describe(cos_sin_cache)}"
            wanted = f"rotates {problem.rotary_dim} columns" if problem.rope else "rotates nothing"
            refuse("cos_sin_cache", got, f"the plan {wanted}")
        if (q is not None) is not problem.q:
            refuse(
                "q",
                "is missing" if q is None else "is given",
                f"the plan is for a call with{'' if problem.q else 'out'} q",
            )

    def like(k: Tensor) -> Repeats | None:
        """What repeats writes of rows with pages, without a rotary embedding, on k's device."""
        plain = repeats and layout == NHD and not rope_form[0] and kind in (None, "tensor")
        return Repeats(launch, Launched(adapter).again, tick) if plain and k.get_device() == device else None

    run.like = like  # type: ignore[attr-defined]
    return run


class Launched:
    """The launches that an adapter made, for calls of layers."""

    __slots__ = ("_adapter",)

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def again(self, *operands: Tensor) -> bool:
        """Makes no call: the extension does, by the sequence."""
        return False

    def sequence_of(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *scales: Tensor
    ) -> Any:
        """The `Sequence` of a call like one that was made; None if it is not repeated, or takes other tensors."""
        operands = (k, v, k_cache, v_cache, slot_mapping, *scales)
        found = self._adapter.repeated(*operands[:5], *(scales or (None, None)))
        if found is None:
            return None
        sequence, tensors = found
        same = len(tensors) == len(operands) and all(a is b for a, b in zip(tensors, operands, strict=True))
        return sequence if same else None


_op: Op[KvCacheProblem] = Op(
    Contract.of(
        WRITE_KV_CACHE,
        problem_of=problem_of,
        adapter=KvCacheAdapter,
        bind=bind,
        reference=write_kv_cache_reference,
        example="kernelhub.ops.kv_cache.inputs:write_kv_cache_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class KvCachePlan(CallPlan):
    """A kernel selected for tokens and caches like these.

    ``run(k, v, k_cache, v_cache, slot_mapping, k_scale=None, v_scale=None)``, with ``q=None, positions=None,
    cos_sin_cache=None`` where it rotates, is a whole call.
    """

    __slots__ = ()
    call = "k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, q, positions, cos_sin_cache"
    fixed: ClassVar[Fixed] = {
        "kv_layout": attrgetter("kv_layout"),
        "is_neox": lambda problem: problem.rope in (None, NEOX),
    }


def writes_like(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> Repeats | None:
    """What makes calls like one that was made with such operands, without ``backend=``; None if nothing does.

    It takes k, v, k_cache, v_cache, slot_mapping, and the scales.
    """
    generation = HUB.generation
    if _contexts_used and _contexts():
        return None
    heads, kind = k.shape[1], None if k_scale is None else "tensor"
    sizes = heads, k.shape[2], v.shape[2], k_cache.shape[1]
    run = _get((k.dtype, k_cache.dtype, *sizes, kind, NHD))
    make: Callable[[Tensor], Repeats | None] | None = getattr(run, "like", None)
    repeats = None if make is None else make(k)
    return None if repeats is None else repeats._replace(generation=generation)


@publish(_op, prepares(_op, KvCachePlan), traced=Traced(dict, ("k_cache", "v_cache", "q"), {"q": "q"}))
def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    kv_layout: str = NHD,
    q: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    is_neox: bool = True,
    backend: Backend = None,
) -> tuple[Tensor, ...]:
    """Write the keys and values of new tokens into the pages of a KV cache; optionally rotate keys and queries first.

    Args:
        k: ``[T, KH, D]``, float32, float16 or bfloat16, of any strides: keys with their rotary embedding, or, with
            `cos_sin_cache`, without it. The op does not write to it.
        v: ``[T, KH, DV]`` in the same dtype.
        k_cache: ``[num_pages, page_size, KH, D]``, or ``[num_pages, KH, page_size, D]`` for ``kv_layout="HND"``, of
            any strides, as `paged_attention` reads it; dtype of k, or float8_e4m3fn or float8_e5m2 with scales. The op
            writes to it.
        v_cache: as k_cache, with the width DV. Both may be views of one tensor, as long as they share no element.
        slot_mapping: int64 ``[T]``, the slot of each token: ``page * page_size + offset in the page``. A token with a
            negative slot is not written. Slots must be distinct; on a GPU only ``KERNELHUB_CHECK=1`` checks that.
        k_scale: factor of a float8 k_cache: a float, or float32 of one element or ``[KH]``. The cache stores
            ``k / k_scale``, rounded to nearest even and saturated at the largest number of the format.
        v_scale: factor of a float8 v_cache, in the same form.
        kv_layout: ``"NHD"`` or ``"HND"``.
        q: ``[T, QH, D]`` in the dtype of k, of any strides: queries that the op rotates in place. Only with
            `cos_sin_cache`.
        positions: int64 ``[T]``, the row of `cos_sin_cache` for each token. A token without such a row counts as one
            with a negative slot, and its q stays as it is; if it has a slot, it is an error, which on a GPU only
            ``KERNELHUB_CHECK=1`` finds.
        cos_sin_cache: float32 ``[max_position, rotary_dim]``: cosines, then sines, of ``rotary_dim / 2`` angles each,
            for the first `rotary_dim` columns of a head. None for no embedding. The op rotates in float32 and rounds to
            the dtype of k, before a float8 cache quantises the result.
        is_neox: column i is rotated with column ``i + rotary_dim / 2``; False for neighbours, ``2 i`` and ``2 i + 1``.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        `k_cache` and `v_cache` themselves, and `q`, if it is given.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.

    Source:
        vLLM's ``reshape_and_cache_flash`` and ``rotary_embedding``; FlashInfer's ``append_paged_kv_cache`` and
        ``apply_rope_with_cos_sin_cache_inplace``, whose names these are; RoFormer (2021), section 3.2.2.

    Example:
        >>> import torch, kernelhub
        >>> k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64)  # 4 pages of 16 tokens, 2 KV heads
        >>> slots = torch.tensor([0, 33, -1])
        >>> _ = kernelhub.write_kv_cache(torch.ones(3, 2, 64), torch.ones(3, 2, 64), k_cache, v_cache, slots)
        >>> k_cache.sum((2, 3)).nonzero().tolist()
        [[0, 0], [2, 1]]
    """
    if type(k) is not Tensor and isinstance(k, Tensor) and not isinstance(backend, DryRun):
        traced: tuple[Tensor, ...] = _op.traced(**locals())
        return traced
    if _op.again is not None:
        again: tuple[Tensor, ...] | None = _op.again(
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            k_scale,
            v_scale,
            kv_layout,
            q,
            positions,
            cos_sin_cache,
            is_neox,
            backend,
        )
        if again is not None:
            return again
    try:
        heads = k.shape[1]
        if k_scale is None and v_scale is None:
            kind = None
        elif type(k_scale) is float and type(v_scale) is float:
            kind = "value"
        else:
            kind = scale_kind(k_scale, v_scale, heads)
        key: tuple[Any, ...] = (
            k.dtype,
            k_cache.dtype,
            heads,
            k.shape[2],
            v.shape[2],
            k_cache.shape[1 if kv_layout == NHD else 2],
            kind,
            kv_layout,
        )
        if cos_sin_cache is not None:
            key = (*key, cos_sin_cache.shape[1], style_of(cos_sin_cache, is_neox), q is not None)
        hash(key)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        check(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_layout, q, positions, cos_sin_cache, is_neox)
        raise
    run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
    if run is None or type(is_neox) is not bool:
        check(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_layout, q, positions, cos_sin_cache, is_neox)
    if run is None:
        run = _op.decide(key, k.get_device(), backend)
        arguments = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        rotation = (q, positions, cos_sin_cache)
        given = arguments if cos_sin_cache is positions is q is None else (*arguments, *rotation)
        first: tuple[Tensor, ...] = _checked.run((*arguments, kv_layout, *rotation), run, *given)
        return first
    if cos_sin_cache is None and positions is None and q is None:
        result: tuple[Tensor, ...] = run(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        return result
    rotated: tuple[Tensor, ...] = run(
        k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, q, positions, cos_sin_cache
    )
    return rotated
