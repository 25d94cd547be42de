"""The CUDA driver: its functions, the context of a device, and what an error of it says."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def cuda() -> ctypes.CDLL | None:
    """The CUDA driver; None if there is none, or one before CUDA 12.4."""
    library = _any()
    return library if hasattr(library, "cuLaunchKernelEx") and hasattr(library, "cuFuncGetParamInfo") else None


def enter(device: int) -> None:
    """Make a device's context current in a thread that has not used the device yet."""
    library, context, handle = _any(), ctypes.c_void_p(), ctypes.c_int()
    if library is None:
        return
    for status in (
        library.cuDeviceGet(ctypes.byref(handle), device),
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle),
        library.cuCtxSetCurrent(context),
    ):
        if status != 0:
            raise failed(status, f"the context of device {device}")


@functools.cache
def _any() -> ctypes.CDLL | None:
    """The CUDA driver of whatever version."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def failed(status: int, kernel: str) -> RuntimeError:
    """What a launch raises; `dispatch.lost` reads from its text whether the device is lost."""
    name, text = (_text(function, status) for function in ("cuGetErrorName", "cuGetErrorString"))
    return RuntimeError(f"CUDA error: {text} ({name}, {status}) at the launch of {kernel}")


def _text(function: str, status: int) -> str:
    library, found = _any(), ctypes.c_char_p()
    if library is not None and getattr(library, function)(status, ctypes.byref(found)) == 0 and found.value:
        return found.value.decode()
    return "unknown error"
