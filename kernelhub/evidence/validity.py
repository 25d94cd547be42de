"""What a result holds for: one kernel, as it is now, on one device, between these versions.

A result is about nothing else. Whoever reads one compares all of it, and what differs makes it a miss, by name.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.distributions import distributions_of
from kernelhub.probes.toolchain import driver
from kernelhub.probes.torch_build import torch_build
from kernelhub.runtime.caches.fingerprint import Fingerprint, host_abi, library, version_of

FORMAT = 1
_LIBRARIES = ("torch", "triton")
_MOST_BYTES = 1 << 20  # of a file that is read; of a larger one, which is no source, only the size counts


def made_for(device: DeviceFacts) -> Fingerprint:
    """What all results of a device hold for: the device, and the versions and files of what every kernel runs on."""
    told = {name: value for name, value in _everywhere(device).items() if name not in (*_LIBRARIES, "architecture")}
    libraries = {f"library {name}": _files_of(name) for name in _LIBRARIES}
    return Fingerprint(device.arch, tuple(sorted({"abi": host_abi(), **told, **libraries}.items())))


def name_of(kernel: Kernel) -> str:
    """The name of the document that holds the result of a kernel."""
    return f"{kernel.op}.{kernel.name}"


def key_of(kernel: Kernel, device: DeviceFacts) -> dict[str, str]:
    """All that a result of this kernel depends on, as plain words."""
    key = {"format": str(FORMAT), "op": kernel.op, "kernel": kernel.name, **_everywhere(device)}
    registered = HUB.registry.backends.get(kernel.backend)
    library = registered.backend.package if registered is not None and registered.backend is not None else ""
    if library and library not in key:
        key[library] = _version_of_package(library)
    return key | {"record and source": digest_of(kernel)}


def difference(found: Mapping[str, Any], now: Mapping[str, str]) -> str:
    """What of a stored key is not as it is now, as a phrase; empty if nothing is."""
    names = dict.fromkeys([*now, *found])
    wrong = [f"{name} was {found.get(name)}, is {now.get(name)}" for name in names if found.get(name) != now.get(name)]
    return "; ".join(wrong)


def digest_of(kernel: Kernel) -> str:
    """A digest of the record, and of the sources of the package that its adapter is in."""
    record = [kernel.op, kernel.name, kernel.target, *sorted(kernel.features), *kernel.layouts, kernel.packs_to]
    record += [str(kernel.deterministic), str(kernel.batch_invariant), str(int(kernel.graph))]
    module = kernel.target.partition(":")[0]
    root = ".".join(module.split(".")[:3]) if module.startswith("kernelhub.backends.") else module
    text = "\n".join([*record, _digest_of_sources(root)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _everywhere(device: DeviceFacts) -> dict[str, str]:
    from kernelhub import __version__

    build = torch_build()
    return {
        "device": device.name,
        "architecture": device.arch,
        "driver": str(driver().value) if device.vendor == "nvidia" else "none",
        "python": platform.python_version(),
        "kernelhub": __version__,
        "torch": version_of("torch"),
        "cuda": str(build.cuda or build.hip or "none"),
        "triton": version_of("triton"),
    }


@functools.cache
def _files_of(package: str) -> str:
    """Version of a package and a digest of its files, as they were at first."""
    return library(package)


@functools.cache
def _version_of_package(package: str) -> str:
    """The versions of the distributions that a package comes from."""
    names = {item.name for item in distributions_of(package)}
    return ", ".join(f"{name} {version_of(name)}" for name in sorted(names)) or "none"


@functools.cache
def _digest_of_sources(module: str) -> str:
    """Of every file of one of our backends, since adapters share code within it, or of those around another module."""
    digest = hashlib.sha256()
    for path in _sources(module):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        digest.update(path.read_bytes() if size <= _MOST_BYTES else b"")
    return digest.hexdigest()


def _sources(module: str) -> list[Path]:
    """Of one of our backends, all below its folder; of another module, those beside it in its package."""
    origin = _origin(module)
    if origin is None or not origin.is_file():
        return []
    if "." not in module:
        return [origin]
    found = origin.parent.rglob("*") if module.startswith("kernelhub.backends.") else origin.parent.glob("*")
    return sorted(path for path in found if path.is_file() and path.suffix != ".pyc")


def _origin(name: str) -> Path | None:
    """The file of a module, without importing more than the packages that it is in."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return None if file is None else Path(file)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return None if spec is None or not spec.origin else Path(spec.origin)
