"""Recognises tensors of a form that a check has accepted, with one comparison.

What is compared of each tensor: its type, dtype, device and layout, whether it requires a gradient, the sizes that are
fixed and, on request, the strides. Tensors without memory, sparse and nested ones, lazily negated ones and those inside
a torch.func transform have another form. So have all tensors under autocast, in inference mode and in a trace of
torch.jit, in each of which a form has to be learned anew.

torch's guards of compiled code do all of that in C, in the time in which Python reads seven attributes: 0.25 us for
four tensors (2 cores, torch 2.13). They end the process when they meet a nested tensor, so ask `Tensor.is_nested`
first. (torch's guard managers raise instead, in 50 ns less for four tensors; but they let go of the interpreter's lock
at each look, so that threads would take turns there.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

Sizes = Sequence[int | None]


class KnownForm:
    """The form that was let through last.

    Attributes:
        holds: whether as many tensors as were learned have the form; False for anything that is no tensor. None of
            them may be nested.
    """

    __slots__ = ("holds",)

    def __init__(self) -> None:
        self.holds: Callable[..., bool] = _nothing

    def learn(self, tensors: Sequence[Tensor], sizes: Sequence[Sizes], strided: Collection[int] = ()) -> None:
        """Take the form of these tensors for the known one.

        Args:
            tensors: what a check let through.
            sizes: of each tensor the fixed sizes, None for one that may differ.
            strided: indices of the tensors whose strides are fixed too.
        """
        self.holds = _form_maker()(tensors, sizes, strided)


def _nothing(*tensors: Any) -> bool:
    return False


def _guards_of(tensors: Sequence[Tensor], sizes: Sequence[Sizes], strided: Collection[int]) -> Callable[..., bool]:
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        return _guards_of_distinct(tensors, sizes, strided)
    steps = [list(t.stride()) if place in strided else [None] * t.ndim for place, t in enumerate(tensors)]
    return _guards(tensors, [list(some) for some in sizes], steps)


def _guards_of_distinct(
    tensors: Sequence[Tensor], sizes: Sequence[Sizes], strided: Collection[int]
) -> Callable[..., bool]:
    """torch's guards reject a tensor that is given twice, so each tensor is checked once."""
    firsts = [next(i for i, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    distinct = sorted(set(firsts))
    held: list[list[int | None]] = []
    steps: list[Any] = []
    for place in distinct:
        tensor, again = tensors[place], [i for i, first in enumerate(firsts) if first == place]
        held.append([_first_held(some) for some in zip(*(sizes[i] for i in again), strict=True)])
        steps.append(list(tensor.stride()) if any(i in strided for i in again) else [None] * tensor.ndim)
    check = _guards([tensors[place] for place in distinct], held, steps)

    def holds(*given: Any) -> bool:
        twice = all(given[first] is one for first, one in zip(firsts, given, strict=True))
        return twice and check(*[given[place] for place in distinct])

    return holds


def _guards(tensors: Sequence[Tensor], held: list[list[int | None]], steps: list[Any]) -> Callable[..., bool]:
    guards: Any = torch._C._dynamo.guards
    check: Callable[..., bool] = guards.TensorGuards(
        *tensors, dynamic_dims_sizes=held, dynamic_dims_strides=steps
    ).check
    return check


def _first_held(sizes: Sequence[int | None]) -> int | None:
    return next((size for size in sizes if size is not None), None)


def _compared(tensors: Sequence[Tensor], sizes: Sequence[Sizes], strided: Collection[int]) -> Callable[..., bool]:
    """The same in Python, for a torch whose guards take other arguments; 2 us for three tensors."""
    forms = [_form(tensor) for tensor in tensors]
    steps = [tensor.stride() if place in strided else None for place, tensor in enumerate(tensors)]
    state = _state()

    def holds(*given: Any) -> bool:
        if _state() != state:
            return False
        for tensor, form, wanted, stride in zip(given, forms, sizes, steps, strict=True):
            if type(tensor) is not form[0] or _form(tensor) != form:
                return False
            if any(size is not None and size != has for size, has in zip(wanted, tensor.shape, strict=True)):
                return False
            if stride is not None and tensor.stride() != stride:
                return False
        return True

    return holds


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.ndim,
        tensor.requires_grad,
        tensor.is_neg(),
        tensor.is_conj(),
        tensor.is_nested,
        torch._C._functorch.is_functorch_wrapped_tensor(tensor),
    )


def _state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_any_autocast_enabled(),
        torch._C._get_tracing_state() is None,
    )


@functools.cache
def _form_maker() -> Callable[[Sequence[Tensor], Sequence[Sizes], Collection[int]], Callable[..., bool]]:
    """torch's guards, if they check what is needed."""
    one = torch.empty(2, 3, dtype=torch.float32, device="cpu")
    try:
        holds = _guards_of((one,), ((None, 3),), ())
        fits = (
            holds(torch.empty(5, 3, dtype=torch.float32, device="cpu"))
            and not holds(torch.empty(2, 4, dtype=torch.float32, device="cpu"))
            and not holds(one.double())
            and not holds(None)
        )
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return _compared
    return _guards_of if fits else _compared
