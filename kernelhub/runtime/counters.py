"""Counters that are zero between launches, by which programs of a launch find out which of them is the last.

Each stream has its own: its launches run one after another, and each leaves them zero. A CUDA graph may be replayed on
any stream, and at once with other graphs, so the launches that a capture takes from one stream have their own, too.
Those of a capture are never given to another, since nothing says when a graph is gone. A graph itself never runs twice
at once. (One that is put into another as a child, by CUDA's own functions, is copied, and its copies might: kernelhub
cannot see that.) A launch that does not come to its end loses the device, and with it the process's memory there, so
none finds other counters. A stream that a program destroys while it has work must not be followed by another of the
same handle; torch's streams are never destroyed.

The memory is the driver's, made at the first launch of a device that is not captured. Torch would take it from the pool
of a graph if the launch runs as a warm-up for one, and give it to other tensors later. Where there are no counters (a
capture comes first, all are taken, the stream is that of each thread, whose number is the same in all of them) a
launch has to do without.
"""

from __future__ import annotations

import ctypes
import threading

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kernelhub.ops.graph_memory import captures
from kernelhub.runtime.driver import cuda, enter

MOST = 4096  # counters of a stream
STREAMS = 256  # of a device, those of captures included
PER_THREAD = 2  # CU_STREAM_PER_THREAD
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_Place = tuple[int, int, int]  # device, capture, stream; the capture is 0 for launches that are made at once
_arenas: dict[int, Tensor | None] = {}
_kept: dict[_Place, Tensor] = {}
_lock = threading.Lock()


def counters_of(operand: Tensor, count: int) -> Tensor | None:
    """As many zeros for a launch on the current stream of an operand's device; None if it has to do without.

    Each thread of the interpreter, which runs on the CPU, is a stream.
    """
    if type(operand) is not Tensor or count > MOST:
        return None
    device = operand.get_device()
    if device < 0:
        return _of_stream(device, threading.get_ident())
    stream = torch._C._cuda_getCurrentRawStream(device)
    return _of_capture(device, stream) if captures() else _of_stream(device, stream)


def no_counters(operand: Tensor) -> Tensor:
    """What a launch without counters gets."""
    return torch.empty(0, dtype=torch.int32, device=operand.device)


def is_counters(tensor: Tensor) -> bool:
    """Whether a tensor is what `counters_of` gave."""
    return any(tensor is kept for kept in list(_kept.values()))


def address_of_stream(device: int, stream: int) -> int:
    """Where the counters of a stream are; 0 for one that has none."""
    counters = _of_stream(device, stream)
    return 0 if counters is None else counters.data_ptr()


def _of_stream(device: int, stream: int) -> Tensor | None:
    counters = _kept.get((device, 0, stream))
    if counters is not None or stream == PER_THREAD:
        return counters
    with _lock, _disable_current_modes():  # no part of the call that is watched
        if device not in _arenas:
            _arenas[device] = None if device < 0 else _zeros(device, stream)
        if device < 0:
            return _kept.setdefault((device, 0, stream), torch.zeros(MOST, dtype=torch.int32, device="cpu"))
        return _next((device, 0, stream))


def _of_capture(device: int, stream: int) -> Tensor | None:
    capture = capture_of(stream)
    if not capture:
        return None
    with _lock, _disable_current_modes():
        return _next((device, capture, stream))


def _next(place: _Place) -> Tensor | None:
    """The counters of a place, which are the arena's next ones at first."""
    arena = _arenas.get(place[0])
    if arena is None or place in _kept:
        return _kept.get(place)
    taken = sum(device == place[0] for device, *_ in _kept)
    if taken >= len(arena):
        return None
    _kept[place] = arena[taken]
    return _kept[place]


def _zeros(device: int, stream: int) -> Tensor | None:
    """Counters for all streams of the current device, zero by the time of return."""
    library = cuda()
    if library is None:
        return None
    enter(device)
    address, size = ctypes.c_uint64(), ctypes.c_size_t(4 * MOST * STREAMS)
    mode = ctypes.c_int(_RELAXED)  # another thread may capture
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        on = ctypes.c_void_p(stream)
        if (
            library.cuMemAlloc_v2(ctypes.byref(address), size) != 0
            or library.cuMemsetD8Async(address, ctypes.c_ubyte(0), size, on) != 0
            or library.cuStreamSynchronize(on) != 0
        ):
            return None
    finally:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return torch.as_tensor(_Memory(address.value), dtype=torch.int32, device=f"cuda:{device}")


class _Memory:
    """Memory of the driver, as torch takes it."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (STREAMS, MOST),
            "typestr": "<i4",
            "data": (address, False),
            "version": 3,
        }


def capture_of(stream: int) -> int:
    """The number of the capture that a stream is in; 0 if it is in none, or the driver does not say."""
    library = cuda()
    if library is None or not hasattr(library, "cuStreamGetCaptureInfo_v2"):
        return 0
    status, capture = ctypes.c_int(), ctypes.c_uint64()
    asked = ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(capture), None, None, None
    return capture.value if library.cuStreamGetCaptureInfo_v2(*asked) == 0 and status.value == 1 else 0
