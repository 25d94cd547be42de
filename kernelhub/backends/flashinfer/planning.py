"""Wrappers of FlashInfer, lent to one engine step at a time.

A wrapper holds the plan of one step: its tables on the device, a copy of them in pinned memory, and scratch. So a
step has a wrapper to itself until it is forgotten. Then another step takes it, on the same stream, where what the
first one launched has its place before; and only once the copy from pinned memory is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

RECOMMENDED_BYTES = 128 << 20  # what the library recommends for the scratch of split keys
TABLES_BYTES = 8 << 20  # of a wrapper on the device, and as many in pinned memory
_MOST_BYTES = 2 << 30
_MOST_WRAPPERS = 16  # of an adapter on a stream

_scratch: dict[tuple[str, int, int], Tensor] = {}


def stream_of(device: torch.device) -> int:
    """The stream that work is put on now."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def workspace(family: str, device: torch.device, stream: int, num_bytes: int = RECOMMENDED_BYTES) -> Tensor:
    """Scratch of a family of kernels on a stream, zero at first, since some keep semaphores in it.

    Kernels on a stream run one after the other, so all of them may share it.
    """
    key = (family, -1 if device.index is None else device.index, stream)
    have = _scratch.get(key)
    if have is None or have.numel() < num_bytes:
        have = _scratch[key] = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return have


class _Wrapper:
    """A wrapper of the library, and when its last plan has reached the device."""

    def __init__(self, made: Any, num_bytes: int, device: torch.device) -> None:
        self.made = made
        self.num_bytes = num_bytes
        self.copied = torch.cuda.Event() if device.type == "cuda" else None


class Lease:
    """A planned wrapper that belongs to one step, and goes back when the step is forgotten."""

    __slots__ = ("_idle", "_wrapper", "run")

    def __init__(self, wrapper: _Wrapper, idle: list[_Wrapper]) -> None:
        self._wrapper = wrapper
        self._idle = idle
        self.run: Callable[..., Any] = wrapper.made.run

    def __del__(self) -> None:
        self._idle.append(self._wrapper)


class Pool:
    """The wrappers of one adapter.

    Args:
        make: a wrapper of the library, given scratch.
    """

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self._make = make
        self._idle: dict[tuple[torch.device, int], list[_Wrapper]] = {}
        self._count: dict[tuple[torch.device, int], int] = {}
        self._num_bytes = RECOMMENDED_BYTES

    def plan(self, device: torch.device, stream: int, fill: Callable[[Any], None]) -> Lease:
        """A wrapper that `fill` has planned on the stream that is current.

        Scratch that is too small, which the library says when it plans, is made larger.
        """
        while True:
            wrapper = self._take(device, stream)
            try:
                fill(wrapper.made)
            except Exception as error:
                if "workspace buffer size" not in str(error) or wrapper.num_bytes >= _MOST_BYTES:
                    self._idle[device, stream].append(wrapper)
                    raise
                self._num_bytes = max(self._num_bytes, 2 * wrapper.num_bytes)
                self._count[device, stream] -= 1
                continue
            if wrapper.copied is not None:
                wrapper.copied.record(torch.cuda.current_stream(device))
            return Lease(wrapper, self._idle[device, stream])

    def _take(self, device: torch.device, stream: int) -> _Wrapper:
        """One whose last plan was copied; a new one; or, where there are very many, the oldest once it is copied."""
        key = (device, stream)
        idle = self._idle.setdefault(key, [])
        for place, wrapper in enumerate(idle):
            if wrapper.copied is None or wrapper.copied.query():
                return idle.pop(place)
        if idle and self._count[key] >= _MOST_WRAPPERS:
            oldest = idle.pop(0)
            assert oldest.copied is not None
            oldest.copied.synchronize()
            return oldest
        self._count[key] = self._count.get(key, 0) + 1
        num_bytes = self._num_bytes
        return _Wrapper(self._make(workspace("wrappers", device, stream, num_bytes)), num_bytes, device)
