"""The operators of torch.library behind the ops: what torch.compile, torch.export and fake tensors see of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import check_wants_no_gradient
from kernelhub.ops.operands import check_operand

_LIBRARY = torch.library.Library("kernelhub", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any] | None = None) -> None:
    """Define an operator of the namespace ``kernelhub``.

    Args:
        schema: as of `torch.library.Library.define`, e.g. ``"double(Tensor x) -> Tensor"``.
        run: what it does, on any device.
        fake: gives results of the right shape and dtype for tensors without memory; None if it returns nothing.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, _without_gradient(name), "Autograd", with_keyset=True)
    torch.library.register_fake(f"kernelhub::{name}", fake or _nothing, lib=_LIBRARY)
    torch.library.register_torch_dispatch(f"kernelhub::{name}", NestedTensor, _without_nested(name), lib=_LIBRARY)


def _without_nested(name: str) -> Callable[..., Any]:
    """The operator where it meets a jagged tensor, which is a class of its own in torch: it refuses it by name."""

    def refuse_nested(mode: Any, function: Any, types: Any, arguments: Sequence[Any], named: Any = None) -> NoReturn:
        schema = function._schema.arguments
        given = {argument.name: value for argument, value in zip(schema, arguments, strict=False)} | (named or {})
        for parameter, value in given.items():
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor) and tensor.is_nested:
                    check_operand(name.removesuffix("_out"), parameter, tensor)
        raise NotImplementedError(f"{function} takes no nested tensor: give padded ones, or one with cu_seqlens")

    return refuse_nested


def _without_gradient(name: str) -> Callable[..., Any]:
    """The operator where autograd meets it: it refuses by name what wants a gradient, under torch.compile too.

    Without a formula of its own an operator's result is cut from the graph, and gradients are lost without a word.
    """
    op = name.removesuffix("_out")
    overload = getattr(torch.ops.kernelhub, name).default
    parameters = [argument.name for argument in overload._schema.arguments]

    def refuse_gradients(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        for parameter, argument in zip(parameters, arguments, strict=False):
            for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(tensor, Tensor):
                    check_wants_no_gradient(op, parameter, tensor)
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return refuse_gradients


def names_of(backend: Backend) -> list[str] | None:
    """``backend=`` as an operator takes it."""
    return None if backend is None else [backend] if isinstance(backend, str) else list(backend)


def _nothing(*arguments: Any) -> None:
    return None
