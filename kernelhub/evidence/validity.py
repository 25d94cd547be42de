"""The key of a result: one kernel in its current state, on one device, with these versions.

A reader compares the whole key; any difference makes the result a miss, which names the difference.
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
_MOST_BYTES = 1 << 20  # limit for reading a file; for a larger one, which is not source code, only the size counts


def made_for(device: DeviceFacts) -> Fingerprint:
    """The common key of all results of a device: the device, and versions and files of the common libraries."""
    facts_of_device = {
        name: value for name, value in _everywhere(device).items() if name not in (*_LIBRARIES, "architecture")
    }
    libraries = {f"library {name}": _files_of(name) for name in _LIBRARIES}
    return Fingerprint(device.arch, tuple(sorted({"abi": host_abi(), **facts_of_device, **libraries}.items())))


def name_of(kernel: Kernel) -> str:
    """The name of the document with the result of a kernel."""
    return f"{kernel.op}.{kernel.name}"


def key_of(kernel: Kernel, device: DeviceFacts) -> dict[str, str]:
    """The key of a result of this kernel, as plain values."""
    key = {"format": str(FORMAT), "op": kernel.op, "kernel": kernel.name, **_everywhere(device)}
    registered = HUB.registry.backends.get(kernel.backend)
    library = registered.backend.package if registered is not None and registered.backend is not None else ""
    if library and library not in key:
        key[library] = _version_of_package(library)
    return key | {"record and source": digest_of(kernel)}


def difference(found: Mapping[str, Any], now: Mapping[str, str]) -> str:
    """How a stored key differs from the current one, as a phrase; empty if it does not."""
    names = dict.fromkeys([*now, *found])
    wrong = [f"{name} was {found.get(name)}, is {now.get(name)}" for name in names if found.get(name) != now.get(name)]
    return "; ".join(wrong)


def digest_of(kernel: Kernel) -> str:
    """A digest of the record, and of the sources of its adapter's package."""
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
    """Version of a package and a digest of its files, as first read by this process."""
    return library(package)


@functools.cache
def _version_of_package(package: str) -> str:
    """The versions of the distributions of a package."""
    names = {item.name for item in distributions_of(package)}
    return ", ".join(f"{name} {version_of(name)}" for name in sorted(names)) or "none"


@functools.cache
def _digest_of_sources(module: str) -> str:
    """Digest of all files of one of our backends, whose adapters share code, or of the files beside another module."""
    digest = hashlib.sha256()
    for path in _sources(module):
        try:
            size = path.stat().st_size
            content = path.read_bytes() if size <= _MOST_BYTES else b""
        except FileNotFoundError:  # an editor's temporary file
            continue
        digest.update(f"{path.name} {size}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _sources(module: str) -> list[Path]:
    """All files below the folder of one of our backends; for another module, the files beside it in its package.

    Bytecode is left out. Other processes write it, first under a temporary name.
    """
    origin = _origin(module)
    if origin is None or not origin.is_file():
        return []
    if "." not in module:
        return [origin]
    found = origin.parent.rglob("*") if module.startswith("kernelhub.backends.") else origin.parent.glob("*")
    return sorted(path for path in found if path.is_file() and path.parent.name != "__pycache__")


def _origin(name: str) -> Path | None:
    """The file of a module; only its parent packages are imported."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return None if file is None else Path(file)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return None if spec is None or not spec.origin else Path(spec.origin)
