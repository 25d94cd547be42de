"""Forms: arguments of a call as plain data without tensor values, sufficient to repeat a similar call.

The form of a tensor is ``"bfloat16[8, 32, 128]"``. It continues with what matters to a compiled kernel: strides
``/(4096, 128, 1)``, the offset in elements from a 16-byte boundary ``@2``, and ``#1`` for tensors that overlap, whose
``@`` counts from the first of them. A tensor on another device than the call's starts with the device:
``"cpu int32[4]"``. At most 32 integers on the CPU are written as values: ``"int32[3]=0,5,9"``. This module does not
read GPU memory.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_FEW = 32  # integers that are written as values
_ALIGNMENT_BYTES = 16
_PYTHON_TYPES: Mapping[str, type] = {"b": bool, "i": int, "u": int, "f": float}
_FORM = re.compile(
    r"(?:(?P<device>[a-z]+(?::\d+)?) )?(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\](?:/\((?P<strides>[-\d, ]*)\))?"
    r"(?:@(?P<offset>\d+))?(?:#(?P<shared>\d+))?(?:=(?P<values>[-\d,]+))?"
)


def written(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The arguments with each tensor replaced by its form, also in lists and packed weights."""
    shared = _shared(arguments.values())
    return {name: _written(value, device, shared) for name, value in arguments.items()}


def made(forms: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Arguments of these forms. Tensors contain zeros, or the integers in their forms."""
    pool: dict[str, Tensor] = {}
    for text in _texts(forms):
        form = _parsed(text)
        if form is not None and form["shared"]:
            size = _elements(form) * getattr(torch, form["dtype"]).itemsize
            known = pool.get(form["shared"])
            if known is None or known.numel() < size:
                pool[form["shared"]] = _zeros(size, form["device"] or device)
    return {name: _made(value, device, pool) for name, value in forms.items()}


def python_value(given: Any) -> Any:
    """The Python bool, int or float of the value of a numpy scalar of any width; anything else as it is."""
    numpy = sys.modules.get("numpy")  # loaded wherever such a scalar exists
    if numpy is None or not isinstance(given, numpy.generic):
        return given
    python = _PYTHON_TYPES.get(given.dtype.kind)
    return given if python is None else python(given)


def is_form(value: object) -> bool:
    """Whether a value is the form of a tensor."""
    return isinstance(value, str) and _parsed(value) is not None


def _written(value: Any, device: torch.device, shared: Mapping[tuple[int, int], tuple[int, int]]) -> Any:
    if isinstance(value, Tensor):
        return _form_of(value, device, shared)
    if isinstance(value, (list, tuple)):
        return type(value)(_written(item, device, shared) for item in value) if type(value) in (list, tuple) else value
    if _is_packed(value):
        parts = {"tensors": _written(dict(value.tensors), device, shared), "shape": tuple(value.shape)}
        about = {"dtype": value.dtype, "facts": dict(value.facts)}
        return {"layout": value.layout, "op": value.op, "kernel": value.kernel, **parts, **about}
    if isinstance(value, dict):
        return {name: _written(item, device, shared) for name, item in value.items()}
    name = getattr(value, "group_name", None)  # a process group; this room may not import torch.distributed
    return python_value(value) if name is None else name


def _form_of(tensor: Tensor, device: torch.device, shared: Mapping[tuple[int, int], tuple[int, int]]) -> str:
    place = "" if tensor.device == device else f"{tensor.device} "
    text = f"{place}{str(tensor.dtype)[6:]}{list(tensor.shape)}"
    if not tensor.is_contiguous():
        text += f"/{tuple(tensor.stride())}"
    with_memory = _has_memory(tensor)
    start, _ = span = _span(tensor) if with_memory and tensor.numel() else (0, 0)
    if span in shared:
        number, first = shared[span]
        return f"{text}@{(start - first) // tensor.itemsize}#{number}"
    past = start % _ALIGNMENT_BYTES // tensor.itemsize
    if past:
        text += f"@{past}"
    few = tensor.is_cpu and with_memory and not tensor.is_floating_point() and 0 < tensor.numel() <= _FEW
    if few and tensor.dtype in (torch.int32, torch.int64) and tensor.ndim == 1:
        text += f"={','.join(map(str, tensor.tolist()))}"
    return text


def _shared(values: Any) -> dict[tuple[int, int], tuple[int, int]]:
    """For each tensor that overlaps another, by address and size: number and aligned start of its group."""
    spans = sorted({_span(tensor) for tensor in _tensors(values) if _has_memory(tensor) and tensor.numel()})
    counts: dict[tuple[int, int], int] = {}
    for tensor in _tensors(values):
        if _has_memory(tensor) and tensor.numel():
            counts[_span(tensor)] = counts.get(_span(tensor), 0) + 1
    groups: list[list[tuple[int, int]]] = []
    end = -1
    for span in spans:
        if span[0] < end:
            groups[-1].append(span)
        else:
            groups.append([span])
        end = max(end, sum(span))
    several = [group for group in groups if len(group) > 1 or counts[group[0]] > 1]
    return {
        span: (number, group[0][0] // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES)
        for number, group in enumerate(several, 1)
        for span in group
    }


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta


def _span(tensor: Tensor) -> tuple[int, int]:
    """Address of the first element, and bytes up to the end of the last one."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (reach + 1) * tensor.itemsize


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif _is_packed(value):
        yield from _tensors(list(value.tensors.values()))
    elif not isinstance(value, (str, bytes)) and hasattr(value, "__iter__"):
        for item in value:
            yield from _tensors(item)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _parsed(text: str) -> dict[str, Any] | None:
    match = _FORM.fullmatch(text)
    if match is None or not isinstance(getattr(torch, match["dtype"], None), torch.dtype):
        return None
    form: dict[str, Any] = match.groupdict()
    form["shape"] = _numbers(form["shape"])
    form["strides"] = None if form["strides"] is None else _numbers(form["strides"])
    return form


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.replace(",", " ").split())


