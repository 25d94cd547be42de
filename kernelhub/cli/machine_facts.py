"""Facts of `doctor` about the machine: Python, torch, devices, driver, compilers, packages, caches.

This module imports no part of kernelhub that needs torch, so that it can report a broken torch.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kernelhub.cli.fact import ABSENT, NOTE, OK, PROBLEM, Fact
from kernelhub.probes import here
from kernelhub.probes.cache import open_to_others, triton_cache_folder, writable
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.distributions import broken, distribution
from kernelhub.probes.finding import Finding
from kernelhub.probes.package import folders, package
from kernelhub.probes.reading import Unreadable
from kernelhub.probes.toolchain import c_compiler, cpu_kernels, cxx_compiler, driver, nvcc, python_headers
from kernelhub.probes.torch_build import TorchBuild, torch_build
from kernelhub.runtime import launch
from kernelhub.runtime.caches import known, root
from kernelhub.runtime.caches.notices import CODES

_GET_TORCH = "install a CUDA build of torch, see https://pytorch.org/get-started/locally"


def python() -> Fact:
    """The interpreter, compared with the versions that the package supports."""
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = "".join(_own_metadata().get("requires-python", ()))
    if wanted and version not in SpecifierSet(wanted):
        return Fact(NOTE, f"Python {version}", f"kernelhub is tested with {wanted}", "use a version in that range")
    meaning = "kernelhub is tested with it" if wanted else "kernelhub is not installed, so its range is unknown"
    return Fact(OK, f"Python {version}", meaning)


def torch_package() -> Fact:
    """Whether torch is installed, new enough, and loads.

    Importing torch takes over a second of CPU time. Its libraries load in a tenth of that, and most faults of an import
    already show there. If they do not load, torch is imported for the reason.
    """
    finding = package("torch", str(requirements().get("torch", "")))
    if not finding.ok:
        return Fact(PROBLEM, finding.reason, "every op needs torch", finding.remedy)
    if "torch" not in sys.modules and not _libraries_of_torch_load():
        try:
            importlib.import_module("torch")
        except Exception as error:  # a wheel for another platform fails in many ways
            meaning = f"importing it raised {type(error).__name__}: {error}"
            return Fact(PROBLEM, f"torch {finding.value}", meaning, "reinstall torch for this platform")
    return Fact(OK, f"torch {finding.value}", f"built for {_built_for(torch_build())}")


def devices() -> list[Fact]:
    """Every GPU that torch sees, or why it sees none, and the CPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            gpus = here.gpus()
        except Exception as error:  # a failed GPU raises any error of the driver
            meaning = f"it does not answer: {type(error).__name__}: {error}"
            remedy = "check `nvidia-smi`; hide it with CUDA_VISIBLE_DEVICES"
            return [Fact(PROBLEM, "GPU 0", meaning, remedy), _cpu()]
    if gpus:
        return [*(_gpu(index, device) for index, device in enumerate(gpus)), _cpu()]
    return [_no_gpu("; ".join(str(warning.message).strip() for warning in caught)), _cpu()]


def toolchain() -> Iterator[Fact]:
    """Driver and compilers; some of them matter only with a GPU."""
    found = driver()
    yield _fact(found, "NVIDIA GPUs can be used", "no NVIDIA GPU can be used")
    found = nvcc()
    built = torch_build().cuda
    if found.value is not None and built is not None and found.value.split(".")[0] != built.split(".")[0]:
        meaning = f"torch is built for CUDA {built}; extensions that nvcc compiles for it may not load"
        yield Fact(NOTE, found.reason, meaning, f"point CUDA_HOME at a toolkit of CUDA {built}")
    else:
        yield _fact(found, "CUDA sources can be compiled", "no CUDA sources can be compiled; ready-made kernels run")
    for found in (c_compiler(), python_headers()):
        yield _fact(found, "Triton builds its launcher with it", "Triton kernels cannot be launched on a GPU")
    found = cpu_kernels()
    if found.ok:
        yield _fact(found, "the C++ kernels for this CPU need no compiler", "")
    else:
        yield _fact(cxx_compiler(), "kernels for this CPU are compiled with it", "torch's operators run on this CPU")


def launcher() -> Fact:
    """What launches compiled Triton kernels on a GPU; nothing is built or loaded for the answer."""
    slower = "Triton launches its kernels, some microseconds slower each"
    if not launch.in_use():
        return Fact(NOTE, "launcher: Triton's, by KERNELHUB_DIRECT_LAUNCH=0", slower, "unset KERNELHUB_DIRECT_LAUNCH")
    if launch.prebuilt():
        return Fact(OK, "launcher: prebuilt", "Triton kernels are launched by kernelhub's extension")
    missing = [found for found in (c_compiler(), python_headers()) if not found.ok]
    if launch.source() is None:
        return Fact(NOTE, "launcher: Triton's, since csrc/launch is not installed", slower, "reinstall kernelhub")
    if missing:
        return Fact(NOTE, f"launcher: Triton's, {missing[0].reason}", slower, missing[0].remedy)
    return Fact(OK, "launcher: built at the first launch", "Triton kernels are launched by kernelhub's extension")


