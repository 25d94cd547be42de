"""Compiled kernels on devices: loading, and launches with all parameters packed into one block of memory.

A kernel has one parameter, a struct. The launcher of `csrc/launch` packs its fields, which are placed as so many
parameters would be; without that launcher `struct` and cuda-bindings do. Nothing waits and nothing is allocated, so
that a CUDA graph can capture a launch once the kernel is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from kernelhub.backends.cuda.nvrtc import Constants, compiled
from kernelhub.backends.shared.launches import WATCHED, Launch, Step
from kernelhub.dispatch.work import JOURNAL
from kernelhub.ops.graph_memory import captures
from kernelhub.ops.operands import check_eager
from kernelhub.probes.device import DeviceFacts
from kernelhub.runtime import launch
from kernelhub.runtime.driver import enter

_ALIGNMENT = 8  # of a struct that has an address
_OVERLAP_FROM = (9, 0)
_CAPTURES_FROM = 12030


class LaunchError(RuntimeError):
    """The CUDA driver refused to load or launch a kernel."""


class Kernel:
    """One function of a library, to be launched on any device of its kind. Threads may share it."""

    def __init__(
        self,
        library: Library,
        name: str,
        packing: str,
        cluster: int = 1,
        overlaps: bool = False,
        shared_bytes: int = 0,
        may_be_graph: bool = False,
    ) -> None:
        pack = packing_of(packing)
        self._library, self._name, self._pack, self._kinds = library, name, pack.pack_into, kinds_of(packing)
        self._cluster, self._overlaps = cluster, overlaps
        self._shared_bytes = shared_bytes
        self._programmatic = 0 if not overlaps else launch.CAPTURED_OR_GRAPH if may_be_graph else launch.CAPTURED_ONLY
        self._bytes = -(-pack.size // _ALIGNMENT) * _ALIGNMENT  # of the struct
        self._memory = bytearray(pack.size)
        self._pinned = (ctypes.c_char * pack.size).from_buffer(self._memory)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._pinned))
        self._address = ctypes.addressof(self._parameters)
        self._functions: dict[int, Any] = {}
        self._direct: dict[Hashable, Any] = {}  # the launcher's kernels, or None where it has none
        self._lock = threading.Lock()
        self._launch, self._results = library.driver.cuLaunchKernel, library.driver.CUresult
        self._stream_of, self._current = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

    def __call__(self, device: int, blocks: int, threads: int, *values: Any) -> None:
        """Launch on torch's current stream of a device.

        Args:
            device: index of the device that the operands are on.
            blocks: size of the grid; of a kernel whose blocks are clusters, how many of these.
            threads: threads of a block.
            values: the fields of the parameters, in order: tensors, or 0 for none, and numbers.
        """
        if self._current() != device:
            with torch.cuda.device(device):
                self(device, blocks, threads, *values)
            return
        check_eager(self._name)
        if WATCHED.launches is not None:
            WATCHED.launches.append(Launch(self, blocks, (device, threads), values))
        direct = self._direct_of(device, threads)
        if direct is not None and direct.launch(blocks, *values):
            return
        function, fields = self._function_of(device), addresses_in(values)
        once = functools.partial(self._once, function, device, blocks, threads, fields)
        (status,) = in_context(device, self._results, once)
        if status != self._results.CUDA_SUCCESS:
            raise LaunchError(f"{self._name}: cuLaunchKernel gave {status!r} for {blocks} blocks of {threads} threads")

    def step(self, programs: int, variant: Hashable | None, *arguments: Any) -> Step | None:
        """A launch like one that was made, to be repeated with other tensors; None if it is not to be repeated."""
        return step_of(self._direct.get(variant), self._kinds, programs, arguments)

    def _function_of(self, device: int) -> Any:
        function = self._functions.get(device)
        if function is None:
            function = self._library.function(self._name, device)
            if self._shared_bytes:
                self._library.allow_shared(function, self._shared_bytes)
            self._functions[device] = function
        return function

    def _direct_of(self, device: int, threads: int) -> Any:
        key = (device, threads)
        if key not in self._direct:
            native = launch.native() if launch.in_use() else None
            function = int(self._function_of(device)) if native is not None else 0
            made = None
            if native is not None and launch.parameter_sizes(function, 2) == [self._bytes]:
                owner, cluster = self._library, self._cluster
                made = native.module.Kernel(
                    native.driver,
                    function,
                    self._kinds,
                    self._name,
                    device,
                    threads,
                    self._shared_bytes,
                    owner=owner,
                    cluster=cluster,
                    programmatic=self._programmatic,
                )
            self._direct[key] = made
        return self._direct[key]

    def _once(self, function: Any, device: int, blocks: int, threads: int, values: tuple[Any, ...]) -> Any:
        with self._lock:
            self._pack(self._memory, 0, *values)
            stream = self._stream_of(device)
            overlaps = self._overlaps and captures()
            if self._cluster == 1 and not overlaps:
                shared = self._shared_bytes
                return self._launch(function, blocks, 1, 1, threads, 1, 1, shared, stream, self._address, 0)
            config = self._library.config_of(self._cluster, overlaps, blocks, threads, stream, self._shared_bytes)
            return self._library.driver.cuLaunchKernelEx(config, function, self._address, 0)


def in_context(device: int, results: Any, once: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """The answer of a function of the driver, asked again in the context of a device if this thread has none.

    `torch.cuda.set_device` makes none where the device is the current one already, as device 0 is in each new thread.
    """
    answer = once()
    if answer[0] == results.CUDA_ERROR_INVALID_CONTEXT:
        enter(device)  # nothing was launched
        answer = once()
    return answer


def step_of(direct: Any, kinds: str, programs: int, arguments: tuple[Any, ...]) -> Step | None:
    """A launch of the launcher's kernel `direct` with these arguments, to be repeated with other tensors.

    None if cuda-bindings made it, if an argument is an address without its tensor, or if a tensor may be moved in
    vectors of fewer than 16 bytes: a repeated call checks no other alignment.
    """
    if direct is None or any(isinstance(value, torch.Tensor) and _in_small_vectors(value) for value in arguments):
        return None
    given = zip(kinds, arguments, strict=True)
    if any(kind == "P" and value != 0 for kind, value in given if not isinstance(value, torch.Tensor)):
        return None
    return Step(direct, programs, arguments)


def _in_small_vectors(tensor: torch.Tensor) -> bool:
    """Whether an address that is no multiple of 16 bytes lets two small elements or more be moved at once."""
    address, size = tensor.data_ptr(), tensor.element_size()
    return bool(address & 15) and size < 4 and not address % (2 * size)


def kinds_of(packing: str) -> str:
    """The kind of each field, in the launcher's words: 2P and q are PPq."""
    return "".join(kind * int(count or 1) for count, kind in re.findall(r"(\d*)([a-zA-Z])", packing))


