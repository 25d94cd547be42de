"""The caches of Triton, FlashInfer, DeepGEMM, vLLM and torch's inductor: their folders and the form of their entries.

The layouts are those of their sources of 2025 and 2026. An entry is recognised by its form; if a variable points at
another folder, its contents do not count as entries.
"""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernelhub.probes import document
from kernelhub.probes.document import DocumentError
from kernelhub.probes.package import package
from kernelhub.runtime.caches.inventory import (
    BROKEN,
    CURRENT,
    STALE,
    UNKNOWN,
    Cache,
    CacheItem,
    entries,
    folders,
    unfinished,
    weighed,
)
from kernelhub.runtime.caches.root import absolute, home_folder

_TRITON_KEY = re.compile(r"[A-Z2-7]{52}|[0-9a-f]{64}")
_VERSION = re.compile(r"\d+(\.\d+)+([._+-]?[A-Za-z0-9]+)*")
_BINARIES = (".so", ".cubin", ".hsaco")


@dataclass(frozen=True)
class Known:
    """A library's cache.

    Attributes:
        name: name of the cache.
        package: import name of the library.
        distribution: name of the library on the package index.
        variable: environment variable that moves it.
        where: returns the folder, from the environment; None without a home.
        items: returns its entries, from the folder and the installed version.
    """

    name: str
    package: str
    distribution: str
    variable: str
    where: Callable[[Mapping[str, str]], Path | None]
    items: Callable[[Path, str | None], Iterator[CacheItem]]

    def read(self, environ: Mapping[str, str] | None = None) -> Cache | None:
        """The current cache; None without a folder for it."""
        said = self.where(os.environ if environ is None else environ)
        if said is None:
            return None
        installed = package(self.package, distribution=self.distribution).value
        path = absolute(str(said))
        if path is None:
            problem = f"{self.variable} names {said}, which does not resolve: no such home or working directory"
            return Cache(self.name, said, self.variable, installed, (), problem)
        if path in (Path("/"), home_folder(environ)):
            problem = f"{self.variable} names {path}, which is not a cache"
            return Cache(self.name, path, self.variable, installed, (), problem)
        return Cache(self.name, path, self.variable, installed, weighed(self.items(path, installed)))


def _named(variable: str, *below_home: str) -> Callable[[Mapping[str, str]], Path | None]:
    def where(environ: Mapping[str, str]) -> Path | None:
        home = home_folder(environ)
        if environ.get(variable):
            return Path(os.path.expanduser(environ[variable]))
        return None if home is None else home.joinpath(*below_home)

    return where


def _triton_folder(environ: Mapping[str, str]) -> Path | None:
    if environ.get("TRITON_CACHE_DIR"):
        return Path(environ["TRITON_CACHE_DIR"])
    home = Path(environ["TRITON_HOME"]) if environ.get("TRITON_HOME") else home_folder(environ)
    return None if home is None else home / ".triton" / "cache"


def _flashinfer_folder(environ: Mapping[str, str]) -> Path | None:
    base = environ.get("FLASHINFER_WORKSPACE_BASE") or home_folder(environ)
    return None if base is None else Path(base) / ".cache" / "flashinfer"


def _vllm_folder(environ: Mapping[str, str]) -> Path | None:
    if environ.get("VLLM_CACHE_ROOT"):
        return Path(os.path.expanduser(environ["VLLM_CACHE_ROOT"]))
    base = environ.get("XDG_CACHE_HOME") or home_folder(environ)
    if base is None:
        return None
    return Path(base) / "vllm" if environ.get("XDG_CACHE_HOME") else Path(base) / ".cache" / "vllm"


def _inductor_folder(environ: Mapping[str, str]) -> Path:
    if environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(environ["TORCHINDUCTOR_CACHE_DIR"])
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _triton(path: Path, installed: str | None) -> Iterator[CacheItem]:
    """A folder for each key; the kernel's metadata contains Triton's version."""
    for folder in folders(path):
        if not _TRITON_KEY.fullmatch(folder.name):
            continue
        files = entries(folder)
        empty = _empty_binary(files)
        if all(file.name.startswith("tmp.pid_") for file in files):
            yield unfinished(folder, "its writer was killed before it wrote anything")
        elif empty is not None:
            yield CacheItem(folder, BROKEN, f"{empty.name} is empty")
        else:
            yield _triton_entry(folder, files, installed)


def _triton_entry(folder: Path, files: list[Path], installed: str | None) -> CacheItem:
    version = None
    for file in files:
        if file.suffix != ".json":
            continue
        metadata = _json(file)
        if metadata is None:
            return CacheItem(folder, BROKEN, f"{file.name} is not JSON")
        if file.name.startswith("__grp__"):
            paths = metadata.get("child_paths", {})
            lost = [name for name, path in paths.items() if not os.path.exists(path)] if isinstance(paths, dict) else []
            if lost:
                return CacheItem(folder, BROKEN, f"{file.name} refers to {lost[0]}, which does not exist")
        version = metadata.get("triton_version", version)
    if version is None:
        return CacheItem(folder, UNKNOWN)
    if installed is not None and version != installed:
        return CacheItem(folder, STALE, f"made by Triton {version}, {installed} is installed")
    return CacheItem(folder, CURRENT)