def _strides(form: Mapping[str, Any]) -> tuple[int, ...]:
    if form["strides"] is not None:
        return tuple(form["strides"])
    shape = form["shape"]
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def _elements(form: Mapping[str, Any]) -> int:
    """Number of elements from the start of the memory to the end of the tensor."""
    if 0 in form["shape"]:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(form["shape"], _strides(form), strict=True))
    end: int = int(form["offset"] or 0) + reach + 1
    return end


def _zeros(num_bytes: int, device: Any) -> Tensor:
    return torch.zeros(-(-max(num_bytes, 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, dtype=torch.uint8, device=device)


def _made(value: Any, device: torch.device, pool: Mapping[str, Tensor]) -> Any:
    if isinstance(value, str):
        form = _parsed(value)
        return value if form is None else _tensor(form, device, pool)
    if type(value) in (list, tuple):
        return type(value)(_made(item, device, pool) for item in value)
    if isinstance(value, Mapping):
        return {name: _made(item, device, pool) for name, item in value.items()}
    return value


def _tensor(form: Mapping[str, Any], device: torch.device, pool: Mapping[str, Tensor]) -> Tensor:
    dtype = getattr(torch, form["dtype"])
    if form["shared"]:
        memory = pool[form["shared"]]
    else:
        memory = _zeros(_elements(form) * dtype.itemsize, form["device"] or device)
    tensor = memory.view(dtype).as_strided(form["shape"], _strides(form), int(form["offset"] or 0))
    if form["values"]:
        tensor.copy_(torch.tensor(_numbers(form["values"]), dtype=dtype, device="cpu").view(form["shape"]))
    return tensor


def _is_packed(value: Any) -> bool:
    """Whether a value is a packed weight, recognized by its attributes, since this room may not import `ops`."""
    return dataclasses.is_dataclass(value) and all(hasattr(value, name) for name in ("layout", "tensors", "facts"))
