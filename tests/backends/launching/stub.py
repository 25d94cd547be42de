"""A CUDA driver for machines without a GPU: Triton compiles and loads kernels for it, and launches are noted.

Run in a process of its own, without TRITON_INTERPRET: `install` sets Triton's driver.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from kernelhub.runtime import launch

_HERE = Path(__file__).parent
_MOST = 64
_FUNCTIONS = 256  # whose parameters are known
ROOM = 1 << 16  # bytes of the least memory that streams keep
AS_GRAPHS = int(os.environ.get("SEQUENCES_AS_GRAPHS", "0"))  # every scenario with graphs after so many launches


class _Noted(ctypes.Structure):
    _fields_ = (
        ("numbers", ctypes.c_uint32 * 8),
        ("stream", ctypes.c_uint64),
        ("function", ctypes.c_uint64),
        ("attributes", ctypes.c_uint32 * 4 * 4),
        ("num_parameters", ctypes.c_uint32),
        ("values", ctypes.c_ubyte * 4096),
    )


class Noted(NamedTuple):
    """A launch that the driver received.

    Attributes:
        grid, block: three sizes each.
        shared_bytes: dynamic shared memory.
        stream, function: as they were given.
        attributes: id and the first words of the value of each launch attribute.
        parameters: bytes of each.
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    function: int
    attributes: tuple[tuple[int, ...], ...]
    parameters: tuple[bytes, ...]


class Stub:
    """The stub library, which is loaded as libcuda.so.1."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "libcuda.so.1")
        command = ["gcc", "-O1", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", str(_HERE / "stub.c")]
        subprocess.run([*command, "-o", str(path), "-ldl"], check=True)
        self.folder = path.parent
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._noted = (_Noted * _MOST).in_dll(self.library, "noted")
        self._num = ctypes.c_int.in_dll(self.library, "num_noted")
        self._status = ctypes.c_int.in_dll(self.library, "next_status")
        self._count = ctypes.c_int.in_dll(self.library, "param_count")
        self._sizes = (ctypes.c_int * 256).in_dll(self.library, "param_sizes")
        self._num_known = ctypes.c_int.in_dll(self.library, "num_known")
        self._known = [
            (kind * _FUNCTIONS).in_dll(self.library, name)
            for name, kind in (
                ("known_functions", ctypes.c_uint64),
                ("known_counts", ctypes.c_int),
                ("known_sizes", ctypes.c_int * 256),
            )
        ]
        self.encoded = ctypes.c_int.in_dll(self.library, "num_encoded")
        self.capturing = ctypes.c_int.in_dll(self.library, "capturing")
        self.priority = ctypes.c_int.in_dll(self.library, "stream_priority")
        self.green_context = ctypes.c_uint64.in_dll(self.library, "green_context")
        self.stream_generation = ctypes.c_uint64.in_dll(self.library, "stream_generation")
        self.live_graphs = tuple(ctypes.c_int.in_dll(self.library, name) for name in ("num_graphs", "num_execs"))
        self._graph_calls, self._fail_graph = (
            (ctypes.c_int * 16).in_dll(self.library, name) for name in ("graph_calls", "fail_graph")
        )

    def native(self, **changed: Any) -> launch.Native:
        """The launcher, on this driver."""
        module = under_test() or launch.extension().module
        names = ("cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuStreamIsCapturing")
        functions = [launch.address(getattr(self.library, name)) for name in names]
        return launch.native_of(module, *functions, **changed)

    def expect(self, sizes: list[int]) -> None:
        """The next launched function has parameters of these sizes."""
        self._count.value = len(sizes)
        self._sizes[: len(sizes)] = sizes

    def expect_of(self, function: int, sizes: list[int]) -> None:
        """Launches of this function have parameters of these sizes, whatever others have; see `forget`."""
        functions, counts, all_sizes = self._known
        at = next((at for at in range(self._num_known.value) if functions[at] == function), self._num_known.value)
        functions[at], counts[at] = function, len(sizes)
        all_sizes[at][: len(sizes)] = sizes
        self._num_known.value = max(self._num_known.value, at + 1)

    def forget(self) -> None:
        """All functions that `expect_of` was told."""
        self._num_known.value = 0

    def fail(self, status: int) -> None:
        """The next entry into the driver returns this status."""
        self._status.value = status

    def fail_graph(self, function: str, status: int) -> None:
        """The next entry into this function of graphs returns this status."""
        self._fail_graph[launch.GRAPH_FUNCTIONS.index(function)] = status

    def take_graph_calls(self) -> dict[str, int]:
        """How often each function of graphs was entered since the last time, but for the stream's number."""
        found = dict(zip(launch.GRAPH_FUNCTIONS, self._graph_calls, strict=False))
        self._graph_calls[:] = [0] * len(self._graph_calls)
        return {name: count for name, count in found.items() if count and name != "cuStreamGetId"}

    def take(self) -> list[Noted]:
        """The launches since the last time, oldest first."""
        found = []
        for at in range(max(0, self._num.value - _MOST), self._num.value):
            one, begin, parameters = self._noted[at % _MOST], 0, []
            functions, _, all_sizes = self._known
            known = next((at for at in range(self._num_known.value) if functions[at] == one.function), None)
            for size in (self._sizes if known is None else all_sizes[known])[: one.num_parameters]:
                parameters.append(bytes(one.values[begin : begin + size]))
                begin += size
            attributes = tuple(tuple(words) for words in one.attributes[: one.numbers[7]])
            numbers = tuple(one.numbers)
            found.append(
                Noted(numbers[:3], numbers[3:6], numbers[6], one.stream, one.function, attributes, tuple(parameters))
            )
        self._num.value = 0
        return found


