"""Device facts, real or simulated.

Only this module queries the hardware, once per device index. A simulated device is given by name (``"H200"``), by
architecture (``"sm_137"``) or as a `DeviceFacts`; selection can then be explained without the device.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import platform
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceFacts:
    """What selection may read about a device.

    Attributes:
        name: marketing name, for display; no decision reads it.
        type: torch device type, ``"cuda"`` (also ROCm) or ``"cpu"``.
        vendor: ``"nvidia"``, ``"amd"`` or ``"cpu"``.
        arch: ``"sm_90"``, ``"gfx942"`` or the CPU's instruction set: ``"avx2"``, ``"avx512"``,
            ``"avx512_bf16"`` (with products of bfloat16), ``"amx"`` (with AMX BF16).
        capability: compute capability (major, minor); (0, 0) where there is none.
        num_sms: multiprocessors, compute units or physical cores.
        shared_memory_bytes: most shared memory one block may use (opt-in limit); 0 on a CPU.
        simulated: whether the facts come from a table instead of a device.
    """

    name: str
    type: str
    vendor: str
    arch: str
    capability: tuple[int, int] = (0, 0)
    num_sms: int = 0
    shared_memory_bytes: int = 0
    simulated: bool = False

    def __hash__(self) -> int:
        """Computed once: each selection reads it several times."""
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = hash(dataclasses.astuple(self))
            object.__setattr__(self, "_hash", known)
        return known

    def __getstate__(self) -> dict[str, object]:
        """Without the hash, which differs between processes."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def family(self) -> str:
        """Device family, as order lines and tile tables name it: ``"hopper"``, ``"cpu"``, ..."""
        if self.vendor == "nvidia":
            return _NVIDIA_FAMILIES.get(self.capability) or _NVIDIA_GENERATIONS.get(self.capability[0], "unknown")
        if self.vendor == "amd":
            return _AMD_FAMILIES.get(self.arch, "unknown")
        return self.type

    def __str__(self) -> str:
        where = " (simulated)" if self.simulated else ""
        return f"{self.name}, {self.arch}{where}"


_NVIDIA_FAMILIES = {(8, 9): "ada"}
_NVIDIA_GENERATIONS = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell", 11: "thor", 12: "blackwell_rtx"}
_AMD_FAMILIES = {"gfx942": "cdna3", "gfx950": "cdna4"}
FAMILIES = ("cpu", *dict.fromkeys((*_NVIDIA_GENERATIONS.values(), *_NVIDIA_FAMILIES.values(), *_AMD_FAMILIES.values())))

# Most opt-in shared memory per block, by compute capability: "Technical Specifications per Compute
# Capability" of the CUDA C++ Programming Guide. A capability not listed gets the smallest of them.
_SHARED_MEMORY_BYTES = {
    (7, 0): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376,
    (9, 0): 232448, (10, 0): 232448, (10, 3): 232448, (11, 0): 232448, (12, 0): 101376, (12, 1): 101376,
}  # fmt: skip
_SMALLEST_SHARED_MEMORY_BYTES = 98304


def _nvidia(name: str, capability: tuple[int, int], num_sms: int) -> DeviceFacts:
    shared = _SHARED_MEMORY_BYTES.get(capability, _SMALLEST_SHARED_MEMORY_BYTES)
    arch = f"sm_{capability[0]}{capability[1]}"
    return DeviceFacts(name, "cuda", "nvidia", arch, capability, num_sms, shared, simulated=True)


# Multiprocessor counts are those of the vendors' datasheets.
SIMULATED = {
    "A100": _nvidia("NVIDIA A100-SXM4-80GB", (8, 0), 108),
    "L40S": _nvidia("NVIDIA L40S", (8, 9), 142),
    "H100": _nvidia("NVIDIA H100 80GB HBM3", (9, 0), 132),
    "H200": _nvidia("NVIDIA H200", (9, 0), 132),
    "B200": _nvidia("NVIDIA B200", (10, 0), 148),
    "B300": _nvidia("NVIDIA B300", (10, 3), 148),
    "RTX5090": _nvidia("NVIDIA GeForce RTX 5090", (12, 0), 170),
    "MI300X": DeviceFacts("AMD Instinct MI300X", "cuda", "amd", "gfx942", (9, 4), 304, 65536, simulated=True),
    "CPU": DeviceFacts("a CPU", "cpu", "cpu", "cpu", simulated=True),
    "ZEN4": DeviceFacts("a CPU with AVX-512 BF16 and no AMX", "cpu", "cpu", "avx512_bf16", simulated=True),
    "XEON": DeviceFacts("a CPU with AMX", "cpu", "cpu", "amx", simulated=True),
}


# A GPU beside a Grace CPU is of the same architecture as the one that is sold alone, and selects as that.
_WITH_GRACE = {"GH200": "H100", "GB200": "B200", "GB300": "B300"}
_AMD_BY_ARCH = {
    "gfx942": SIMULATED["MI300X"],
    "gfx950": DeviceFacts("a gfx950 GPU", "cuda", "amd", "gfx950", (9, 5), 256, 65536, simulated=True),
}
# Known compute capabilities ("Compute Capabilities" of the CUDA C++ Programming Guide 13.0). Newer capabilities
# than all of these are accepted; any other unlisted capability is a mistake.
_CAPABILITIES = (
    *((7, 0), (7, 2), (7, 5), (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0)),
    *((10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)),
)


