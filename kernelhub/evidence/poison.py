"""Poisoned and guarded memory that reveals wrong writes; copies, and differences between results."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Judgement, bytes_of, each
from kernelhub.runtime.scratch import Guarded

# NaN with a payload that no kernel computes, to distinguish unwritten elements from a computed NaN.
_POISON = {
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float16: (torch.int16, 0x7DA5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
    torch.float64: (torch.int64, 0x7FF5A5A5A5A5A5A5),
    torch.int32: (torch.int32, -0x25A5A5A6),
    torch.int64: (torch.int64, -0x25A5A5A5A5A5A5A6),
}
_POISON_BYTE = (torch.uint8, 0x5A)
_LEAD_BYTES, _TRAIL_BYTES = 128, 16  # multiples of every alignment that kernels require of a start, and of a row


def poisoned(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Guarded:
    """Memory for a result between guards, filled with poison."""
    guard = Guarded(name, math.prod(shape) * dtype.itemsize, device)
    integers, value = _POISON.get(dtype, _POISON_BYTE)
    guard.body.view(integers).fill_(value)
    return guard


def untouched(tensor: Tensor) -> Tensor:
    """Mask of the elements that still contain poison; bool, of the tensor's shape."""
    integers, value = _POISON.get(tensor.dtype, _POISON_BYTE)
    return tensor.contiguous().view(integers).view(tensor.shape) == value


def kind_of_error(results: Mapping[str, Tensor], judgement: Judgement) -> str:
    """The code of an error, by the elements for which the reference has a number."""
    for name, got in results.items():
        want = judgement.want.get(name)
        if want is None or want.shape != got.shape or not got.numel():
            continue
        floats = want.is_floating_point() and want.itemsize > 1
        numbers = ~want.isnan() if floats else torch.ones_like(got, dtype=torch.bool)
        left = untouched(got)
        if bool((left & numbers).any()) and (got.itemsize > 1 or bool(left.all())):
            return "not_written"
        if got.is_floating_point() and got.itemsize > 1 and bool((got.isnan() & numbers).any()):
            return "nan"
        if not bool(bytes_of(got).any()) and bool(bytes_of(want).any()):
            return "zeros"
    return "wrong_numbers"


def apart(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """Difference of results: the largest one, or for codes, the number of differing ones."""
    distances = {}
    for name, one in left.items():
        other = right.get(name)
        if other is None or other.shape != one.shape or not one.numel():
            continue
        if one.itemsize == 1 or not one.is_floating_point():
            distances[name] = float((bytes_of(one) != bytes_of(other)).sum())
        else:
            difference = (one.double() - other.double()).abs()
            difference = torch.where(one.double() == other.double(), 0.0, difference)  # infinities among them
            distances[name] = float(difference.nan_to_num(nan=0.0, posinf=torch.finfo(torch.float64).max).max())
    return distances


def largest_difference(results: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> str:
    """The element that differs most from the reference, in words; empty if none can be compared."""
    found: tuple[float, str] = (0.0, "")
    for name, expected in want.items():
        got = results.get(name)
        if got is None or got.shape != expected.shape or not got.numel():
            continue
        one, other = got.detach().double().flatten(), expected.detach().to(got.device).double().flatten()
        differ = torch.where((one == other) | other.isnan(), 0.0, (one - other).abs()).nan_to_num(torch.inf, torch.inf)
        at = int(differ.argmax())
        if float(differ[at]) > found[0]:
            index = ", ".join(str(int(place)) for place in torch.unravel_index(differ.argmax(), got.shape))
            found = float(differ[at]), f"{name}[{index}] is {float(one[at]):.6g}, expected {float(other[at]):.6g}"
    return found[1]


def copied(arguments: Arguments) -> Arguments:
    """Copies of the arguments with the same strides; arguments that share memory also do so in the copies."""
    memory: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    def copy(tensor: Tensor) -> Tensor:
        there = tensor.untyped_storage()
        place = tensor.device, there.data_ptr()  # what is empty has address 0 on every device
        if place not in memory:
            memory[place] = there.clone()
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(memory[place], tensor.storage_offset(), tensor.shape, tensor.stride())

    return each(copy, arguments)


def overwrite(given: Arguments, values: Arguments) -> None:
    """Put values into the memory of arguments of the same shapes."""
    for name, value in given.items():
        pairs = zip(value, values[name], strict=True) if isinstance(value, list) else [(value, values[name])]
        for one, other in pairs:
            if isinstance(one, Tensor):
                _raw(one).copy_(_raw(other))


def in_wider(tensor: Tensor) -> Tensor:
    """The same values as part of a wider tensor, if rows are contiguous; NaN or -1 fills the space around rows."""
    if not tensor.ndim or not tensor.numel() or tensor.stride(-1) != 1:
        return tensor
    raw = _raw(tensor)
    wide = torch.empty(wide_shape(tuple(raw.shape), raw.dtype), dtype=raw.dtype, device=raw.device)
    wide.view(torch.uint8).fill_(0xFF)
    part = inner(wide, raw.shape[-1])
    part.copy_(raw)
    return part.view(tensor.dtype)


def wide_shape(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of a wider tensor; `inner` returns its part of this shape."""
    return (*shape[:-1], shape[-1] + (_LEAD_BYTES + _TRAIL_BYTES) // dtype.itemsize)


def inner(wide: Tensor, width: int) -> Tensor:
    """The part of a wider tensor that contains the values, with unchanged alignment."""
    return wide[..., _LEAD_BYTES // wide.itemsize :][..., :width]


def around(wide: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The rest of a wider tensor."""
    lead = _LEAD_BYTES // wide.itemsize
    return wide[..., :lead], wide[..., lead + width :]


def _raw(tensor: Tensor) -> Tensor:
    """The tensor as integers, so that every bit is copied."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def changed(given: Arguments, before: Arguments, written: Collection[str]) -> Iterator[str]:
    """Names of arguments that the call changed without permission."""
    for name, value in given.items():
        if name in written:
            continue
        pairs = zip(value, before[name], strict=True) if isinstance(value, list) else [(value, before[name])]
        if any(isinstance(one, Tensor) and not same(one, other) for one, other in pairs):
            yield name


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are bitwise equal."""
    return left.shape == right.shape and left.dtype is right.dtype and torch.equal(bytes_of(left), bytes_of(right))
