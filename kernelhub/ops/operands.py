"""What every op asks of a tensor operand, of a destination and of a plain value: one check for all ops.

`check_operand` and `check_destination` run where a call's form is new. A call whose form is known costs one
`Tensor.is_contiguous` per operand: a contiguous tensor is neither sparse nor expanded, has unit strides, and has no
negative bit unless `torch._neg_view` made it. What is not contiguous goes through `check_operand` again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernelhub.dispatch.forms import python_value
from kernelhub.dispatch.shapes import PARSING
from kernelhub.ops.arguments import (
    NotPlain,
    check_has_memory,
    check_is_tensor,
    check_wants_no_gradient,
    dtype_name,
    refuse,
)

_MOST_INDEX = 2**31 - 1
_STRIDED = torch.strided
_APART = "give one whose elements do not overlap"
PLAIN_DISPATCH = Tensor.__torch_dispatch__  # of classes whose tensors have memory of their own
tracing_state = torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_dispatch_modes = torch._C._len_torch_dispatch_stack
_mode = torch._C._get_dispatch_mode
_TRACING = tuple(torch._C._TorchDispatchModeKey.__members__[name] for name in ("PROXY", "FAKE", "FUNCTIONAL"))


def check_operand(op: str, parameter: str, given: Any) -> None:
    """It is a strided tensor with memory, whose elements are what its memory holds.

    Raises:
        InvalidArgument: it is no tensor, or a sparse, nested, quantised, meta, functorch or lazily negated one.
        NotPlain: its memory is not its own, as that of torch's FakeTensor, DTensor and AsyncCollectiveTensor.
    """
    if not isinstance(given, Tensor):
        check_is_tensor(op, parameter, given)
    tensor: Tensor = given
    if tensor.is_nested:
        refuse(op, parameter, "is a nested tensor", "give its values with cu_seqlens, or a padded tensor")
    if type(tensor).__torch_dispatch__ is not PLAIN_DISPATCH and not PARSING.now:
        kind = type(tensor).__name__
        raise NotPlain(op, parameter, f"is a {kind}", f"give a plain tensor, or a {kind} for each operand")
    if tensor.layout is not _STRIDED:
        refuse(op, parameter, f"has layout {tensor.layout}", f"give a dense tensor: {parameter}.to_dense()")
    if tensor.is_quantized:
        refuse(op, parameter, f"has dtype {dtype_name(tensor.dtype)}", "give codes and scales as tensors of their own")
    if _is_wrapped(tensor):
        refuse(op, parameter, "is inside a torch.func transform", "call outside of vmap, grad, jvp and the like")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        refuse(op, parameter, "has a forward gradient", "kernels are for inference; call outside of dual_level")
    if tracing_state() is not None:
        refuse(op, parameter, "is traced by torch.jit.trace", "use torch.compile or torch.export")
    if tensor.is_meta:
        check_has_memory(op, parameter, tensor)
    if tensor.is_neg() or tensor.is_conj():
        check_bits(op, parameter, tensor)


def is_traced() -> bool:
    """Whether a mode of torch records the operators of this thread, or replaces memory by none."""
    return bool(_dispatch_modes()) and any(_mode(key) is not None for key in _TRACING)


def check_eager(op: str) -> None:
    """No mode of torch records the operators of this thread, or replaces memory by none: it sees no kernel by address.

    Raises:
        NotPlain: one does. What it records would lack the kernel, and its results would be fresh memory.
    """
    if _dispatch_modes() and is_traced():
        fix = "trace torch.compile's way, with torch.export, or call the op in torch.ops.kernelhub"
        raise NotPlain(op, "the call", "is traced by make_fx, or is made of plain tensors under FakeTensorMode", fix)


def check_untransformed(op: str, operands: Mapping[str, Any]) -> None:
    """The checks of `check_operand` while torch transforms or traces: kernels of torch operators run there."""
    if transformed():
        for name, operand in operands.items():
            if operand is not None:
                check_operand(op, name, operand)


def check_bits(op: str, parameter: str, tensor: Tensor) -> None:
    """Its memory holds its elements: it is no view that negates or conjugates them when they are read."""
    if tensor.is_neg():
        refuse(op, parameter, "has the negative bit set", f"give {parameter}.resolve_neg()")
    if tensor.is_conj():
        refuse(op, parameter, "has the conjugate bit set", f"give {parameter}.resolve_conj()")


def check_destination(
    op: str,
    parameter: str,
    given: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    operands: Mapping[str, Any],
) -> None:
    """A destination that a kernel can fill: of this shape, dtype and device, with memory that is its own.

    Args:
        op, parameter: for messages.
        given: the destination.
        shape, dtype, device: what the result has.
        operands: the operands that a kernel reads while it writes, by parameter; what is no tensor is left out.

    Raises:
        InvalidArgument: it is none. It may have any strides, as long as no two of its elements share memory.
    """
    check_operand(op, parameter, given)
    out: Tensor = given
    if out.shape != tuple(shape):
        refuse(op, parameter, f"has shape {list(out.shape)}", f"give {list(shape)}")
    if out.dtype is not dtype:
        refuse(op, parameter, f"has dtype {dtype_name(out.dtype)}", f"give {dtype_name(dtype)}")
    if out.device != device:
        refuse(op, parameter, f"is on {out.device}", f"give one on {device}")
    if out.requires_grad:
        check_wants_no_gradient(op, parameter, out)
    start = out.data_ptr()
    if out.is_contiguous():
        end = start + out.nbytes
    elif overlaps_itself(out):
        refuse(op, parameter, f"overlaps itself (strides {list(out.stride())})", _APART)
    else:
        end = start + extent_of(out)
    _check_apart(op, parameter, out, start, end, operands)


def check_apart(op: str, parameter: str, out: Tensor, operands: Mapping[str, Any]) -> None:
    """A destination shares no memory with an operand."""
    start, end = span_of(out)
    _check_apart(op, parameter, out, start, end, operands)


def _check_apart(op: str, parameter: str, out: Tensor, start: int, end: int, operands: Mapping[str, Any]) -> None:
    for name, operand in operands.items():
        if isinstance(operand, Tensor):
            begin = operand.data_ptr()
            if (
                begin < end
                and begin + (operand.nbytes if operand.is_contiguous() else extent_of(operand)) > start
                and share_memory(out, operand)
            ):
                refuse(op, parameter, f"overlaps {name} in memory", "give memory of its own")


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Addresses of its first byte and past its last."""
    start = tensor.data_ptr()
    return start, start + (tensor.nbytes if tensor.is_contiguous() else extent_of(tensor))


