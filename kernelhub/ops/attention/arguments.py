"""The arguments of an attention call: their normal forms, and the checks that name the parameter.

Facts in the key are checked when the key is new (`check_*`). Sizes of a call are not in the key and are checked with
the metadata of each step (`begin`).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.dispatch.forms import python_value
from kernelhub.ops.arguments import check_is_tensor, dtype_name, lse_shape, refuse
from kernelhub.ops.attention.problem import QUANTISED, AttentionProblem
from kernelhub.ops.operands import (
    check_count,
    check_destination,
    check_flag,
    check_number,
    check_operand,
)
from kernelhub.ops.values import values_to_check

Window = int | tuple[int, int] | None
Scale = float | Tensor | None

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FP8 = tuple(getattr(torch, name) for name in QUANTISED)

# What arguments that are no tensors, or no dense ones, raise while a call's key is read from them.
RAISED_BY_BAD_ARGUMENTS = (
    AttributeError,
    TypeError,
    ValueError,
    IndexError,
    RuntimeError,
    ZeroDivisionError,
    OverflowError,
)


def window_pair(op: str, window: Window) -> tuple[int, int]:
    """``(left, right)`` with -1 for no limit; a bare number is the left side."""
    left, right = map(python_value, window if type(window) is tuple and len(window) == 2 else (window, -1))
    if type(left) is not int or type(right) is not int or left < -1 or right < -1:
        refuse(op, "window", f"is {window!r}", "give left or (left, right), each an int from -1 (no limit) up")
    return left, right


def kv_scale_kind(op: str, k_scale: Scale, v_scale: Scale, num_kv_heads: int) -> str | None:
    """The form of the scales: ``"value"``, ``"tensor"``, ``"head"``, or None."""
    kind = _scale_kind(op, "k_scale", k_scale, num_kv_heads)
    if kind != _scale_kind(op, "v_scale", v_scale, num_kv_heads):
        refuse(
            op,
            "v_scale",
            "has another form than k_scale",
            "give both as floats, or both as tensors of one shape",
        )
    return kind


def _scale_kind(op: str, parameter: str, scale: Scale, num_kv_heads: int) -> str | None:
    if scale is None:
        return None
    if isinstance(scale, Tensor):
        if type(scale) is not Tensor or scale.layout is not torch.strided or scale.is_nested or scale.is_neg():
            check_operand(op, parameter, scale)
        if scale.dtype is not torch.float32:
            refuse(op, parameter, f"has dtype {dtype_name(scale.dtype)}", "scales are float32")
        if scale.requires_grad:
            refuse_grad(op, (parameter,), (scale,))
        if scale.numel() == 1:
            return "tensor"
        if scale.shape == (num_kv_heads,):
            return "head"
        refuse(
            op,
            parameter,
            f"has shape {list(scale.shape)}",
            f"give one element, or [{num_kv_heads}], one per KV head",
        )
    check_number(op, parameter, scale, "give a finite float or a float32 tensor")
    return "value"


class Values(NamedTuple):
    """The values of a call's features in normal form, as a kernel gets them.

    Attributes:
        scale: factor of q k^T.
        window_left: keys before its own position that a query sees; -1 for no limit.
        window_right: keys after its own position that a query sees; -1 for no limit, 0 when causal.
        softcap: bound of the scores; 0.0 for none.
        sinks: [H], contiguous, or None.
        k_scale: None unless KV is fp8; then a float, or float32 of one element or [KH], contiguous.
        v_scale: as k_scale.
    """

    scale: float
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    sinks: Tensor | None = None
    k_scale: Scale = None
    v_scale: Scale = None


class Given(NamedTuple):
    """The features of a call as the caller gives them: the parameters of both ops, by name."""

    causal: Any
    window: Any
    softcap: Any
    sinks: Any
    scale: Any
    k_scale: Any
    v_scale: Any
    return_lse: Any

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Given:
        """Those of a call's arguments, by parameter."""
        return cls._make(_given(arguments))


_given = operator.itemgetter(*Given._fields)


