"""Counters that are zero between launches, by which programs of a launch find out which of them is the last.

Each stream has its own: its launches run one after another, and each leaves them zero. A launch that does not come to
its end loses the device, and with it the process's memory there, so none finds other counters.

A CUDA graph may be replayed on any stream, so a launch that is captured gets none. Nor does one on the stream
of each thread, whose number is the same in all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

MOST = 4096  # counters of a stream
PER_THREAD = 2  # CU_STREAM_PER_THREAD
_kept: dict[tuple[int, int], Tensor] = {}


def counters_of(operand: Tensor, count: int) -> Tensor | None:
    """As many zeros for a launch on the current stream of an operand's device; None if it has to do without.

    Each thread of the interpreter, which runs on the CPU, is a stream.
    """
    if type(operand) is not Tensor or count > MOST:
        return None
    device = operand.get_device()
    if device < 0:
        return _of_stream(device, threading.get_ident())
    return None if captures() else _of_stream(device, torch._C._cuda_getCurrentRawStream(device))


def captures() -> bool:
    """Whether the launches of this thread go into a CUDA graph."""
    return _captures is not None and _captures()


def no_counters(operand: Tensor) -> Tensor:
    """What a launch without counters gets."""
    return torch.empty(0, dtype=torch.int32, device=operand.device)


def is_counters(tensor: Tensor) -> bool:
    """Whether a tensor is what `counters_of` gave."""
    return any(tensor is kept for kept in _kept.values())


def address_of_stream(device: int, stream: int) -> int:
    """Where the counters of a stream are; 0 for one that has none."""
    counters = _of_stream(device, stream)
    return 0 if counters is None else counters.data_ptr()


def _of_stream(device: int, stream: int) -> Tensor | None:
    counters = _kept.get((device, stream))
    if counters is None and stream != PER_THREAD:
        with _disable_current_modes():  # no part of the call that is watched
            counters = torch.zeros(MOST, dtype=torch.int32, device="cpu" if device < 0 else f"cuda:{device}")
        _kept[device, stream] = counters
    return counters


_captures: Callable[[], Any] | None = (
    torch.cuda.is_current_stream_capturing if torch.version.cuda or torch.version.hip else None
)