def is_plain_view(tensor: Tensor) -> bool:
    """Whether a tensor that is not contiguous is strided and not negated lazily, which its form does not show."""
    return tensor.layout is torch.strided and not tensor.is_neg()


def may_overlap(out: Tensor, operands: Iterable[Tensor | None]) -> bool:
    """Whether a destination may share memory with an operand: then only `check_apart` can decide.

    A contiguous one does not overlap itself; for others there is `may_overlap_itself_or`.
    """
    start, end = span_of(out)
    for operand in operands:
        if operand is not None:
            begin = operand.data_ptr()
            if begin < end:
                finish = begin + operand.nbytes if operand.is_contiguous() else _end_of_storage(operand)
                if finish > start:
                    return True
    return False


def may_overlap_itself_or(out: Tensor, operands: Iterable[Tensor | None]) -> bool:
    """The same, or two elements of the destination may share memory: then only `check_destination` can decide."""
    return overlaps_itself(out) or may_overlap(out, operands)


def _end_of_storage(tensor: Tensor) -> int:
    """Past the last byte of what a view is of, which is found faster than the view's own end."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() + storage.nbytes()


def check_own_memory(
    op: str, parameter: str, out: Tensor, names: Sequence[str], operands: Sequence[Tensor | None]
) -> None:
    """The memory checks of `check_destination`, for a known form of call: 0.1 us per operand in other memory."""
    try:
        begin, dense = out.data_ptr(), out.is_contiguous()
    except RuntimeError:  # a sparse tensor has no memory of its own
        check_operand(op, parameter, out)
        raise
    if dense:
        end = begin + out.nbytes
    else:
        check_operand(op, parameter, out)
        if overlaps_itself(out):
            refuse(op, parameter, f"overlaps itself (strides {list(out.stride())})", _APART)
        end = begin + extent_of(out)
    try:
        for operand in operands:
            if operand is not None:
                start = operand.data_ptr()
                if start < end and (
                    start >= begin
                    or start + (operand.nbytes if operand.is_contiguous() else extent_of(operand)) > begin
                ):
                    check_apart(op, parameter, out, dict(zip(names, operands, strict=True)))
                    return
    except RuntimeError:  # of an operand without memory of its own
        for name, operand in zip(names, operands, strict=True):
            if operand is not None:
                check_operand(op, name, operand)
        raise


def transformed() -> bool:
    """Whether a tensor of now may be more than it shows: in a torch.func transform, forward-mode AD or a trace."""
    return forward_ad._current_level >= 0 or tracing_state() is not None or _transforms() is not None


def check_loose(op: str, names: Sequence[str], operands: Sequence[Tensor | None]) -> None:
    """`check_operand` where a call's form is known, of what is not contiguous and so may be no plain memory.

    A contiguous tensor that is negated lazily has one element; callers that accept such tensors check that.
    """
    try:
        for operand in operands:
            if operand is not None and not operand.is_contiguous():
                break
        else:
            return
    except RuntimeError:  # compressed rows cannot say whether they are contiguous
        pass
    for name, given in zip(names, operands, strict=True):
        if given is not None:
            check_operand(op, name, given)


def check_flag(op: str, parameter: str, given: Any) -> bool:
    """A flag is True or False: a string or a number would be taken for one of them unseen."""
    flag = python_value(given)
    if type(flag) is not bool:
        refuse(op, parameter, f"is {flag!r}", "give True or False")
    return flag


def check_count(
    op: str, parameter: str, given: Any, least: int = 0, most: int = _MOST_INDEX, fix: str | None = None
) -> int:
    """A count or an upper bound is an int; a bool is none."""
    count = python_value(given)
    if type(count) is not int or not least <= count <= most:
        refuse(op, parameter, f"is {count!r}", fix or f"give an int from {least} to {most}")
    return count


def check_number(
    op: str, parameter: str, given: Any, fix: str, accepts: Callable[[float], bool] = math.isfinite
) -> float:
    """A factor or a bound is a float or an int that `accepts` accepts; a bool is none."""
    if type(given) is float and accepts(given):
        return given
    number = python_value(given)
    if isinstance(number, bool) or not isinstance(number, float | int) or not accepts(number):
        shown = type(given).__name__ if isinstance(given, Tensor) else repr(number)  # whose values may be on a GPU
        refuse(op, parameter, f"is {shown}", fix)
    return number


def finite_and_not_zero(number: float) -> bool:
    """Whether a value can be divided by it."""
    return math.isfinite(number) and number != 0


def extent_of(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    reach = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if not size:
            return 0
        reach += (size - 1) * stride
    return reach * tensor.itemsize


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor may share memory; a tensor whose dimensions nest in one another has none."""
    if tensor.is_contiguous():
        return False
    reach = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride < reach and size:
            return True
        reach += (size - 1) * stride
    return False


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share an element's memory, according to their strides.

    Views that interleave, such as halves of rows of one buffer, share none: their elements differ by their place
    within a common stride.
    """
    start, begin = one.data_ptr(), other.data_ptr()
    end, finish = start + extent_of(one), begin + extent_of(other)
    if start >= finish or begin >= end or start == end or begin == finish:
        return False
    sides = [_dimensions(tensor) for tensor in (one, other)]
    for period in {stride for side in sides for _, stride in side}:
        first, second = (_reach_within(side, period) for side in sides)
        if first is None or second is None:
            continue
        place, place_of_other = start % period, begin % period
        if (place_of_other - place) % period >= first and (place - place_of_other) % period >= second:
            return False
    return True


def _dimensions(tensor: Tensor) -> list[tuple[int, int]]:
    """Size and stride in bytes of each dimension, and the bytes of an element as one more."""
    width = tensor.element_size()
    return [
        (size, stride * width)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and stride
    ] + [(width, 1)]


def _reach(dimensions: Sequence[tuple[int, int]]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in dimensions)


def _reach_within(dimensions: Sequence[tuple[int, int]], period: int) -> int | None:
    """Bytes that a tensor covers of each period, from its first on; None if it may cover all."""
    reach = _reach([(size, stride) for size, stride in dimensions if stride % period])
    return reach if reach <= period else None
