"""Metadata that contradicts itself or its operands: refused by name where values are looked at, or answered right."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import torch
from torch import Tensor

from kernelhub.evidence.poison import copied
from tests.fuzz.bases import Base
from tests.fuzz.operands import Arguments
from tests.fuzz.outcome import ParsedCall

_VALUES = (-1, -2, 0, 1, 77, 10_000, 0x7FFFFFFF, -0x80000000)


def metadata(op: str, base: Base, random: Random) -> ParsedCall | None:
    """One number of an index is another one."""
    given = {name: _without_nan(name, value) for name, value in copied(base.arguments).items()}
    fit = [
        name
        for name, value in given.items()
        if isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.numel()
    ]
    if not fit or (next(iter(_all(given))).is_cuda and os.environ.get("KERNELHUB_CHECK") != "1"):
        return None  # a check would wait for the device, and there is none
    name = random.choice(fit)
    index = given[name]
    at = tuple(random.randrange(size) for size in index.shape)
    value = random.choice((*_VALUES, int(index[at]) + 1, int(index.flatten()[random.randrange(index.numel())])))
    if int(index[at]) == value:
        return None
    index[at] = value
    asked = ParsedCall(given, copied(given), {}, [], (name,), f"{name}{list(at)} is {value}")
    asked.partners = True
    return asked


def _without_nan(name: str, value: Any) -> Any:
    """Numbers in the slots of a cache and in rows of no sequence, which another number of metadata may make used."""
    if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return torch.where(value.isnan(), 0, value)
    if not name.endswith("_cache") or value is None or value.dtype is torch.uint8:
        return value
    raw = value.view(torch.uint8)
    return torch.where(raw & 0x7F == 0x7F, 0, raw).view(value.dtype)


def _all(arguments: Arguments) -> list[Tensor]:
    return [value for value in arguments.values() if isinstance(value, Tensor)]
