"""Launches a compiled Triton kernel through the CUDA driver.

Triton's launcher parses each argument on its own and asks the driver about each pointer. Here one call packs all
arguments into memory that is laid out once for a compiled variant, and one call of ``cuLaunchKernelEx`` launches it.

Triton still launches what needs more than parameters: clusters, cooperative grids, scratch memory, hooks of a profiler.
The parameters that the driver reports for the function must be those of the signature. So another release of Triton
with other parameters is launched by Triton, too.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton

from kernelhub.dispatch.hub import HUB

# Formats of scalars in 8 bytes each, by Triton's name of the type.
_SCALARS = {
    "i1": "b7x",
    "i8": "b7x",
    "i16": "h6x",
    "i32": "i4x",
    "i64": "q",
    "u1": "B7x",
    "u8": "B7x",
    "u16": "H6x",
    "u32": "I4x",
    "u64": "Q",
    "fp32": "f4x",
    "fp64": "d",
}
_SIZES = {"1": 1, "8": 1, "16": 2, "32": 4, "64": 8}
_SCRATCH = 2  # pointers that Triton adds to each kernel: global and profile scratch
_ADDRESS = operator.methodcaller("data_ptr")
_WARP = 32

Addresses = Sequence[int]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class Driver(NamedTuple):
    """Functions of the CUDA driver, and of torch.

    Attributes:
        launch: ``cuLaunchKernelEx``.
        parameter: ``cuFuncGetParamInfo``.
        stream_of: the current stream of a device, as a launch takes it.
    """

    launch: Callable[..., int]
    parameter: Callable[..., int]
    stream_of: Callable[[int], int]


@functools.cache
def cuda_driver() -> Driver | None:
    """The driver of this process; None before CUDA 12.4."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return Driver(library.cuLaunchKernelEx, library.cuFuncGetParamInfo, torch._C._cuda_getCurrentRawStream)
    except (OSError, AttributeError):
        return None


class Direct:
    """A compiled variant of a kernel on one device, ready to launch. Threads may share it.

    A thread that finds another one packing arguments is sent to Triton's launcher instead of waiting.
    """

    def __init__(self, compiled: Any, kinds: Sequence[str], device: int, driver: Driver) -> None:
        self._compiled, self._kinds, self._device, self._driver = compiled, kinds, device, driver
        pointers = [at for at, kind in enumerate(kinds) if kind.startswith("*")]
        scalars = [at for at, kind in enumerate(kinds) if kind in _SCALARS]
        self._pointers = pointers
        self._tensors, self._numbers = picker(pointers), picker(scalars)
        pack = struct.Struct("<" + "Q" * len(pointers) + "".join(_SCALARS[kinds[at]] for at in scalars))
        self._pack, self._pack_addresses = pack.pack_into, struct.Struct("<" + "Q" * len(pointers)).pack_into
        self._memory = bytearray(pack.size + 8)  # and one null pointer for scratch
        self._pinned = (ctypes.c_char * len(self._memory)).from_buffer(self._memory)
        begin = ctypes.addressof(self._pinned)
        slots = {at: begin + 8 * slot for slot, at in enumerate((*pointers, *scalars))}
        null = begin + pack.size
        passed = [slots[at] for at in sorted(slots)] + [null] * _SCRATCH
        self._parameters = (ctypes.c_void_p * len(passed))(*passed)
        self._function = ctypes.c_void_p(compiled.function)
        block = _WARP * compiled.metadata.num_warps
        self._config = _Config(0, 1, 1, block, 1, 1, compiled.metadata.shared, None, None, 0)
        self._configured = ctypes.byref(self._config)
        self._lock = threading.Lock()

    def __call__(self, programs: int, arguments: Sequence[Any]) -> bool:
        """Launch on the current stream; False if Triton must launch instead, which names what is wrong."""
        if hooked() or not self._lock.acquire(False):
            return False
        try:
            return self._filled(arguments) and self._launch(programs)
        finally:
            self._lock.release()

    def fixed(self, programs: int, arguments: Sequence[Any]) -> Fixed | None:
        """Launches with these arguments but other tensors in the same places; None if Triton must launch them."""
        copy = Direct(self._compiled, self._kinds, self._device, self._driver)
        return Fixed(copy, programs) if programs and copy._filled(arguments) else None

    def _filled(self, arguments: Sequence[Any]) -> bool:
        """Pack the arguments; False for a number out of its type's range and for a tensor that is None."""
        try:
            self._pack(self._memory, 0, *map(_ADDRESS, self._tensors(arguments)), *self._numbers(arguments))
            return True
        except (struct.error, OverflowError, AttributeError):
            return False

    def _launch(self, programs: int) -> bool:
        if not programs:
            return True
        config = self._config
        config.grid_x, config.stream = programs, self._driver.stream_of(self._device)
        return self._driver.launch(self._configured, self._function, self._parameters, None) == 0


