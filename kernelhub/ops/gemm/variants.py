"""Calls made from others: an operand scaled, of zeros, left out, with other strides."""

from __future__ import annotations

import torch

from kernelhub.ops.case import Arguments, Make
from kernelhub.ops.formats import E4M3, E8M0


def scaled(make: Make, parameter: str, power: int) -> Make:
    """The scales of an operand times a power of two, within what their format holds."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        scale = arguments[parameter]
        if scale.dtype in (E8M0, torch.uint8):
            raw = scale.view(torch.uint8).int() + power
            scale = raw.clamp(1, 254).to(torch.uint8).view(scale.dtype)
        elif scale.dtype is E4M3:
            scale = (scale.float() * 2.0**power).clamp(max=448.0).to(E4M3)
        else:
            scale = scale * 2.0**power
        return arguments | {parameter: scale}

    return made


def zeroed(make: Make, parameter: str) -> Make:
    """The call with an operand of zeros."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        return arguments | {parameter: torch.zeros_like(arguments[parameter])}

    return made


def omitting(make: Make, parameter: str) -> Make:
    """The call without an operand."""

    def made(device: torch.device) -> Arguments:
        return {name: value for name, value in make(device).items() if name != parameter}

    return made


def transposed(make: Make) -> Make:
    """Matrices and scales with columns next to each other in memory."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        for name in ("a", "b", "a_scale", "b_scale"):
            tensor = arguments[name]
            if tensor is not None and tensor.ndim == 2:
                raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
                arguments[name] = raw.t().contiguous().t().view(tensor.dtype)
        return arguments

    return made
