"""The launcher of compiled kernels: the C extension of `csrc/launch`, with the CUDA driver's functions that it enters.

The extension is prebuilt in the wheel, or Triton's build helper compiles it once into Triton's cache, with the C
compiler that Triton itself needs. Where neither works, Triton launches its kernels as ever; `kernelhub doctor` says so.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import logging
import os
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kernelhub.dispatch.hub import HUB, LayersOf
from kernelhub.dispatch.work import JOURNAL
from kernelhub.runtime.driver import cuda, enter, failed

NAME = "kernelhub._launch"
VERSION = 18  # of the extension's interface, as `launch.c` gives it
# Of a kernel's `programmatic`: only where a caller captures, since it takes the host 1.7 us longer elsewhere; and the
# launcher may make such launches a graph of its own, in which none is programmatic.
CAPTURED_ONLY, CAPTURED_OR_GRAPH = 2, 3
# Calls of so many launches or more are launched as CUDA graphs, whose nodes get each call's parameters. Even a graph of
# one kernel takes the host half of a launch and the GPU no more (benchmarks/results/graphs_h200.json).
GRAPH_LEAST = 1
GRAPH_AFTER = 8  # launches of a sequence before it becomes a graph: to make one takes as long as many launches
# As `GraphFunctions` in `cuda_types.h` has them; without a version they would be those of CUDA 11.
GRAPH_FUNCTIONS = (
    "cuGraphCreate",
    "cuGraphAddKernelNode_v2",
    "cuGraphKernelNodeSetAttribute",
    "cuGraphInstantiateWithFlags",
    "cuGraphUpload",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamGetId",
    "cuStreamGetPriority",
    "cuStreamGetGreenCtx",
)
# The counter `MemPool::uid_`, of c10::cuda and in later versions of torch of at::cuda.
_POOLS = (
    ("libc10_cuda.so", "_ZN3c104cuda7MemPool4uid_E"),
    ("libtorch_cuda.so", "_ZN2at4cuda7MemPool4uid_E"),
)
_ROOT = Path(__file__).parent.parent
_SOURCE = Path("csrc", "launch", "launch.c")
_COMPILED_S = 0.1  # reading the cache takes a hundredth of it, a compiler ten times as long

_log = logging.getLogger("kernelhub.launch")


class Extension(NamedTuple):
    """Where the launcher's extension comes from.

    Attributes:
        module: the extension; None if there is none.
        origin: ``"prebuilt"``, ``"built"`` or ``""``.
        reason: why there is none, or why it was not the prebuilt one.
    """

    module: Any
    origin: str
    reason: str


def source() -> Path | None:
    """The extension's source: in the package, or beside it in a checkout."""
    places = (_ROOT / _SOURCE, _ROOT.parent / _SOURCE)
    return next((path for path in places if path.is_file()), None)


def prebuilt() -> bool:
    """Whether the package has the extension; it is not loaded."""
    return importlib.util.find_spec(NAME) is not None


@functools.cache
def extension() -> Extension:
    """The extension, loaded, and built before that if it has to be."""
    reason = ""
    if prebuilt():
        try:
            module = importlib.import_module(NAME)
        except ImportError as error:  # built for another platform
            reason = f"the prebuilt launcher does not load: {error}"
        else:
            if module.VERSION == VERSION:
                return Extension(module, "prebuilt", "")
            reason = f"the prebuilt launcher is of version {module.VERSION}, this kernelhub has {VERSION}"
    module, why = _build()
    reason = "; ".join(filter(None, (reason, why)))
    if module is None:
        _log.warning("Triton launches its kernels, some microseconds slower each: %s", reason)
    return Extension(module, "built" if module is not None else "", reason)


class Native(NamedTuple):
    """The launcher of a process, ready to make kernels.

    Attributes:
        module: the extension, with `Kernel` and `Sequence`.
        driver: its `Driver`, which a `Kernel` takes first.
        allocates: whether a `Sequence` may have temporaries.
        counts: whether a `Sequence` may have the counters of its stream.
    """

    module: Any
    driver: Any
    allocates: bool
    counts: bool


@functools.cache
def native() -> Native | None:
    """The launcher of this process; None if kernels have to be launched otherwise."""
    library = cuda()
    module = None if library is None else extension().module
    if library is None or module is None:
        return None
    functions = library.cuLaunchKernelEx, library.cuTensorMapEncodeTiled, library.cuStreamIsCapturing
    settings = HUB.settings
    after = GRAPH_AFTER if settings["KERNELHUB_LAUNCH_GRAPHS"] else 0
    graphs = as_graphs(library, after, shared=bool(settings["KERNELHUB_COLLECTIVE_GRAPHS"]))
    made = native_of(module, *map(address, functions), **graphs)
    recognise_in_c(made)
    return made


