"""The child process of `peers`: it tests peer access between the GPUs that its arguments name, and prints JSON.

It uses the driver alone, by ctypes, and kernels in PTX, so that it needs neither torch nor a compiler. It is run as a
file, and imports nothing of kernelhub.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

_WORDS = 1 << 16
_BLOCKS, _THREADS = 64, 256
_ADDS = 64  # of each thread
_P2P_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_NVML_CAPS_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_PTX = b"""
.version 6.3
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 to, .param .u32 seed, .param .u32 words) {
  .reg .pred %p; .reg .u32 %r<8>; .reg .u64 %d<4>;
  ld.param.u64 %d0, [to]; ld.param.u32 %r0, [seed]; ld.param.u32 %r1, [words];
  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.u32 %r5, %r2, %r3, %r4;
  mov.u32 %r6, %nctaid.x; mul.lo.u32 %r6, %r6, %r3;
LOOP: setp.ge.u32 %p, %r5, %r1; @%p bra END;
  add.u32 %r7, %r5, %r0; mul.wide.u32 %d1, %r5, 4; add.u64 %d1, %d0, %d1; st.relaxed.sys.global.u32 [%d1], %r7;
  add.u32 %r5, %r5, %r6; bra LOOP;
END: fence.acq_rel.sys; ret;
}
.visible .entry fetch(.param .u64 to, .param .u64 from, .param .u32 words) {
  .reg .pred %p; .reg .u32 %r<8>; .reg .u64 %d<5>;
  ld.param.u64 %d0, [to]; ld.param.u64 %d1, [from]; ld.param.u32 %r1, [words];
  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.u32 %r5, %r2, %r3, %r4;
  mov.u32 %r6, %nctaid.x; mul.lo.u32 %r6, %r6, %r3;
LOOP: setp.ge.u32 %p, %r5, %r1; @%p bra END;
  mul.wide.u32 %d2, %r5, 4; add.u64 %d3, %d1, %d2; add.u64 %d4, %d0, %d2;
  ld.relaxed.sys.global.u32 %r7, [%d3]; st.relaxed.sys.global.u32 [%d4], %r7;
  add.u32 %r5, %r5, %r6; bra LOOP;
END: fence.acq_rel.sys; ret;
}
.visible .entry count(.param .u64 at, .param .u32 times) {
  .reg .pred %p; .reg .u32 %r<3>; .reg .u64 %d<2>;
  ld.param.u64 %d0, [at]; ld.param.u32 %r0, [times]; mov.u32 %r1, 0;
LOOP: setp.ge.u32 %p, %r1, %r0; @%p bra END;
  red.relaxed.sys.global.add.u32 [%d0], 1; add.u32 %r1, %r1, 1; bra LOOP;
END: ret;
}
"""


class DriverError(Exception):
    """A call of the driver failed."""


class Driver:
    """The driver's functions; each raises `DriverError` with the name of the error."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> None:
            status = function(*arguments)
            if status:
                text = ctypes.c_char_p()
                self._library.cuGetErrorName(status, ctypes.byref(text))
                raise DriverError(f"{name}: {(text.value or b'unknown error').decode()}")

        return call


class Gpu:
    """One GPU with a context, its kernels and two buffers."""

    def __init__(self, driver: Driver, index: int) -> None:
        self.driver, self.device = driver, ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(self.device), index)
        self.context = ctypes.c_void_p()
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), self.device)
        self.enter()
        module = ctypes.c_void_p()
        driver.cuModuleLoadData(ctypes.byref(module), _PTX)
        self.kernels = {}
        for name in ("fill", "fetch", "count"):
            kernel = ctypes.c_void_p()
            driver.cuModuleGetFunction(ctypes.byref(kernel), module, name.encode())
            self.kernels[name] = kernel
        self.memory, self.second = ctypes.c_uint64(), ctypes.c_uint64()
        for buffer in (self.memory, self.second):
            driver.cuMemAlloc_v2(ctypes.byref(buffer), ctypes.c_size_t(_WORDS * 4))

    def enter(self) -> None:
        self.driver.cuCtxSetCurrent(self.context)

    def launch(self, name: str, *arguments: Any) -> None:
        self.enter()
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        sizes = (_BLOCKS, 1, 1, _THREADS, 1, 1, 0)
        self.driver.cuLaunchKernel(self.kernels[name], *sizes, None, addresses, None)

    def wait(self) -> None:
        self.enter()
        self.driver.cuCtxSynchronize()

    def clear(self, buffer: ctypes.c_uint64) -> None:
        self.enter()
        self.driver.cuMemsetD32_v2(buffer, 0, ctypes.c_size_t(_WORDS))
        self.wait()

    def values(self, buffer: ctypes.c_uint64) -> Any:
        self.enter()
        host = (ctypes.c_uint32 * _WORDS)()
        self.driver.cuMemcpyDtoH_v2(host, buffer, ctypes.c_size_t(_WORDS * 4))
        return host