def simulated(device: str) -> DeviceFacts:
    """Facts of a device that this machine need not have.

    Args:
        device: a key of `SIMULATED` in any case and spacing (``"rtx 5090"``), a full name as drivers write it
            (``"NVIDIA H100 80GB HBM3"``), or an architecture such as ``"sm_86"``, ``"gfx942"`` or, for a future
            generation, ``"sm_137"``.

    Raises:
        ValueError: the name is none of these; the message lists the known names.
    """
    key = re.sub(r"[\s_-]", "", device).upper()
    product = _product(key) or _by_full_name(device)
    if product is not None:
        return product
    if key.lower() in _AMD_BY_ARCH:
        return _AMD_BY_ARCH[key.lower()]
    arch = re.fullmatch(r"SM(\d{1,2})(\d)[AF]?", key)
    if arch:
        capability = (int(arch[1]), int(arch[2]))
        if capability in _CAPABILITIES or capability[0] > max(_CAPABILITIES)[0]:
            return dataclasses.replace(_nvidia(f"an sm_{arch[1]}{arch[2]} GPU", capability, num_sms=100))
    known = [*SIMULATED, *_WITH_GRACE, *_AMD_BY_ARCH, *(f"sm_{major}{minor}" for major, minor in _CAPABILITIES)]
    by_letters = {re.sub(r"[\s_-]", "", name).upper(): name for name in known}
    close = difflib.get_close_matches(key, by_letters, n=1, cutoff=0.5)
    meant = f" (did you mean {by_letters[close[0]]}?)" if close else ""
    raise ValueError(
        f"unknown device {device!r}{meant}; known: {', '.join(SIMULATED)}, or an architecture such as sm_90 or gfx942"
    )


def _product(key: str) -> DeviceFacts | None:
    alone = _WITH_GRACE.get(key)
    return SIMULATED.get(key) if alone is None else dataclasses.replace(SIMULATED[alone], name=f"NVIDIA {key}")


def _by_full_name(device: str) -> DeviceFacts | None:
    """The product of a full name such as ``"NVIDIA H100 80GB HBM3"``, as drivers write it."""
    vendor, *words = re.split(r"[\s_-]+", device.upper())
    if vendor not in ("NVIDIA", "AMD", "TESLA"):
        return None
    words = [word for word in words if word not in ("GEFORCE", "INSTINCT", "TESLA")]
    for count in (1, 2):
        product = _product("".join(words[:count]))
        if product is not None:
            return product
    return None


@functools.cache
def facts(device: torch.device) -> DeviceFacts:
    """Facts of the device that tensors are on: a torch device with an index, or the CPU."""
    if device.type == "cuda":
        return _cuda_facts(device)
    if device.type == "cpu":
        return _cpu_facts()
    return DeviceFacts(str(device), device.type, device.type, device.type)


def facts_of(index: int) -> DeviceFacts:
    """Facts of a GPU by index, or of the CPU by -1, as `Tensor.get_device` returns it."""
    return facts(_device(index))


@functools.cache
def _device(index: int) -> torch.device:
    import torch

    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


def _cuda_facts(device: torch.device) -> DeviceFacts:
    import torch

    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        return DeviceFacts(
            properties.name,
            "cuda",
            "amd",
            arch,
            capability,
            properties.multi_processor_count,
            shared_memory_bytes=65536,
        )
    shared = getattr(properties, "shared_memory_per_block_optin", None) or _SHARED_MEMORY_BYTES.get(
        capability, _SMALLEST_SHARED_MEMORY_BYTES
    )
    return DeviceFacts(
        properties.name,
        "cuda",
        "nvidia",
        f"sm_{capability[0]}{capability[1]}",
        capability,
        properties.multi_processor_count,
        shared,
    )


def _cpu_facts() -> DeviceFacts:
    import os

    import torch

    arch = with_bfloat16(torch.backends.cpu.get_cpu_capability().lower())
    name = cpu_name()
    return DeviceFacts(name, "cpu", "cpu", arch, num_sms=os.cpu_count() or 1)


def with_bfloat16(arch: str) -> str:
    """The instruction set of the CPU, given the one that torch's kernels are compiled for."""
    if arch != "avx512":
        return arch
    if "amx_bf16" in cpu_flags():
        return "amx"
    return "avx512_bf16" if {"avx512_bf16", "avx512vbmi"} <= cpu_flags() else arch  # as kernelhub_cpu_level() in csrc


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What Linux says that the CPU has; empty where it does not say."""
    try:
        with open("/proc/cpuinfo") as lines:
            flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    except OSError:
        flags = []
    return frozenset(flags)


def cpu_name() -> str:
    """Model name of the CPU."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"