def as_graphs(
    library: ctypes.CDLL, after: int = GRAPH_AFTER, least: int | None = None, shared: bool = False
) -> dict[str, Any]:
    """What a `Driver` takes to number streams, and to launch sequences as graphs; nothing if it cannot.

    Args:
        library: the CUDA driver.
        after: so many launches of a sequence are plain; 0 for all.
        least: a graph has at least so many kernels.
        shared: whether launches over memory of all ranks become graphs, too.
    """
    if not all(hasattr(library, name) for name in GRAPH_FUNCTIONS):
        _log.warning("sequences of launches are not launched as graphs: the CUDA driver is too old")
        return {}
    functions = tuple(address(getattr(library, name)) for name in GRAPH_FUNCTIONS)
    least = GRAPH_LEAST if least is None else least
    return {"graphs": functions, "graph_after": after, "graph_least": least, "graph_shared": shared}


def graph_counts() -> dict[str, int]:
    """Graphs of this process's sequences: how many live, with how many nodes, were made, launched, evicted, refused.

    A sequence of which the driver refused one is launched plainly from then on; `status` is what the driver last said.
    """
    made = native()
    return {} if made is None else dict(made.driver.graph_counts())


def recognise_in_c(native: Native) -> None:
    """Let the extension compare the known calls that are learned from now on, and make whole ones."""
    from torch.autograd import forward_ad  # `kernelhub doctor` asks what is here without torch

    from kernelhub.ops.ready import fresh_of

    def known_of(holds: Any, operands: int, places: Any, apart: Any, same: Any, fresh: int) -> Any:
        if operands > native.module.MAX_OPERANDS:
            return None
        return native.module.Known(native.driver, holds, operands, places, apart, same, fresh=fresh).holds

    def calls_of(learn: Callable[..., Any], contexts_used: list[bool]) -> tuple[Any, Callable[..., Any]]:
        made = native.module.Calls(native.driver, learn, contexts_used, HUB.contexts.get, forward_ad)
        return made, native.module.Call

    HUB.recognise(
        known_of,
        calls_of,
        LayersOf(native.module.Layer, native.module.Layers),
        functools.partial(fresh_of, pools=_pools()),
    )


def native_of(module: Any, launch: int, encode: int, capturing: int = 0, **other: Any) -> Native:
    """A launcher that enters functions at these addresses; `other` are other arguments of the `Driver`."""
    import torch  # `kernelhub doctor` asks what is here without it

    from kernelhub.ops.operands import is_traced

    usual = {
        "tensor": torch._C.TensorBase,
        "data_ptr": torch.empty(0, dtype=torch.uint8, device="cpu").data_ptr,
        "stream_of": getattr(torch._C, "_cuda_getCurrentRawStream", _no_stream),
        "failed": failed,
        "enter": enter,
        "current": getattr(torch._C, "_cuda_getDevice", None),
        "allocate": _allocator() if torch.version.cuda else None,
        "modes": torch._C._len_torch_dispatch_stack,
        "modes_of": _modes_of(),
        "traced": is_traced,
        "keep": None if "allocate" in other else _keeper(),
        "release": None,
        "nested": torch._C.TensorBase.is_nested,
        "counters": _counters_of,
        "runtime": _hooks(),
        "pointer_of": _pointer_of(),
        "usual": _usual(),
    }
    usual |= other
    if "graphs" in other:
        os.register_at_fork(after_in_child=module.after_fork)
    made = module.Driver(launch=launch, encode=encode, capturing=capturing, **usual)
    return Native(module, made, usual["allocate"] is not None, bool(capturing) and usual["counters"] is not None)


def in_use() -> bool:
    """Whether the settings allow it; KERNELHUB_DIRECT_LAUNCH=0 leaves launches to Triton."""
    return bool(HUB.settings["KERNELHUB_DIRECT_LAUNCH"])


def address(function: Any) -> int:
    """The address of a C function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def parameter_sizes(function: int, most: int) -> list[int]:
    """Bytes of each parameter of a CUfunction, by the driver; at most so many."""
    library, found = cuda(), []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for at in range(0 if library is None else most):
        asked = (ctypes.c_void_p(function), ctypes.c_size_t(at), ctypes.byref(offset), ctypes.byref(size))
        if library is None or library.cuFuncGetParamInfo(*asked) != 0:
            break
        found.append(size.value)
    return found


def _build() -> tuple[Any, str]:
    """The extension built by Triton's helper, or read from its cache; else why not."""
    path = source()
    if path is None:
        return None, f"the source {_SOURCE} is not installed"
    try:
        from triton.runtime.build import compile_module_from_src
    except ImportError as error:
        return None, f"Triton does not load: {error}"
    with JOURNAL.doing("load", "kernelhub's launcher", "triton") as doing:
        start = time.perf_counter()
        try:
            module = compile_module_from_src(_whole(path, set()), NAME.rpartition(".")[2])
        except Exception as error:  # no compiler, no headers, a folder that cannot be written: each its own type
            return None, f"it cannot be built: {type(error).__name__}: {error}"
        if time.perf_counter() - start > _COMPILED_S:
            doing.kind = "compile"
    return module, ""