class Fixed:
    """Launches of one variant whose scalars and grid stay the same. Threads may share it.

    Attributes:
        pointers: places of the tensors among the arguments.
        stream_of: the current stream of a device, as a launch takes it.
    """

    def __init__(self, direct: Direct, programs: int) -> None:
        direct._config.grid_x = programs
        self.pointers = tuple(direct._pointers)
        self._direct = direct  # owns the memory
        self._pack, self._memory, self._config = direct._pack_addresses, direct._memory, direct._config
        self._launch, self._lock, self.stream_of = direct._driver.launch, direct._lock, direct._driver.stream_of
        self._given = direct._configured, direct._function, direct._parameters, None

    def __call__(self, stream: int, addresses: Addresses) -> bool:
        """Launch with tensors at these addresses, one for each of `pointers`; False if Triton must launch instead."""
        lock = self._lock
        if not lock.acquire(False):
            return False
        try:
            self._pack(self._memory, 0, *addresses)
            self._config.stream = stream
            return self._launch(*self._given) == 0
        finally:
            lock.release()


def direct_launch(compiled: Any, given: int, driver: Driver | None = None) -> Direct | None:
    """The launch of a compiled variant on the current device, or None if Triton has to launch it.

    Args:
        compiled: Triton's CompiledKernel.
        given: how many arguments are passed; those after them are static.
        driver: by default that of the process.
    """
    if not HUB.settings["KERNELHUB_DIRECT_LAUNCH"]:
        return None
    driver = driver or cuda_driver()
    kinds = [kind if isinstance(kind, str) else "" for kind in compiled.src.signature.values()]
    supported = all(kind == "constexpr" or kind.startswith("*") or kind in _SCALARS for kind in kinds[:given])
    if driver is None or not supported or set(kinds[given:]) - {"constexpr"} or not _plain(compiled.metadata):
        return None
    kinds = kinds[:given]
    sizes = [8 if kind.startswith("*") else _size_of(kind) for kind in kinds if kind != "constexpr"]
    if _sizes_of(compiled.function, driver, len(sizes) + _SCRATCH) != [*sizes, *[8] * _SCRATCH]:
        return None
    return Direct(compiled, kinds, torch.cuda.current_device(), driver)


def hooked() -> bool:
    """Whether a profiler has set hooks, which Triton calls at each launch."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _plain(metadata: Any) -> bool:
    """Whether a launch needs no attribute and no scratch memory."""
    return (
        metadata.target.backend == "cuda"
        and metadata.num_ctas == 1
        and not metadata.launch_cooperative_grid
        and not metadata.launch_pdl
        and not metadata.global_scratch_size
        and not metadata.profile_scratch_size
        and not getattr(metadata, "instrumentation_mode", "")
        and metadata.shared <= 228 * 1024
    )


def _size_of(kind: str) -> int:
    return _SIZES[kind.lstrip("iufp")]


def _sizes_of(function: int, driver: Driver, count: int) -> list[int] | None:
    """Bytes of each parameter of a function, by the driver; None if it has more or fewer than `count`."""
    offset, size, found = ctypes.c_size_t(), ctypes.c_size_t(), []
    for at in range(count + 1):
        status = driver.parameter(ctypes.c_void_p(function), ctypes.c_size_t(at), *map(ctypes.byref, (offset, size)))
        if (status == 0) is (at == count):
            return None
        found.append(size.value)
    return found[:count]


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The items of a sequence at these places, as a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda items: tuple(items[at] for at in places)
