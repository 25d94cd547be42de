"""Meta tensors in `prepare` and `explain`: arguments with shape, strides and dtype, but without values.

While the op parses the call, zeros replace each of them, on the device of the arguments that have memory, or on torch's
default device. The op's checks do not read their values.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ORDINARY = (Tensor, torch.nn.Parameter)
STANDING_IN: set[int] = set()  # ids of the tensors that replace meta tensors, while an op parses a call


class _Parsing(threading.local):
    """Whether this thread parses a call, which launches nothing: its tensors need no memory."""

    now = False


PARSING = _Parsing()


@contextlib.contextmanager
def parsing() -> Iterator[None]:
    """A call inside is only parsed."""
    before = PARSING.now
    PARSING.now = True
    try:
        yield
    finally:
        PARSING.now = before


@dataclass
class StandIns:
    """A call with replaced meta tensors.

    Attributes:
        arguments: arguments of the call, by name.
        parameters: names of the parameters that were given as meta tensors.
    """

    arguments: dict[str, Any]
    parameters: frozenset[str]


@contextlib.contextmanager
def standing_in(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[StandIns | None]:
    """The call with its meta tensors replaced; None if it has none, or if its arguments do not fit the signature."""
    if not any(_is_shape(item) for value in (*args, *kwargs.values()) for item in _items(value)):
        yield None
        return
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # the function itself raises the error
        yield None
        return
    items = [item for value in given.values() for item in _items(value)]
    # Some operands are on the CPU whatever runs the kernel, like a handle's header: they come after the others.
    given_on = sorted((item.device for item in items if not item.is_meta), key=lambda device: device.type == "cpu")
    device = given_on[0] if given_on else torch.get_default_device()
    if device.type == "meta":
        yield None
        return
    made: dict[int, Tensor] = {id(item): _zeros_like(item, device) for item in items if _is_shape(item)}
    names = frozenset(name for name, value in given.items() if any(id(item) in made for item in _items(value)))
    STANDING_IN.update(map(id, made.values()))
    try:
        yield StandIns({name: _replaced(value, made) for name, value in given.items()}, names)
    finally:
        STANDING_IN.difference_update(map(id, made.values()))


def _items(value: Any) -> list[Tensor]:
    """The tensors in an argument."""
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if type(value) in (list, tuple) else []


def _is_shape(tensor: Tensor) -> bool:
    return type(tensor) in _ORDINARY and tensor.is_meta and tensor.layout is torch.strided


def _zeros_like(tensor: Tensor, device: torch.device) -> Tensor:
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.zeros(reach * tensor.itemsize if tensor.numel() else 0, dtype=torch.uint8, device=device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _replaced(value: Any, made: Mapping[int, Tensor]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, made) for item in value)
    return made.get(id(value), value)
