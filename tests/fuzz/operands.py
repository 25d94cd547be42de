"""The tensors of a call, by name, also those in lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    """Every tensor by its name; ``"outs[1]"`` in a list."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, list):
            found |= {f"{name}[{at}]": part for at, part in enumerate(value) if isinstance(part, Tensor)}
    return found


def replaced(arguments: Arguments, name: str, tensor: Any) -> Arguments:
    """The arguments with one of them in another's place."""
    if "[" not in name:
        return arguments | {name: tensor}
    parameter, at = name[:-1].split("[")
    parts = list(arguments[parameter])
    parts[int(at)] = tensor
    return arguments | {parameter: parts}


def parameter_of(name: str) -> str:
    """``"outs"`` for ``"outs[1]"``."""
    return name.partition("[")[0].partition(" ")[0]


def described(arguments: Arguments) -> str:
    """What a person needs to see of a call: dtypes, shapes, strides and offsets."""
    lines = []
    for name, value in arguments.items():
        for at, part in enumerate(value if isinstance(value, list | tuple) else [value]):
            label = f"{name}[{at}]" if isinstance(value, list | tuple) else name
            lines.append(f"  {label} = {_text(part)}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:120]
    text = f"{str(value.dtype)[6:]} {list(value.shape)} on {value.device}"
    if value.layout is not torch.strided or value.is_nested:
        return f"{text} {value.layout}"
    if not value.is_contiguous() or value.is_meta:
        text += f", strides {value.stride()}"
    if not value.is_meta and value.data_ptr() % 16:
        text += f", {value.data_ptr() % 16} bytes past a multiple of 16"
    for bit in ("is_neg", "is_conj", "requires_grad", "is_inference"):
        flag = getattr(value, bit)
        text += f", {bit}" * bool(flag() if callable(flag) else flag)
    if not value.dtype.is_floating_point and value.numel() <= 40 and not value.is_meta:
        text += f" = {value.tolist()}"
    return text
