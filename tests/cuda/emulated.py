"""Our CUDA kernels on a CPU: sources are compiled by g++ with `emulation.h` in place of CUDA, and run thread by thread.

Undefined behaviour ends the process (UBSan); with CUDA_EMULATION_ASAN=1 reads and writes outside of any memory do,
too, if the process was started with libasan.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kernelhub.backends.cuda import kernels, requirements
from kernelhub.backends.cuda import library as of_kernels
from kernelhub.backends.cuda.library import addresses_in, packing_of
from kernelhub.backends.cuda.nvrtc import SOURCES, Constants
from kernelhub.dispatch.constraint import OnDevice
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.toolchain import cxx_compiler

HERE = Path(__file__).parent
FAULTS = {
    1: "threads of a warp or block diverge at a barrier",
    2: "more than 1024 threads, or 8 blocks of a cluster",
    3: "no memory",
    4: "threads wait for what does not come",
}
COMPILER = cxx_compiler()


@functools.cache
def folder() -> Path:
    """What was compiled, for as long as the process lives."""
    kept = tempfile.TemporaryDirectory(prefix="kernelhub-cuda-")
    _KEPT.append(kept)
    return Path(kept.name)


_KEPT: list[Any] = []


def flags() -> tuple[str, ...]:
    sanitizers = ["undefined", *(["address"] if os.environ.get("CUDA_EMULATION_ASAN") else [])]
    fused = ("-mfma",) if platform.machine() == "x86_64" else ()
    checks = (f"-fsanitize={','.join(sanitizers)}", "-fno-sanitize-recover=all", "-fno-sanitize=alignment,vptr")
    return ("-O1", "-std=c++17", "-ffp-contract=off", "-fPIC", "-w", *fused, *checks)


def _run(*command: str) -> None:
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-3000:]


@functools.cache
def runtime(name: str) -> Path:
    """The fibers, compiled once."""
    path = folder() / f"{name}.o"
    _run(str(COMPILER.value), *flags(), "-c", str(HERE / f"{name}.cpp"), "-o", str(path))
    return path


@functools.cache
def built(
    source: str, constants: tuple[tuple[str, str | int], ...], sources: Path = SOURCES, by: str = "emulation"
) -> ctypes.CDLL:
    """A source compiled with its constants; `by` is what runs it, `emulation` or `ranks`."""
    defined = [f"-D{name}={value}" for name, value in constants]
    name = hashlib.sha256(repr((source, constants, str(sources), by)).encode()).hexdigest()[:16]
    path = folder() / f"{name}.so"
    headers = ("-include", str(HERE / "emulation.h"), f"-I{sources}", f"-I{HERE}")
    read = (*headers, "-x", "c++", str(sources / source), "-x", "none")
    _run(str(COMPILER.value), *flags(), "-shared", *defined, *read, str(runtime(by)), "-o", str(path))
    return ctypes.CDLL(str(path))


class EmulatedLibrary:
    """In place of `kernelhub.backends.cuda.library.Library`."""

    def __init__(self, source: str, constants: Constants, sources: Path = SOURCES) -> None:
        self._library = built(source, tuple(sorted(constants.items())), sources)

    def kernel(
        self, name: str, packing: str, cluster: int = 1, shared_bytes: int = 0, may_be_graph: bool = False
    ) -> Any:
        run, size = getattr(self._library, f"emulated_{name}"), getattr(self._library, f"size_of_{name}")()
        pack = packing_of(packing)
        assert pack.size <= size < pack.size + 8, f"{name} has {size} bytes of parameters, the host packs {pack.size}"

        def launch(device: int, blocks: int, threads: int, *values: Any) -> None:
            given = pack.pack(*addresses_in(values)).ljust(size, b"\0")
            backwards = launch.count % 2
            launch.count += 1
            fault = run(ctypes.c_char_p(given), cluster, blocks, threads, backwards)
            assert fault == 0, f"{name}: {FAULTS[fault]}"

        launch.count = 0
        return launch


def library(source: str, constants: Constants, device: DeviceFacts, specific: bool = False) -> EmulatedLibrary:
    """In place of `kernelhub.backends.cuda.library.library`."""
    return EmulatedLibrary(source, constants)


BACKEND = Backend("emulated", "our CUDA kernels, emulated")


def emulated(kernel: Kernel) -> Kernel:
    """The record of a kernel for CPUs, with all its limits but those of the machine."""
    of_machine = {id(constraint) for constraint in requirements.MACHINE}
    limits = [
        constraint
        for constraint in kernel.constraints
        if id(constraint) not in of_machine and not isinstance(constraint, OnDevice)
    ]
    name = f"emulated.{kernel.name.partition('.')[2]}"
    return dataclasses.replace(
        kernel, name=name, constraints=(OnDevice("cpu"), *limits), band=Band.PLUGIN, standings=()
    )


def planted(folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, line: str, fault: str) -> None:
    """Let kernels be compiled from sources with a fault in one of them."""
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    text = (folder / file).read_text()
    assert line in text
    (folder / file).write_text(text.replace(line, fault))
    wrong = lambda source, constants, device, specific=False: EmulatedLibrary(source, constants, folder)  # noqa: E731
    monkeypatch.setattr(of_kernels, "library", wrong)


# What multiplies by instructions of a warpgroup has tests of its own: test_latent_decode.py and test_fp[48]_gemm.py.
BY_WARPGROUPS = ("cuda.decode", "cuda.fp4_gemm", "cuda.fp8_gemm")
BETWEEN_RANKS = ("cuda.one_shot",)  # which `ranks.py` runs
_APART = (*BY_WARPGROUPS, *BETWEEN_RANKS)
KERNELS = tuple(emulated(kernel) for kernel in kernels.KERNELS if kernel.name not in _APART)