def _whole(path: Path, read: set[str]) -> str:
    """A source with what it includes from its folder, each once: Triton compiles a text, in another folder."""
    read.add(path.name)

    def included(found: re.Match[str]) -> str:
        return "" if found[1] in read else _whole(path.with_name(found[1]), read)

    return re.sub(r'^#include "(.+)"$', included, path.read_text().replace("#pragma once\n", ""), flags=re.MULTILINE)


def _allocator() -> Callable[[int, int], Any]:
    """What allocates temporaries on the current device and stream: a captured call gets them from its graph's pool."""
    import torch

    empty, uint8, cuda = torch.empty, torch.uint8, torch.device("cuda")

    def allocated(size: int, stream: int) -> Any:
        return empty(size, dtype=uint8, device=cuda)

    return allocated


def _keeper() -> Callable[[int, int], Any]:
    """What allocates memory that a stream keeps for later calls; it gives None where that would be a graph's."""
    import torch

    from kernelhub.ops.graph_memory import of_graph

    allocated = _allocator()

    def kept(size: int, stream: int) -> Any:
        return None if of_graph(torch._C._cuda_getDevice()) else allocated(size, stream)

    return kept


def _pointer_of() -> int:
    """The address of the C function by which Inductor's code finds a tensor's memory; 0 in a torch without.

    It takes a tenth of the time of `data_ptr`. It must be called for tensors with memory only.
    """
    import torch

    found: int = getattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr", 0)
    if type(found) is not int or not found:
        return 0
    one = torch.empty(1, dtype=torch.uint8, device="cpu")
    right = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(found)(one) == one.data_ptr()
    return found if right else 0


def _modes_of() -> int:
    """The address of the C++ function that `torch._C._len_torch_dispatch_stack` calls, in a tenth of its time; or 0.

    Its name is that of `c10::impl::TorchDispatchModeTLS::stack_len()`, of a library that torch has loaded.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    try:
        function = ctypes.CDLL("libc10.so", mode=os.RTLD_NOLOAD)._ZN3c104impl20TorchDispatchModeTLS9stack_lenEv
    except (AttributeError, OSError):  # no such library or function
        return 0
    function.restype, function.argtypes = ctypes.c_int64, ()
    before = torch._C._len_torch_dispatch_stack()
    with TorchDispatchMode():
        right = function() == before + 1
    return address(function) if right and function() == before else 0


@functools.cache
def _pools() -> tuple[int, int]:
    """Where torch counts the pools of memory that programs make, and what is there as long as none was made.

    The address is 0 where that cannot be had. Without a pool nothing can be wanted in one (`torch.cuda.use_mem_pool`);
    torch has no function that says whether a thread is in such a block. A graph that is captured without a pool's
    number is counted elsewhere.
    """
    import torch

    for library, name in _POOLS:
        try:
            counter = ctypes.c_uint64.in_dll(ctypes.CDLL(library, mode=os.RTLD_NOLOAD), name)
        except (OSError, ValueError):  # no such library or counter
            continue
        before = counter.value
        number = torch.cuda.graph_pool_handle()[1]  # as that of any pool
        if before == number == 1 and counter.value == 2:
            return ctypes.addressof(counter), 2
    return 0, 0


def _usual() -> tuple[type, int, int] | None:
    """torch's class of tensors, where in one is the address of its C++ object, and with what such an object begins.

    The first word of a C++ object is its class's: the table of virtual functions. None if there is no such place.
    """
    import torch

    def word(address: int) -> int:
        return ctypes.c_uint64.from_address(address).value

    try:
        tensors = [torch.empty(count, dtype=torch.uint8, device="cpu") for count in (1, 2, 3)]
        addresses: list[int] = [one._cdata for one in tensors]
        none = torch.empty(1, 0, dtype=torch.int64, device="cpu")
        with warnings.catch_warnings():  # torch 2.11 warns that the invariants are not checked, though it is told so
            warnings.simplefilter("ignore")
            sparse = torch.sparse_coo_tensor(none, none[0], (1,), device="cpu", check_invariants=False)._cdata
    except (AttributeError, TypeError, RuntimeError):
        return None
    tables = {word(one) for one in addresses}
    for at in range(object.__basicsize__, torch.Tensor.__basicsize__ - 7, 8):
        if [word(id(one) + at) for one in tensors] == addresses:
            return (torch.Tensor, at, tables.pop()) if len(tables) == 1 and word(sparse) not in tables else None
    return None


def _hooks() -> Any:
    """What has the hooks of profilers, which Triton calls at each launch."""
    try:
        import triton
    except ImportError:
        return None
    return triton.knobs.runtime


def _counters_of(device: int, stream: int) -> int:
    """Where the counters of a stream are; 0 for one that has none."""
    from kernelhub.runtime.counters import address_of_stream

    return address_of_stream(device, stream)


def _no_stream(device: int) -> int:
    """A torch without CUDA has no streams but the default one."""
    return 0
