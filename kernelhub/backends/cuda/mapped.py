"""Launches of kernels that TMA feeds: descriptors beside their other parameters, and dynamic shared memory.

A kernel's parameters are those of its arguments in order: a descriptor is a tensor map and, as the launcher of
`csrc/launch` passes it, the sizes and strides of its tensor.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.backends.cuda.library import LaunchError, Library, in_context, step_of
from kernelhub.backends.shared.launches import WATCHED, Launch, Step
from kernelhub.ops.graph_memory import captures
from kernelhub.ops.operands import check_eager
from kernelhub.runtime import launch

_UINT8, _FLOAT32, _BFLOAT16 = 0, 7, 9  # of the driver's CUtensorMapDataType
_SWIZZLE_128 = 3  # of its CUtensorMapSwizzle
_ITEMS = {_UINT8: 1, _FLOAT32: 4, _BFLOAT16: 2}  # bytes
_MAP_BYTES = 128
_SIZES = {"P": "Q", "q": "q", "i": "i", "f": "f"}


class Box(NamedTuple):
    """What one copy of TMA moves.

    Attributes:
        shape: rows, and columns of 128 bytes if it is swizzled.
        type: of the driver's CUtensorMapDataType.
        swizzle: of its CUtensorMapSwizzle.
    """

    shape: tuple[int, int]
    type: int = _BFLOAT16
    swizzle: int = _SWIZZLE_128

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return _ITEMS[self.type]


def bytes_box(rows: int, columns: int) -> Box:
    """Of one-byte elements."""
    return Box((rows, columns), _UINT8)


def floats_box(rows: int, columns: int) -> Box:
    """Of float32, in their order."""
    return Box((rows, columns), _FLOAT32, 0)


class Rows(NamedTuple):
    """A descriptor of rows; attributes as the launcher reads them.

    Attributes:
        base: the tensor, which `is_aligned` holds for.
        shape: rows beyond it are read as zeros.
        strides: in elements; the last is 1.
        padding: what is read beyond the shape.
    """

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"


def rows_of(tensor: Tensor) -> Rows:
    """The descriptor of a matrix."""
    return Rows(tensor, tuple(tensor.shape), tensor.stride())


class MappedKernel:
    """One function of a library whose blocks take more shared memory than others. Threads may share it.

    Attributes:
        kinds: of its arguments: T a descriptor, P a tensor, i int32, q int64, f float32.
    """

    def __init__(
        self,
        library: Library,
        name: str,
        kinds: str,
        threads: int,
        shared_bytes: int,
        boxes: Sequence[Box],
        cluster: int = 1,
    ) -> None:
        """`boxes` are those of the descriptors. So many blocks are a cluster; a launch then says how many clusters."""
        self._library, self._name, self.kinds, self._threads = library, name, kinds, threads
        self._shared_bytes, self._boxes, self._cluster = shared_bytes, tuple(boxes), cluster
        assert len(self._boxes) == kinds.count("T")
        self._functions: dict[int, Any] = {}
        self._direct: dict[Hashable, Any] = {}  # the launcher's kernels, or None where it has none
        self._lock = threading.Lock()
        library.will_load(name)

    def __call__(self, blocks: int, *values: Any) -> None:
        """Launch on torch's current stream of the current device."""
        device = torch._C._cuda_getDevice()
        check_eager(self._name)
        if WATCHED.launches is not None:
            WATCHED.launches.append(Launch(self, blocks, device, values))
        direct = self._direct_of(device)
        if direct is None or not direct.launch(blocks, *values):
            self._by_bindings(device, blocks, values)

    def step(self, programs: int, variant: Hashable | None, *arguments: Any) -> Step | None:
        """A launch like one that was made, to be repeated with other tensors; None if it is not to be repeated."""
        return step_of(self._direct.get(variant), self.kinds, programs, arguments)

    def _function_of(self, device: int) -> Any:
        function = self._functions.get(device)
        if function is None:
            function = self._library.function(self._name, device)
            self._library.allow_shared(function, self._shared_bytes)
            self._functions[device] = function
        return function

    def _direct_of(self, device: int) -> Any:
        if device not in self._direct:
            native = launch.native() if launch.in_use() else None
            function = int(self._function_of(device)) if native is not None else 0
            sizes, made = self.sizes_of(self.kinds), None
            if native is not None and launch.parameter_sizes(function, len(sizes) + 1) == sizes:
                made = native.module.Kernel(
                    native.driver,
                    function,
                    self.kinds,
                    self._name,
                    device,
                    self._threads,
                    self._shared_bytes,
                    owner=self._library,
                    maps=tuple((box.swizzle, box.item, box.type, 0, box.shape) for box in self._boxes),
                    cluster=self._cluster,
                    programmatic=launch.CAPTURED_OR_GRAPH if self._library.overlaps else 0,
                )
            self._direct[device] = made
        return self._direct[device]

    @staticmethod
    def sizes_of(kinds: str) -> list[int]:
        """Bytes of each parameter."""
        of_rows = [_MAP_BYTES, 4, 4, 8, 8]
        return [size for kind in kinds for size in (of_rows if kind == "T" else [struct.calcsize(_SIZES[kind])])]

    def _by_bindings(self, device: int, blocks: int, values: Sequence[Any]) -> None:
        library, function = self._library, self._function_of(device)
        parameters: list[bytes] = []
        boxes = iter(self._boxes)
        for kind, value in zip(self.kinds, values, strict=True):
            if kind == "T":
                parameters += [
                    self._encoded(device, value, next(boxes)),
                    *(struct.pack("i", size) for size in value.shape),
                ]
                parameters += [struct.pack("q", stride) for stride in value.strides]
            else:
                number = value.data_ptr() if isinstance(value, Tensor) else value
                parameters.append(struct.pack(_SIZES[kind], number))
        memory = [ctypes.create_string_buffer(one, len(one)) for one in parameters]
        addresses = (ctypes.c_void_p * len(memory))(*map(ctypes.addressof, memory))
        stream = torch._C._cuda_getCurrentRawStream(device)
        overlaps = library.overlaps and captures()
        config = library.config_of(self._cluster, overlaps, blocks, self._threads, stream, self._shared_bytes)
        given = config, function, ctypes.addressof(addresses), 0
        (status,) = in_context(device, library.driver.CUresult, lambda: library.driver.cuLaunchKernelEx(*given))
        if status != library.driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(f"{self._name}: cuLaunchKernelEx gave {status!r} for {blocks} blocks")

    def _encoded(self, device: int, rows: Rows, box: Box) -> bytes:
        """The tensor map of a descriptor."""
        driver = self._library.driver
        of = driver.cuuint64_t, driver.cuuint32_t
        inner_first = [of[0](size) for size in reversed(rows.shape)]
        given = (
            driver.CUtensorMapDataType(box.type),
            len(rows.shape),
            rows.base.data_ptr(),
            inner_first,
            [of[0](rows.strides[0] * box.item)],
            [of[1](size) for size in reversed(box.shape)],
            [of[1](1)] * len(box.shape),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle(box.swizzle),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        status, made = in_context(device, driver.CUresult, lambda: driver.cuTensorMapEncodeTiled(*given))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(f"{self._name}: cuTensorMapEncodeTiled gave {status!r}")
        return ctypes.string_at(int(made.getPtr()), _MAP_BYTES)
