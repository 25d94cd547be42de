"""Checks and messages about tensors, shared by the ops of all families."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, is_grad_enabled
from torch.nn import Parameter

from kernelhub.errors import InvalidArgument

_MOST_FORMS = 512
_ORDINARY = (Tensor, Parameter)


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype)[6:]


def describe(tensor: Tensor) -> str:
    """Dtype and shape, for messages."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def refuse(op: str, parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(op, parameter, problem, fix)


class NotPlain(InvalidArgument):
    """The refusal of a tensor of a class like torch's FakeTensor, whose elements only torch's operators reach.

    A plan's run is made as the op's operator instead.
    """


def check_is_tensor(op: str, parameter: str, given: Any) -> None:
    """It is a tensor at all."""
    if not isinstance(given, Tensor):
        refuse(op, parameter, f"is {type(given).__name__}", "give a torch.Tensor")


def check_has_memory(op: str, parameter: str, tensor: Tensor) -> None:
    """It is on a device where something can run."""
    if tensor.is_meta:
        refuse(op, parameter, "is on meta", "give a tensor with memory, or a fake one under torch.compile")


def check_wants_no_gradient(op: str, parameter: str, tensor: Tensor) -> None:
    """It requires no gradient."""
    if tensor.requires_grad and is_grad_enabled():
        refuse(op, parameter, "requires grad", "kernels are for inference; call under torch.no_grad()")


def lse_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """[H, T] for q or a result [T, H, D]; [B, H, S] for [B, S, H, D]."""
    *batch, tokens, heads, _ = shape
    return (*batch, heads, tokens)


def plain(tensor: Tensor) -> Tensor:
    """A Parameter, for example, as the Tensor that an eager op takes without going through its operator again."""
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)


def usable(tensor: Any, dtype: torch.dtype, device: int) -> bool:
    """Whether it is an ordinary tensor of this dtype on this device, that requires no gradient.

    With `alike` this is the fast half of a check: plain comparisons that let the usual call through. Where they say
    no, the op's full check looks again, and says what is wrong if something is.

    Args:
        tensor: anything.
        dtype: the one it must have.
        device: index of a GPU, -1 for the CPU, as `Tensor.get_device` gives it.
    """
    return (
        type(tensor) in _ORDINARY
        and tensor.dtype is dtype
        and (tensor.is_cpu if device < 0 else tensor.get_device() == device and tensor.is_cuda)
        and not (tensor.requires_grad and is_grad_enabled())
    )


def dense(tensor: Any, dtype: torch.dtype, device: int) -> bool:
    """The same of a tensor like which torch makes others of any shape, as of sparse ones it does not."""
    return usable(tensor, dtype, device) and tensor.layout is torch.strided


def alike(tensor: Any, shape: Sequence[int], dtype: torch.dtype, device: int) -> bool:
    """The same of a tensor of this shape, a tuple."""
    try:
        return (
            type(tensor) in _ORDINARY
            and tensor.dtype is dtype
            and tensor.shape == shape
            and (tensor.is_cpu if device < 0 else tensor.get_device() == device and tensor.is_cuda)
            and not (tensor.requires_grad and is_grad_enabled())
        )
    except RuntimeError:  # a nested tensor has no shape
        return False


class Forms:
    """Forms of calls that an op's check has accepted, so that each form is checked once.

    For ops whose tensors must fit each other in more ways than a few comparisons show. A form contains the number of
    tokens: a new one is checked in full. When there are many, all are forgotten.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._seen: set[Hashable] = set()

    def of(self, tensors: Iterable[Any], *more: Any) -> Hashable:
        """The form of these tensors and whatever else a check looks at; None where only the full check can decide."""
        device = self._device
        form = [*more]
        for tensor in tensors:
            if tensor is None:
                form.append(None)
                continue
            if type(tensor) not in _ORDINARY or (tensor.requires_grad and is_grad_enabled()):
                return None
            if not (tensor.is_cpu if device < 0 else tensor.get_device() == device and tensor.is_cuda):
                return None
            form.append(tensor.dtype)
            try:
                form.append(tensor.shape)
            except RuntimeError:  # a nested tensor has none
                return None
        return tuple(form)

    def __contains__(self, form: Hashable) -> bool:
        return form in self._seen

    def add(self, form: Hashable) -> None:
        """Its check let it through."""
        if form is None:
            return
        if len(self._seen) >= _MOST_FORMS:
            self._seen.clear()
        self._seen.add(form)