def packing_of(packing: str) -> struct.Struct:
    """What packs the fields, addresses as numbers."""
    return struct.Struct("<" + packing.replace("P", "Q"))


def addresses_in(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The fields of a struct, tensors as their addresses."""
    return tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values)


class Library:
    """A compiled source in the driver's memory; `kernel` gives its functions."""

    def __init__(self, source: str, binary: bytes, overlaps: bool = False) -> None:
        from cuda.bindings import driver

        self.overlaps = overlaps
        self.driver: Any = driver
        self._source, self._binary = source, binary
        self._loaded: Any = None
        self._names: list[str] = []
        self._functions: dict[tuple[int, str], Any] = {}
        self._lock = threading.Lock()

    def will_load(self, name: str) -> None:
        """Load this kernel, too, when the first one is loaded."""
        if name not in self._names:
            self._names.append(name)

    def kernel(
        self, name: str, packing: str, cluster: int = 1, shared_bytes: int = 0, may_be_graph: bool = False
    ) -> Kernel:
        """A kernel by name; `packing` is the struct of its parameters: P tensors, i int32, q int64, Q uint64, f float.

        So many of its blocks are a cluster (sm_90 and later): they run at once, up to 8 on every such GPU. A block
        takes `shared_bytes` of shared memory beside what its source says. With `may_be_graph` the launcher may make
        eager launches a graph of its own, in which none begins before the one before it ends.
        """
        self.will_load(name)
        return Kernel(self, name, packing, cluster, self.overlaps, shared_bytes, may_be_graph)

    def config_of(
        self, cluster: int, overlaps: bool, clusters: int, threads: int, stream: int, shared_bytes: int = 0
    ) -> Any:
        """What `cuLaunchKernelEx` takes for so many clusters of so many blocks."""
        driver = self.driver
        config, attributes = driver.CUlaunchConfig(), []
        config.gridDimX, config.gridDimY, config.gridDimZ = clusters * cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.hStream, config.sharedMemBytes = stream, shared_bytes
        if cluster > 1:
            dimension, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
            dimension.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
            dimension.value = value
            attributes.append(dimension)
        if overlaps:
            follows, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
            follows.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value.programmaticStreamSerializationAllowed = 1
            follows.value = value
            attributes.append(follows)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def function(self, name: str, device: int) -> Any:
        """The function on the current device. The first loads those of all kernels, since other sizes need others."""
        enter(device)
        with self._lock:
            if (device, name) not in self._functions:
                with JOURNAL.doing("load", f"{self._source} {name}", "cuda"):
                    self._load(device)
            return self._functions[device, name]

    def allow_shared(self, function: Any, shared_bytes: int) -> None:
        """Let blocks of a function take so much shared memory, beyond the 48 KB of any."""
        attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        status = self.driver.cuFuncSetAttribute(function, attribute, shared_bytes)
        self._checked(status, f"give {shared_bytes} bytes of shared memory to a block of {self._source}")

    def _load(self, device: int) -> None:
        if self._loaded is None:
            (self._loaded,) = self._checked(
                self.driver.cuLibraryLoadData(self._binary, None, None, 0, None, None, 0), f"load {self._source}"
            )
        for name in self._names:
            (kernel,) = self._checked(self.driver.cuLibraryGetKernel(self._loaded, name.encode()), f"find {name}")
            (self._functions[device, name],) = self._checked(self.driver.cuKernelGetFunction(kernel), f"load {name}")

    def _checked(self, answer: tuple[Any, ...], what: str) -> tuple[Any, ...]:
        status, *results = answer
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(f"the CUDA driver cannot {what}: {status!r}")
        return tuple(results)


@functools.lru_cache(maxsize=256)
def _library(
    source: str, constants: tuple[tuple[str, str | int], ...], capability: tuple[int, int], specific: bool
) -> Library:
    given = dict(constants)
    binary = compiled(source, given, capability, specific=specific)
    return Library(source, binary, overlaps=bool(given.get("OVERLAPS")))


def library(source: str, constants: Constants, device: DeviceFacts, specific: bool = False) -> Library:
    """A source of csrc/cuda with these constants for devices like this one; compiled now if it was not yet.

    `specific`: with the instructions that this architecture alone has, such as those of sm_90a.
    """
    given = {"OVERLAPS": int(overlap(device.capability)), **constants}
    return _library(source, tuple(sorted(given.items())), device.capability, specific)


def overlap(capability: tuple[int, int]) -> bool:
    """Whether blocks of a launch may be placed before the launch before it has ended: from sm_90 on.

    Drivers before CUDA 12.3 cannot capture such launches.
    """
    return capability >= _OVERLAP_FROM and _driver_version() >= _CAPTURES_FROM


@functools.cache
def _driver_version() -> int:
    from cuda.bindings import driver

    status, version = driver.cuDriverGetVersion()
    return int(version) if status == driver.CUresult.CUDA_SUCCESS else 0