class OptionalTensor(NamedTuple):
    """A parameter of both ops whose argument may be a tensor.

    Attributes:
        parameter: of the ops, and the field of `Values`.
        facet: of the problem, that says whether a call has it.
        forms: values of the facet with which the argument is a tensor.
    """

    parameter: str
    facet: str
    forms: tuple[Any, ...]


# The one list of them: checks of a call, of overlaps, of plans and of devices read it.
OPTIONAL_TENSORS = (
    OptionalTensor("sinks", "sinks", (True,)),
    OptionalTensor("k_scale", "kv_scale", ("tensor", "head")),
    OptionalTensor("v_scale", "kv_scale", ("tensor", "head")),
)
KEPT = tuple(optional.parameter for optional in OPTIONAL_TENSORS)  # by a plan, from the call that prepared it
_NO_VALUES = ("window_left", "window_right")  # fields of `Values` that are no parameters

# What the key of a table holds of the features, and the facets that they are.
Features = tuple[bool, bool, bool, bool, bool, bool, str | None]
FEATURES = ("causal", "window_left", "window_right", "softcap", "sinks", "lse", "kv_scale")
PLAIN: Features = (False, False, False, False, False, False, None)

_values = Values._make
_EXTRAS = [(Values._fields.index(item.parameter), item.forms) for item in OPTIONAL_TENSORS]
_facets = operator.attrgetter(*[item.facet for item in OPTIONAL_TENSORS])


def features_of(
    op: str,
    q_dims: tuple[int, int],
    num_kv_heads: int,
    one_token: bool,
    causal: bool,
    window: Window,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    k_scale: Scale,
    v_scale: Scale,
    return_lse: bool,
) -> tuple[Features, Values]:
    """The semantic facets of a call for its key, and their values.

    Args:
        op: name for messages.
        q_dims: heads and width of q.
        num_kv_heads: heads of k.
        one_token: every sequence has one query, for which causality and a right side change nothing.
    """
    if causal is not True and causal is not False:
        causal = check_flag(op, "causal", causal)
    if return_lse is not True and return_lse is not False:
        return_lse = check_flag(op, "return_lse", return_lse)
    left, right = (-1, -1) if window is None else window_pair(op, window)
    if softcap is not None:
        softcap = check_softcap(op, softcap)
    if sinks is not None:
        sinks = check_sinks(op, sinks, q_dims[0])
    kind = None
    if k_scale is not None or v_scale is not None:
        kind = kv_scale_kind(op, k_scale, v_scale, num_kv_heads)
        if isinstance(k_scale, Tensor) and isinstance(v_scale, Tensor):
            k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
        else:
            k_scale, v_scale = python_value(k_scale), python_value(v_scale)
    if one_token:
        causal, right = False, -1
    elif causal:
        right = 0
    features = (
        causal,
        left >= 0,
        right >= 0 and not causal,
        bool(softcap),
        sinks is not None,
        return_lse,
        kind,
    )
    scale = q_dims[1] ** -0.5 if scale is None else finite_scale(op, scale)
    return features, _values((scale, left, right, softcap or 0.0, sinks, k_scale, v_scale))


def optional_tensors(values: Values, cu_seqlens_q: Tensor | None) -> list[Tensor]:
    """The tensors of a call over pages that not every call has, as `AttentionAdapter.again` takes them first."""
    more = (values.sinks, values.k_scale, values.v_scale, cu_seqlens_q)
    return [one for one in more if isinstance(one, Tensor)]


def likeness(
    causal: Any,
    window: Any,
    softcap: Any,
    sinks: Any,
    scale: Any,
    k_scale: Any,
    v_scale: Any,
    return_lse: Any,
    kv_layout: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: Any,
) -> Hashable:
    """Equal for calls over pages that differ in their tensors only; None for arguments of types that checks look at."""
    if (
        (causal is not True and causal is not False)
        or (return_lse is not True and return_lse is not False)
        or (window is not None and type(window) is not int)
        or (softcap is not None and type(softcap) is not float)
        or (scale is not None and type(scale) is not float)
        or (max_seqlen_q is not None and type(max_seqlen_q) is not int)
        or type(kv_layout) is not str
    ):
        return None
    k_kind: Any = k_scale if k_scale is None or type(k_scale) is float else Tensor
    v_kind: Any = v_scale if v_scale is None or type(v_scale) is float else Tensor
    absent = sinks is None, cu_seqlens_q is None
    return causal, window, softcap, scale, k_kind, v_kind, return_lse, kv_layout, max_seqlen_q, absent