def under_test() -> Any:
    """The extension that LAUNCHER_UNDER_TEST names, e.g. one built with sanitizers."""
    path = os.environ.get("LAUNCHER_UNDER_TEST")
    if path is None:
        return None
    loader = importlib.machinery.ExtensionFileLoader("_launch", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_launch", loader))
    loader.exec_module(module)
    return module


class Memory:
    """What temporaries get; `live` is what was not given back, but the `rooms` that streams keep."""

    live: ClassVar[dict[int, tuple[torch.Tensor, int]]] = {}
    rooms: ClassVar[dict[int, tuple[torch.Tensor, int]]] = {}

    allocating: ClassVar[Any] = None  # what is called instead once

    @classmethod
    def allocate(cls, size: int, stream: int) -> int:
        if cls.allocating is not None:
            return int(cls.allocating(size, stream))
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        kept = cls.rooms if size >= ROOM else cls.live
        kept[memory.data_ptr()] = memory, stream
        return memory.data_ptr()

    @classmethod
    def release(cls, address: int) -> None:
        del (cls.live if address in cls.live else cls.rooms)[address]


class OneDevice:
    """Device 0 is current, with stream 77; a stream of another device is 77 and its number."""

    current = 0
    counted: ClassVar[dict[tuple[int, int], torch.Tensor]] = {}

    @classmethod
    def counters_of(cls, device: int, stream: int) -> int:
        kept = cls.counted.setdefault((device, stream), torch.zeros(64, dtype=torch.int32, device="cpu"))
        return kept.data_ptr()

    @staticmethod
    def stream_of(device: int) -> int:
        return 77 + device


def install(stub: Stub, capability: int = 90) -> None:
    """Make Triton and the launcher use the stub, as if there were a GPU of this capability."""
    os.environ["TRITON_LIBCUDA_PATH"] = str(stub.folder)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import GPUDriver
    from triton.backends.nvidia import driver as nvidia

    class Driver(GPUDriver):
        def __init__(self) -> None:
            self.utils = nvidia.CudaUtils()
            self.launcher_cls = nvidia.CudaLauncher
            self.get_current_stream = OneDevice.stream_of
            self.get_current_device = lambda: OneDevice.current

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def is_active(self) -> bool:
            return True

        def map_python_to_cpp_type(self, kind: str) -> str:
            return nvidia.ty_to_cpp(kind)

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    triton.runtime.driver.set_active(Driver())
    torch.cuda.current_device = lambda: OneDevice.current
    install_launcher(stub)


def perform(scenarios: Sequence[Callable[[Stub], None]], names: Sequence[str]) -> None:
    """Run scenarios of these names, or all, on a stub of theirs."""
    stub = Stub()
    install(stub)
    for scenario in scenarios:
        if not names or scenario.__name__ in names:
            stub.expect([])
            scenario(stub)
            stub.forget()
            print("passed", scenario.__name__, flush=True)


def install_launcher(stub: Stub, graph_after: int = 0, least: int = 2, shared: bool = False, **changed: Any) -> None:
    """A launcher on the stub, with memory of the CPU for temporaries; graphs after so many launches, if not 0.

    `changed` are other arguments of the `Driver`.
    """
    after = graph_after or AS_GRAPHS
    graphs = launch.as_graphs(stub.library, after, least, shared or AS_GRAPHS > 0) if after else {}
    native = stub.native(
        **graphs,
        stream_of=lambda device: OneDevice.stream_of(device),
        current=lambda: OneDevice.current,
        allocate=Memory.allocate,
        release=Memory.release,
        counters=OneDevice.counters_of,
        **changed,
    )
    launch.native = lambda: native


def number(kind: str, value: bytes) -> Any:
    """A parameter's value, `kind` as of `struct`."""
    return struct.unpack("<" + kind, value)[0]


def addresses_of(launch: Noted) -> set[int]:
    """The parameters of a launch that may be addresses: those of 8 bytes."""
    return {number("Q", value) for value in launch.parameters if len(value) == 8}