def tested(source: Gpu, target: Gpu, place: int) -> tuple[bool, bool, str]:
    """Whether writes and reads work, whether atomics do, and what failed."""
    driver, able = source.driver, ctypes.c_int()
    driver.cuDeviceCanAccessPeer(ctypes.byref(able), source.device, target.device)
    if not able.value:
        return False, False, "the driver has no peer access"
    source.enter()
    try:
        driver.cuCtxEnablePeerAccess(target.context, 0)
        words, seed = ctypes.c_uint32(_WORDS), ctypes.c_uint32(1000 * place + 17)
        want = [seed.value + word for word in range(_WORDS)]
        target.clear(target.memory)
        source.launch("fill", target.memory, seed, words)
        source.wait()
        if list(target.values(target.memory)) != want:
            return False, False, "written values did not arrive"
        source.clear(source.second)
        source.launch("fetch", source.second, target.memory, words)
        source.wait()
        if list(source.values(source.second)) != want:
            return False, False, "read values are wrong"
        native = ctypes.c_int()
        driver.cuDeviceGetP2PAttribute(ctypes.byref(native), _P2P_NATIVE_ATOMICS, source.device, target.device)
        if not native.value:
            return True, False, "the driver has no atomics between the GPUs"
        target.clear(target.memory)
        times = ctypes.c_uint32(_ADDS)
        for gpu in (source, target):
            gpu.launch("count", target.memory, times)
        for gpu in (source, target):
            gpu.wait()
        found, wanted = target.values(target.memory)[0], 2 * _BLOCKS * _THREADS * _ADDS
        if found != wanted:
            return True, False, f"atomic additions of both GPUs gave {found}, not {wanted}"
    except DriverError as error:
        return False, False, str(error)
    return True, True, ""


def nvlink(first: str, second: str) -> bool:
    """Whether NVML says that NVLink connects two GPUs."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    if library.nvmlInit_v2():
        return False
    handles = []
    for uuid in (first, second):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return False
        handles.append(handle)
    status = ctypes.c_int(-1)
    failed = library.nvmlDeviceGetP2PStatus(handles[0], handles[1], _NVML_CAPS_NVLINK, ctypes.byref(status))
    return not failed and status.value == 0


def probe(uuids: list[str]) -> dict[str, Any]:
    """What `peers.PeerFacts.from_plain` takes."""
    driver, count = Driver(), ctypes.c_int()
    driver.cuInit(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    if count.value != len(uuids):
        return {"pairs": [], "failure": f"{count.value} of {len(uuids)} GPUs are visible to one process"}
    gpus = [Gpu(driver, index) for index in range(len(uuids))]
    pairs = []
    for source, one in enumerate(gpus):
        for target, other in enumerate(gpus):
            if source != target:
                works, atomics, why = tested(one, other, source * len(gpus) + target)
                pair = {"source": source, "target": target, "works": works, "atomics": atomics, "why": why}
                pairs.append({**pair, "nvlink": works and nvlink(uuids[source], uuids[target])})
    return {"pairs": pairs, "failure": ""}


if __name__ == "__main__":
    try:
        answer = probe(sys.argv[1:])
    except (OSError, AttributeError, DriverError) as error:
        answer = {"pairs": [], "failure": f"the driver cannot be used: {error}"}
    print(json.dumps(answer))
