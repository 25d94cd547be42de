"""Compiled kernels on devices: loading, and launches with all parameters packed into one block of memory.

A kernel has one parameter, a struct. A launch packs its values in one call and gives the driver the address. Nothing
waits and nothing is allocated, so that a CUDA graph can capture a launch once the kernel is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

import torch

from kernelhub.backends.cuda.nvrtc import Constants, compiled
from kernelhub.dispatch.work import JOURNAL
from kernelhub.probes.device import DeviceFacts


class LaunchError(RuntimeError):
    """The CUDA driver refused to load or launch a kernel."""


class Kernel:
    """One function of a library, to be launched on any device of its kind. Threads may share it."""

    def __init__(self, library: Library, name: str, packing: str) -> None:
        pack = struct.Struct("<" + packing)
        self._library, self._name, self._pack = library, name, pack.pack_into
        self._memory = bytearray(pack.size)
        self._pinned = (ctypes.c_char * pack.size).from_buffer(self._memory)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._pinned))
        self._address = ctypes.addressof(self._parameters)
        self._functions: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._launch, self._results = library.driver.cuLaunchKernel, library.driver.CUresult
        self._stream_of, self._current = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

    def __call__(self, device: int, blocks: int, threads: int, *values: Any) -> None:
        """Launch on torch's current stream of a device.

        Args:
            device: index of the device that the operands are on.
            blocks: size of the grid.
            threads: threads of a block.
            values: the fields of the parameters, in order.
        """
        if self._current() != device:
            with torch.cuda.device(device):
                self(device, blocks, threads, *values)
            return
        function = self._functions.get(device)
        if function is None:
            function = self._functions[device] = self._library.function(self._name, device)
        status = self._once(function, device, blocks, threads, values)
        if status == self._results.CUDA_ERROR_INVALID_CONTEXT:
            torch.cuda.set_device(device)  # a thread that has not used CUDA has no context; nothing was launched
            status = self._once(function, device, blocks, threads, values)
        if status != self._results.CUDA_SUCCESS:
            raise LaunchError(f"{self._name}: cuLaunchKernel gave {status!r} for {blocks} blocks of {threads} threads")

    def _once(self, function: Any, device: int, blocks: int, threads: int, values: tuple[Any, ...]) -> Any:
        with self._lock:
            self._pack(self._memory, 0, *values)
            return self._launch(function, blocks, 1, 1, threads, 1, 1, 0, self._stream_of(device), self._address, 0)[0]


class Library:
    """A compiled source in the driver's memory; `kernel` gives its functions."""

    def __init__(self, source: str, binary: bytes) -> None:
        from cuda.bindings import driver

        self.driver: Any = driver
        self._source, self._binary = source, binary
        self._loaded: Any = None
        self._lock = threading.Lock()

    def kernel(self, name: str, packing: str) -> Kernel:
        """A kernel by name; `packing` is the struct of its parameters, in the words of Python's `struct`."""
        return Kernel(self, name, packing)

    def function(self, name: str, device: int) -> Any:
        """The function on the current device, loaded now if it was not yet."""
        with self._lock, JOURNAL.doing("load", f"{self._source} {name}", "cuda"):
            torch.cuda.set_device(device)  # makes its context that of this thread
            if self._loaded is None:
                (self._loaded,) = self._checked(
                    self.driver.cuLibraryLoadData(self._binary, None, None, 0, None, None, 0), f"load {self._source}"
                )
            (kernel,) = self._checked(self.driver.cuLibraryGetKernel(self._loaded, name.encode()), f"find {name}")
            (function,) = self._checked(self.driver.cuKernelGetFunction(kernel), f"load {name}")
            return function

    def _checked(self, answer: tuple[Any, ...], what: str) -> tuple[Any, ...]:
        status, *results = answer
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(f"the CUDA driver cannot {what}: {status!r}")
        return tuple(results)


@functools.lru_cache(maxsize=256)
def _library(source: str, constants: tuple[tuple[str, str | int], ...], capability: tuple[int, int]) -> Library:
    return Library(source, compiled(source, dict(constants), capability))


def library(source: str, constants: Constants, device: DeviceFacts) -> Library:
    """A source of csrc/cuda with these constants for devices like this one; compiled now if it was not yet."""
    return _library(source, tuple(sorted(constants.items())), device.capability)