def arguments_of(problem: AttentionProblem, values: Values) -> dict[str, Any]:
    """The arguments of a call with these features and values."""
    window = values.window_left, -1 if problem.causal else values.window_right
    features = {"causal": problem.causal, "window": window, "return_lse": problem.lse}
    return features | {name: value for name, value in values._asdict().items() if name not in _NO_VALUES}


def check_softcap(op: str, softcap: Any) -> float:
    """A bound of the scores; 0 for none."""
    fix = "give a positive number, or None for no cap"
    return check_number(op, "softcap", softcap, fix, lambda bound: 0.0 <= bound < math.inf)


def check_sinks(op: str, sinks: Any, num_q_heads: int) -> Tensor:
    """One score per query head, side by side: copied if they are not."""
    plain = type(sinks) is Tensor and sinks.layout is torch.strided and sinks.dtype in _FLOATS
    if not plain or (num_q_heads == 1 and sinks.is_neg()):  # one element is contiguous whatever it is a view of
        check_operand(op, "sinks", sinks)
        if sinks.dtype not in _FLOATS:
            refuse(op, "sinks", f"has dtype {dtype_name(sinks.dtype)}", "give float32, float16 or bfloat16")
    if sinks.shape != (num_q_heads,):
        refuse(op, "sinks", f"has shape {list(sinks.shape)}", f"give [{num_q_heads}], one per query head")
    if sinks.requires_grad:
        refuse_grad(op, ("sinks",), (sinks,))
    made: Tensor = sinks.contiguous()
    return made


def check_extras(op: str, q: Tensor, values: Values) -> None:
    """Optional tensors: what the key does not hold of them."""
    for name in KEPT:
        tensor = getattr(values, name)
        if isinstance(tensor, Tensor):
            check_operand(op, name, tensor)
            same_device(op, name, tensor, q)


def extras_of(problem: AttentionProblem) -> tuple[int, ...]:
    """Indices in `Values` of the tensors that a call of the problem has."""
    return _extras(_facets(problem))