def caches() -> list[Fact]:
    """Folders that compilers write to."""
    found = writable(triton_cache_folder(), "TRITON_CACHE_DIR")
    refused = [why for place in root.places()[1:] if (why := place.refused()) is not None]
    return [
        _fact(found, "Triton keeps compiled kernels there", "Triton kernels are not selected on a GPU"),
        *_open_caches(),
        _our_cache(),
        *(Fact(NOTE, f"{code}: {reason}", "nothing in it is read", CODES[code][1]) for code, reason in refused),
    ]


def _open_caches() -> Iterator[Fact]:
    """Folders of libraries in which other users can place files that the libraries would load."""
    for item in known.KNOWN:
        cache = item.read()
        why = open_to_others(cache.path) if cache is not None else ""
        if why:
            remedy = f"chmod -R go-w it if nobody else has written it, or set {item.variable} (kernelhub cache env)"
            yield Fact(NOTE, why, f"{item.name} loads files from there", remedy)


def extras() -> Iterator[Fact]:
    """Packages that kernelhub uses if they are installed."""
    wanted = requirements()
    uses = {"rich": "tables, colours and a progress bar on a terminal", "transformers": "use inside its models"}
    if sys.version_info < (3, 11):
        uses["tomli"] = "config files on Python 3.10"
    for name, use in uses.items():
        found = package(name, str(wanted.get(name, "")))
        if found.code == "package_missing":
            yield Fact(ABSENT, found.reason, f"optional, for {use}", found.remedy)
        else:
            yield _fact(found, f"for {use}", f"optional, for {use}")


def requirements() -> dict[str, SpecifierSet]:
    """Versions that kernelhub requires, by package; empty if its own metadata is missing."""
    lines = _own_metadata().get("requires-dist", [])
    return {item.name: item.specifier for item in map(Requirement, lines) if item.specifier}


def broken_distributions() -> Iterator[Fact]:
    """Installed distributions whose metadata cannot be read, and which are therefore left out."""
    for finding in broken():
        meaning = "it is left out: its packages have no version, and its plugins are not loaded"
        yield Fact(NOTE, finding.reason, f"{finding.code}: {meaning}", finding.remedy)


def _own_metadata() -> dict[str, list[str]]:
    """Headers of kernelhub's metadata; empty if it is not installed."""
    own = distribution("kernelhub")
    try:
        return own.headers() if own is not None else {}
    except Unreadable:
        return {}


def _libraries_of_torch_load() -> bool:
    """Whether torch's native libraries load; False also if they are not found."""
    (folder, *_) = [*folders("torch"), Path()]
    try:
        ctypes.CDLL(str(folder / "lib" / "libtorch_global_deps.so"), mode=os.RTLD_GLOBAL | os.RTLD_LAZY)
        ctypes.CDLL(str(folder / "lib" / "libtorch_python.so"), mode=os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _built_for(build: TorchBuild) -> str:
    if build.hip:
        return f"ROCm {build.hip}"
    return f"CUDA {build.cuda}" if build.cuda else "CPUs only"


def _no_gpu(warning: str) -> Fact:
    """Why torch sees no GPU, as far as is known."""
    if not driver().ok:
        return Fact(NOTE, "no GPU", "kernels run on the CPU")
    build = torch_build()
    if not (build.cuda or build.hip):
        return Fact(NOTE, "a GPU driver, but no GPU for torch", "this torch is built for CPUs only", _GET_TORCH)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    reason = warning or (f"CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else "torch gives no reason")
    remedy = "check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and that the driver is new enough for this torch"
    return Fact(NOTE, "a GPU driver, but no GPU for torch", f"kernels run on the CPU; {reason}", remedy)


def _gpu(index: int, device: DeviceFacts) -> Fact:
    return Fact(
        OK,
        f"GPU {index}: {device}, {device.num_sms} SMs, {here.memory_bytes(index) / 2**30:.0f} GiB",
        _generation(device),
    )


def _generation(device: DeviceFacts) -> str:
    if device.family == "unknown":
        return "no order was measured for this generation; the general orders apply"
    return f"kernels are ordered as for {device.family}"


def _cpu() -> Fact:
    device, threads = here.cpu(), os.environ.get("OMP_NUM_THREADS")
    meaning = f"OMP_NUM_THREADS={threads}" if threads else "torch runs one thread for each physical core"
    return Fact(OK, f"CPU: {device}, {device.num_sms} cores", meaning)


def _our_cache() -> Fact:
    """Where compiled kernels for this CPU are kept, and why not in the preferred folder."""
    ours, wanted = root.best(executable=True), next(iter(root.places()), None)
    meaning = "compiled kernels for this CPU are kept there"
    if not ours.ok:
        return Fact(NOTE, f"{ours.code}: {ours.reason}", "torch's operators run on this CPU", ours.remedy)
    if wanted is None or ours.value == str(wanted.path):
        return Fact(OK, ours.reason, meaning)
    finding = root.judged(wanted, executable=True)
    return Fact(NOTE, ours.reason, f"{meaning}, since {finding.code}: {finding.reason}", finding.remedy)


def _fact(found: Finding, good: str, bad: str) -> Fact:
    """A finding that is at most a note."""
    return Fact(OK, found.reason, good) if found.ok else Fact(NOTE, found.reason, bad, found.remedy)