def _flashinfer(path: Path, installed: str | None) -> Iterator[CacheItem]:
    """``<version>/<architectures>/cached_ops/<module>``; the whole folder of a version that is not installed."""
    for version in folders(path):
        if not _VERSION.fullmatch(version.name):
            continue
        if installed is not None and version.name != installed:
            yield CacheItem(version, STALE, f"made by FlashInfer {version.name}, {installed} is installed")
            continue
        for module in (module for arch in folders(version) for module in folders(arch / "cached_ops")):
            if module.name == "tmp":
                continue
            libraries = [file for file in entries(module) if file.suffix == ".so"]
            empty = _empty_binary(libraries)
            if not libraries:
                yield unfinished(module, "an unfinished build: there is no library")
            elif empty is not None:
                yield CacheItem(module, BROKEN, f"{empty.name} is empty")
            else:
                yield CacheItem(module, CURRENT if installed else UNKNOWN)


def _deep_gemm(path: Path, installed: str | None) -> Iterator[CacheItem]:
    """``cache/kernel.<name>.<digest>``; the digest covers source and compiler, so versions do not share entries."""
    for folder in folders(path / "cache"):
        if not folder.name.startswith("kernel."):
            continue
        binaries = [file for file in entries(folder) if file.suffix in _BINARIES]
        empty = _empty_binary(binaries)
        if not binaries:
            yield unfinished(folder, "an unfinished build: there is no cubin")
        elif empty is not None:
            yield CacheItem(folder, BROKEN, f"{empty.name} is empty")
        else:
            yield CacheItem(folder, UNKNOWN)
    for folder in folders(path / "tmp"):
        if re.fullmatch(r"[0-9a-f-]{8,40}", folder.name):
            yield unfinished(folder, "an unfinished build")


def _vllm(path: Path, installed: str | None) -> Iterator[CacheItem]:
    """Compiled graphs by digest, DeepGEMM's kernels, and FlashInfer's tactics by version."""
    graphs = path / "torch_compile_cache"
    for folder in (*folders(graphs), *folders(graphs / "torch_aot_compile")):
        if re.fullmatch(r"[0-9a-f]{10}|[0-9a-f]{64}", folder.name):
            yield CacheItem(folder, UNKNOWN)
    yield from _deep_gemm(path / "deep_gemm", installed)
    flashinfer = package("flashinfer", distribution="flashinfer-python").value
    for version in folders(path / "flashinfer_autotune_cache"):
        if not _VERSION.fullmatch(version.name):
            continue
        if flashinfer is not None and version.name != flashinfer:
            yield CacheItem(version, STALE, f"tuned with FlashInfer {version.name}, {flashinfer} is installed")
        else:
            yield CacheItem(version, CURRENT if flashinfer else UNKNOWN)


def _inductor(path: Path, installed: str | None) -> Iterator[CacheItem]:
    """Sources and libraries in folders named by two letters of their files' names, and results of torch.compile."""
    for folder in folders(path):
        files = entries(folder)
        if re.fullmatch(r"[a-z2-7]{2}", folder.name) and all(file.name[1:3] == folder.name for file in files):
            empty = _empty_binary(files)
            yield CacheItem(folder, UNKNOWN) if empty is None else CacheItem(folder, BROKEN, f"{empty.name} is empty")
    for folder in (entry for letters in folders(path / "fxgraph") for entry in folders(letters)):
        if re.fullmatch(r"f[a-z2-7]{51}", folder.name):
            yield CacheItem(folder, UNKNOWN)
    for folder in folders(path / "aotautograd"):
        if re.fullmatch(r"a[a-z2-7]{51}", folder.name):
            yield CacheItem(folder, UNKNOWN)
    triton = package("triton").value
    for device in folders(path / "triton"):
        yield from _triton(device, triton)


def _empty_binary(files: list[Path]) -> Path | None:
    return next((file for file in files if file.suffix in _BINARIES and file.lstat().st_size == 0), None)


def _json(path: Path) -> dict[str, object] | None:
    try:
        content = document.read(path)
    except (OSError, DocumentError):
        return None
    return content if isinstance(content, dict) else None


KNOWN = (
    Known("triton", "triton", "triton", "TRITON_CACHE_DIR", _triton_folder, _triton),
    Known(
        "flashinfer",
        "flashinfer",
        "flashinfer-python",
        "FLASHINFER_WORKSPACE_BASE",
        _flashinfer_folder,
        _flashinfer,
    ),
    Known(
        "deep_gemm",
        "deep_gemm",
        "deep_gemm",
        "DG_JIT_CACHE_DIR",
        _named("DG_JIT_CACHE_DIR", ".deep_gemm"),
        _deep_gemm,
    ),
    Known("vllm", "vllm", "vllm", "VLLM_CACHE_ROOT", _vllm_folder, _vllm),
    Known("inductor", "torch", "torch", "TORCHINDUCTOR_CACHE_DIR", _inductor_folder, _inductor),
)
