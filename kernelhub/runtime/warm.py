"""Preparation of one call from its form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernelhub.dispatch import forms
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import ConfigurationError
from kernelhub.ops.packed import PackedWeight


def warm(op: str, *, device: str | torch.device = "cuda", **arguments: Any) -> Selection[Any]:
    """Make a call once, on zeros, so that everything such calls need is decided, compiled and loaded.

    `NotWarmed` prints calls of this function. Run them before `kernelhub.seal()`.

    Args:
        op: name of the op.
        device: device of the operands.
        arguments: arguments of the op. A tensor is a string, ``"bfloat16[8, 32, 128]"``; strides follow as
            ``/(8192, 128, 1)``, elements past a 16-byte boundary as ``@2``; tensors that share memory end in the same
            ``#1``, their ``@`` counted from its start; another device comes first, ``"cpu int32[4]"``, and integer
            values last, ``"int32[3]=0,5,9"``. A packed weight is a mapping of its attributes.

    Returns:
        The selection: the kernel that ran, and why.

    Raises:
        ConfigurationError: kernelhub is sealed, or a name is unknown.
        InvalidArgument: the operands break the op's contract.

    Example:
        >>> import kernelhub
        >>> shape = "float32[1, 32, 4, 64]"
        >>> kernelhub.warm("attention", q=shape, k=shape, v=shape, causal=True, device="cpu").op
        'attention'
    """
    if GATE.sealed:
        raise ConfigurationError("kernelhub is sealed: warm up before seal(), or unseal() first")
    function = HUB.function(op)
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ConfigurationError(f"warm: device is {device!r}; give one of this machine: cuda, cuda:1 or cpu") from None
    call = {name: _packed(value) for name, value in forms.made(arguments, where).items()}
    function(**call)
    backend = call.pop("backend", None)
    selection: Selection[Any] = function.explain(**call, backend=backend)
    return selection


def _packed(value: Any) -> Any:
    """The weight that a mapping describes; any other argument unchanged."""
    if not isinstance(value, Mapping) or "layout" not in value:
        return value
    return PackedWeight(**value)
