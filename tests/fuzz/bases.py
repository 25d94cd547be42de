"""The right calls that a case starts from: drawn at random, or one of the op's own cases."""

from __future__ import annotations

import functools
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.cases import CASES
from kernelhub.ops.case import Case
from tests.fuzz.drawn import DRAWN
from tests.fuzz.operands import Arguments, tensors_of

DEFAULT = "default"  # in place of a kernel: whatever is chosen
_TRIES = 60
_DRAWN = 0.6  # of all, how many are drawn rather than taken from the op's cases


class Base(NamedTuple):
    """A right call, and where it comes from."""

    label: str
    arguments: Arguments


def draw(op: str, kernel: str, device: torch.device, random: Random, most: int) -> Base | None:
    """A call that a kernel says it can answer, with at most so many elements in all; None if none was found."""
    for _ in range(_TRIES):
        if op in DRAWN and random.random() < _DRAWN:
            arguments = DRAWN[op](random, device)
            label = _said(arguments)
        else:
            label = random.choice(_cases(op)).label
            arguments = _made(op, label, device)
        if arguments is None or _elements(arguments) > most:
            continue
        if kernel == DEFAULT or claims(op, kernel, arguments):
            return Base(label, arguments)
    return None


def claims(op: str, kernel: str, arguments: Arguments) -> bool:
    """Whether a kernel's record takes a call."""
    selection = HUB.function(op).explain(**arguments)
    return any(decision.kernel == kernel and decision.accepted for decision in selection.decisions)


@functools.cache
def _cases(op: str) -> tuple[Case, ...]:
    return tuple(CASES[op].cases())


_sizes: dict[tuple[str, str], int] = {}


def _made(op: str, label: str, device: torch.device) -> Arguments | None:
    """The case's arguments, unless it is known to be large."""
    if _sizes.get((op, label), 0) > _LARGE:
        return None
    case = next(case for case in _cases(op) if case.label == label)
    arguments = case.make(device)
    _sizes[op, label] = _elements(arguments)
    return arguments


def _said(arguments: Arguments) -> str:
    """Shapes of the first operands and the options, in short."""
    tensors = [f"{name} {list(tensor.shape)}" for name, tensor in list(tensors_of(arguments).items())[:2]]
    options = [f"{name}={value}" for name, value in arguments.items() if not isinstance(value, Tensor | list)]
    return f"drawn {', '.join(tensors + options)}"


_LARGE = 4_000_000


def _elements(arguments: Arguments) -> int:
    return sum(tensor.numel() for tensor in tensors_of(arguments).values())