@functools.cache
def _extras(facets: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(at for (at, forms), value in zip(_EXTRAS, facets, strict=True) if value in forms)


def check_kept(op: str, values: Values, given: Mapping[str, Any]) -> None:
    """A plan keeps its values: a contiguous copy would not follow changes of the given tensor."""
    for name in KEPT:
        tensor = given[name]
        if isinstance(tensor, Tensor) and getattr(values, name) is not tensor:
            refuse(op, name, f"has stride {list(tensor.stride())}", f"a plan keeps it; give {name}.contiguous()")


def check_operands(
    op: str,
    names: tuple[str, str, str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_kv_heads: int,
    given: Given | None,
    out: Any,
) -> None:
    """Dtypes, devices, head counts, widths, features: all that `attention` and `paged_attention` share.

    Args:
        op: name for messages.
        names: names of q, k and v in the op's signature.
        num_kv_heads: heads of k, already read from its layout.
        given: the features of the call, None where it has none, as most have none.
    """
    _, k_name, v_name = names
    dtype, kv_dtype = q.dtype, k.dtype
    if dtype not in _FLOATS:
        refuse(op, "q", f"has dtype {dtype_name(dtype)}", "give float32, float16 or bfloat16")
    if kv_dtype is not dtype and kv_dtype not in _FP8:
        fix = f"give {dtype_name(dtype)} as q, {' or '.join(QUANTISED)}"
        refuse(op, k_name, f"has dtype {dtype_name(kv_dtype)}", fix)
    check_alike(op, q, ((k_name, k), (v_name, v)))
    k_scale = None if given is None else given.k_scale
    if kv_dtype in _FP8 and k_scale is None:
        refuse(
            op,
            "k_scale",
            f"is None with an fp8 {k_name}",
            "give k_scale and v_scale, 1.0 if nothing was scaled",
        )
    if kv_dtype not in _FP8 and k_scale is not None:
        refuse(op, "k_scale", f"is given with a {dtype_name(kv_dtype)} {k_name}", "scales belong to an fp8 KV")
    *_, num_q_heads, head_dim = q.shape
    k_width, v_width = k.shape[-1], v.shape[-1]
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        refuse(
            op,
            "q",
            f"has {num_q_heads} heads, {k_name} has {num_kv_heads}",
            f"the heads of q must be a multiple of those of {k_name}",
        )
    for name, width in (("q", head_dim), (k_name, k_width), (v_name, v_width)):
        if width == 0:
            refuse(op, name, "has head width 0", "give heads of one element or more")
    if k_width != head_dim:
        refuse(op, k_name, f"has head width {k_width}", f"q has {head_dim}")
    dims = num_q_heads, head_dim
    read = {"q": q, k_name: k, v_name: v}
    if given is not None:
        _, values = features_of(op, dims, num_kv_heads, False, *given)
        check_extras(op, q, values)
        read |= {name: getattr(given, name) for name in KEPT}
    if out is not None:
        check_destination(op, "out", out, (*q.shape[:-1], v_width), dtype, q.device, read)
    refuse_grad(op, names, (q, k, v))


def refuse_grad(op: str, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """No kernel computes gradients, and a result that silently lacks them would be wrong."""
    if torch.is_grad_enabled():
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.requires_grad:
                refuse(op, name, "requires grad", "kernels are for inference; call under torch.no_grad()")


def check_out(op: str, out: Tensor, q: Tensor, shape: Sequence[int]) -> None:
    """A destination of the right shape and dtype that is none of the inputs."""
    if list(out.shape) != list(shape):
        refuse(op, "out", f"has shape {list(out.shape)}", f"give {list(shape)}")
    if out.dtype is not q.dtype:
        refuse(op, "out", f"has dtype {dtype_name(out.dtype)}", f"give {dtype_name(q.dtype)} as q")
    if out.numel() and out.data_ptr() == q.data_ptr():
        refuse(op, "out", "overlaps q in memory", "give memory of its own")


def check_alike(op: str, q: Tensor, kv: tuple[tuple[str, Tensor], tuple[str, Tensor]]) -> None:
    """k and v, given with their names, are on q's device and of one dtype."""
    (k_name, k), (v_name, v) = kv
    device = q.device
    if k.device != device or v.device != device:
        same_device(op, k_name, k, q)
        same_device(op, v_name, v, q)
    if v.dtype is not k.dtype:
        refuse(op, v_name, f"has dtype {dtype_name(v.dtype)}", f"give {dtype_name(k.dtype)} as {k_name}")


def finite_scale(op: str, scale: Any) -> float:
    """The factor of q k^T, if it is one."""
    return check_number(op, "scale", scale, "give a finite float, or None for 1 / sqrt(head width)")


def same_device(op: str, parameter: str, tensor: Tensor, q: Tensor) -> None:
    """All operands live on one device."""
    if tensor.device != q.device:
        refuse(op, parameter, f"is on {tensor.device}", f"move it to {q.device}, where q is")


def check_index(op: str, parameter: str, tensor: Any, ndim: int, shape: str) -> None:
    """An int32 tensor of the right rank: block tables, lengths and offsets."""
    if not isinstance(tensor, Tensor):
        refuse(op, parameter, f"is {type(tensor).__name__}", f"give an int32 tensor {shape}")
    check_operand(op, parameter, tensor)
    if tensor.dtype is not torch.int32:
        refuse(op, parameter, f"has dtype {dtype_name(tensor.dtype)}", f"give int32: {parameter}.to(torch.int32)")
    if tensor.ndim != ndim:
        refuse(op, parameter, f"has shape {list(tensor.shape)}", f"give {shape}")


def check_offsets(
    op: str,
    parameter: str,
    offsets: Sequence[int],
    num_seqs: int,
    num_tokens: int | None,
    longest: int | None,
) -> None:
    """Host values of cu_seqlens: from 0 up, not decreasing, within the given tokens and bound."""
    if len(offsets) != num_seqs + 1:
        refuse(op, parameter, f"has {len(offsets)} offsets for {num_seqs} sequences", f"give {num_seqs + 1}")
    if offsets[0] != 0:
        refuse(op, parameter, f"starts at {offsets[0]}", "the first offset is 0")
    for start, end in itertools.pairwise(offsets):
        if end < start:
            refuse(op, parameter, f"falls from {start} to {end}", "offsets must not decrease")
        if longest is not None and end - start > longest:
            bound = parameter.replace("cu_seqlens", "max_seqlen").removesuffix("_cpu")
            refuse(op, bound, f"is {longest}, but a sequence has {end - start} tokens", "give an upper bound")
    if num_tokens is not None and offsets[-1] > num_tokens:
        refuse(op, parameter, f"ends at {offsets[-1]}", f"there are {num_tokens} tokens")


def adjacent(op: str, parameter: str, tensor: Tensor, keep: bool) -> Tensor:
    """Lengths, offsets or a block table as kernels read them: the elements of the last dimension side by side.

    Args:
        op, parameter: for messages.
        tensor: that was given.
        keep: a step keeps it, and reads at each launch what the caller wrote to it: a copy would not follow.
    """
    if tensor.is_contiguous() or (tensor.ndim == 2 and (tensor.stride(1) == 1 or tensor.shape[1] < 2)):
        return tensor
    if keep:
        refuse(op, parameter, f"has stride {list(tensor.stride())}", f"a step keeps it; give {parameter}.contiguous()")
    return tensor.contiguous()


def check_bound(op: str, parameter: str, bound: Any) -> int | None:
    """An upper bound that the caller may give."""
    return None if bound is None else check_count(op, parameter, bound)


def host_values(op: str, parameter: str, values: Sequence[int] | Tensor | None) -> list[int] | None:
    """Values that the caller has on the host, as Python ints."""
    if values is None:
        return None
    if isinstance(values, Tensor):
        check_operand(op, parameter, values)
        if not values.is_cpu:
            refuse(op, parameter, f"is on {values.device}", "give the values on the host: a list, or a CPU tensor")
        values = values.tolist()
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        refuse(op, parameter, f"holds {values!r:.60}", "give ints, or an integer tensor of one dimension")


def known_values(op: str, parameter: str, tensor: Tensor, given: Sequence[int] | None) -> Sequence[int] | None:
    """Values of lengths or offsets on the host: the tensor's, if it may be read, else those that the caller has there.

    Where both are known they must agree.
    """
    held = values_to_check(tensor)
    if held is None:
        return given
    values: list[int] = held.tolist()
    if given is not None:
        _check_same_values(op, parameter, given, values)
    return values


def _check_same_values(op: str, parameter: str, given: Sequence[int], values: Sequence[int]) -> None:
    if list(given) == list(values):
        return
    if len(given) != len(values):
        refuse(op, f"{parameter}_cpu", f"has {len(given)} values", f"{parameter} has {len(values)}")
    place = next(index for index, (one, other) in enumerate(zip(given, values, strict=True)) if one != other)
    refuse(op, f"{parameter}_cpu", f"is {given[place]} at {place}", f"{parameter} is {values[place]} there")


def any_tensor(op: str, **operands: Any) -> None:
    """Each operand is a tensor at all."""
    for parameter, operand in operands.items():
        check_is_tensor(op, parameter, operand)


def memory_like(q: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Memory for the results of attention to values of the width of v."""
    lse = q.new_empty(lse_shape(q.shape), dtype=torch.float32)
    return {"out": q.new_empty((*q.shape[:-1], v.shape[-1])), "lse": lse}
