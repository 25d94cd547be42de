"""The devices of this machine, read without importing torch, which takes over a second of CPU time.

`/proc/cpuinfo` describes the CPU, and the driver's library describes the GPUs. Where these do not suffice, torch is
imported.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys

from kernelhub.probes.device import DeviceFacts, cpu_flags, cpu_name, facts_of, with_bfloat16
from kernelhub.probes.torch_build import torch_build

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_NUM_SMS, _MAJOR, _MINOR, _SHARED_MEMORY_OPTIN = 16, 75, 76, 97  # of CUdevice_attribute in cuda.h
# What the CPU needs for each capability that torch's kernels are compiled for (aten/src/ATen/native/DispatchStub.cpp).
_CAPABILITIES = {
    "avx512": {"avx512vl", "avx512bw", "avx512dq", "fma"},
    "avx2": {"avx2", "fma"},
}


def gpus() -> tuple[DeviceFacts, ...]:
    """The GPUs that torch can use, by index."""
    found = None if "torch" in sys.modules else _read_gpus()
    if found is not None:
        return found
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(facts_of(index) for index in range(count))


def cpu() -> DeviceFacts:
    """The CPU."""
    capability = None if "torch" in sys.modules else _read_capability()
    if capability is None:
        return facts_of(-1)
    return DeviceFacts(cpu_name(), "cpu", "cpu", with_bfloat16(capability), num_sms=os.cpu_count() or 1)


def memory_bytes(index: int) -> int:
    """Memory of a GPU that `gpus` found."""
    if "torch" not in sys.modules and _read_gpus():
        driver, device, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_size_t()
        if not (
            driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        ):
            return size.value
    import torch

    total: int = torch.cuda.get_device_properties(index).total_memory
    return total


@functools.cache
def _read_capability() -> str | None:
    """`torch.backends.cpu.get_cpu_capability` of an x86 CPU with vector units; None where only torch can report it."""
    if platform.machine() != "x86_64" or "ATEN_CPU_CAPABILITY" in os.environ:
        return None
    return next((name for name, needed in _CAPABILITIES.items() if needed <= cpu_flags()), None)


@functools.cache
def _read_gpus() -> tuple[DeviceFacts, ...] | None:
    """The GPUs that the driver lists; None where only torch can list them."""
    build = torch_build()
    if "torch" in sys.modules or sys.platform != "linux" or build.hip:
        return None
    if build.cuda is None:
        return ()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    number = ctypes.c_int()

    def asked(function: str, *arguments: int) -> int:
        status = getattr(driver, function)(ctypes.byref(number), *arguments)
        if status:
            raise _QueryFailed
        return number.value

    try:
        status = driver.cuInit(0)
        if status == _NO_DEVICE:
            return ()
        if status or asked("cuDriverGetVersion") // 1000 < int(build.cuda.partition(".")[0]):
            return None
        devices = []
        for index in range(asked("cuDeviceGetCount")):
            device = asked("cuDeviceGet", index)
            name = ctypes.create_string_buffer(256)
            if driver.cuDeviceGetName(name, len(name), device):
                return None
            major, minor, num_sms, shared = (
                asked("cuDeviceGetAttribute", attribute, device)
                for attribute in (_MAJOR, _MINOR, _NUM_SMS, _SHARED_MEMORY_OPTIN)
            )
            arch = f"sm_{major}{minor}"
            devices.append(DeviceFacts(name.value.decode(), "cuda", "nvidia", arch, (major, minor), num_sms, shared))
    except (_QueryFailed, AttributeError):
        return None
    return tuple(devices)


class _QueryFailed(Exception):
    """A query of the driver returned an error."""
