"""What every kernel of FlashInfer needs on the machine. Only files are read; nothing is imported, run or downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelhub.backends.shared.triton_cache import WritableCache
from kernelhub.dispatch.constraint import NOT_BUILT, Constraint, OnDevice, Package, Rejection, Takes
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes import cache, toolchain
from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import folders, package
from kernelhub.probes.signature import Call, takes

INSTALL = 'pip install "kernelhub[flashinfer]"'
_BUILD = "install the flashinfer-jit-cache of the same version; or force or prefer the kernel, which compiles it once"
# From 0.6.0 on `plan` takes o_data_type and nothing that we give has moved; 0.7.2 is the newest that was read.
PACKAGE = Package("flashinfer", ">=0.6,<0.7.3", distribution="flashinfer-python", install=INSTALL)

# FlashInfer's FlashAttention-2 kernels are plain sm_80 code, compiled for the device at hand.
SM80_ON = OnDevice("nvidia", only=((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)))
TRITON = (Package("triton", ">=3.6,<3.10"), WritableCache())  # of adapters with device code of their own
HOPPER = OnDevice("nvidia", only=((9, 0),))
CONSUMER_BLACKWELL = OnDevice("nvidia", only=((12, 0), (12, 1)))
DATACENTRE_BLACKWELL = OnDevice("nvidia", only=((10, 0), (10, 3)))

# `m16k16_rowsum_f16f16f32` of `prefill.cuh` and `mla.cuh` sums the weights as the second product takes them, rounded to
# half precision: by up to u relative, where an LSE may be off by u / 16, with float16 as with bfloat16.
ROUNDED_SUM = "it sums weights rounded to half precision, and the LSE exceeds the tolerance up to 16 times"

_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3"}  # as names of modules have them


@dataclass(frozen=True)
class Module:
    """The compiled module that runs the problem: built already, or what it takes to compile it at first use.

    Compilation takes 0.5 to 10 minutes, so a kernel that is not built is selected only on request.

    Args:
        reads: the facets that `names` reads.
        names: problem -> what the module may be called, by version of the library.
    """

    reads: tuple[str, ...]
    names: Callable[[Any], tuple[str, ...]]

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.reads, "device")

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        names, arch = self.names(problem), "{}{}".format(*problem.device.capability)
        built = machine.ask(("flashinfer module", names, arch), lambda: built_module(names, arch), "modules")
        if built.ok:
            return None
        compiles = machine.ask("flashinfer compiler", compiler_of_modules, "nvcc")
        if not compiles.ok:
            return Rejection(compiles.code, f"{built.reason}; {compiles.reason}", compiles.remedy)
        reason = f"{built.reason}: it would be {compiles.reason}, which takes 0.5 to 10 minutes"
        return Rejection(NOT_BUILT, reason, _BUILD)


@dataclass(frozen=True)
class Cubins:
    """Kernels that come as binaries, which the library would otherwise download at the first call."""

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return machine.ask("flashinfer cubins", cubins, "cubins").rejection


# The range that FlashInfer's releases require.
DSL = Package(
    "cutlass", ">=4.6.2", distribution="nvidia-cutlass-dsl", install='pip install "nvidia-cutlass-dsl>=4.6.2"'
)


@dataclass(frozen=True)
class CompilesForRows:
    """A kernel of CuTe DSL, compiled anew for each number of rows that there is room for, in the process: never built.

    So it is selected only on request.
    """

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        reason = "CuTe DSL compiles it at run time, at the first call of each M_max, and caches no code"
        return Rejection(
            NOT_BUILT, reason, "force or prefer the kernel, and call it once with each M_max during warm-up"
        )


@dataclass(frozen=True)
class RunsNvcc:
    """A module that runs nvcc itself, for each class of shapes and wherever it was built: with what, and into where."""

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return machine.ask("flashinfer compiler of kernels", compiler_of_kernels).rejection


# What launches TensorRT-LLM's binaries of attention.
LAUNCHER = Module((), lambda _: ("fmha_gen",))


@dataclass(frozen=True)
class TakesOne:
    """A library that supports one of several calls; the first that has a source is checked against it."""

    calls: tuple[Call, ...]

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return machine.ask(self, lambda: takes_one(self.calls)).rejection


@dataclass(frozen=True)
class Products:
    """TensorRT-LLM's batched products, which experts are made of; the binaries of attention do not help."""

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return machine.ask("flashinfer batched products", products).rejection


def requirements(device: OnDevice, *calls: Call | tuple[Call, ...]) -> tuple[Constraint, ...]:
    """Device, package, and the calls; of a tuple of calls the first that the library defines counts."""
    held = tuple(TakesOne(call) if isinstance(call, tuple) else Takes(call, INSTALL) for call in calls)
    return (device, PACKAGE, *held)


def takes_one(calls: tuple[Call, ...], *, root: Path | None = None) -> Finding:
    """The finding of the first call whose function the library defines."""
    findings = [takes(call, root=root, remedy=INSTALL) for call in calls]
    return next((finding for finding in findings if finding.code != "symbol_missing"), findings[0])


def compiler_of_modules() -> Finding:
    """All that FlashInfer needs to compile a module: nvcc, a C++ compiler, ninja, and a folder to keep it in."""
    subject = "FlashInfer's compiler"
    remedy = (
        "install a CUDA toolkit (CUDA_HOME), g++ and ninja, or FlashInfer's kernels built ahead (flashinfer-jit-cache)"
    )
    if os.environ.get("FLASHINFER_DISABLE_JIT"):  # the library takes any value for yes
        reason = f"FLASHINFER_DISABLE_JIT={os.environ['FLASHINFER_DISABLE_JIT']} forbids compilation"
        return lacking(subject, "jit_disabled", reason, "unset FLASHINFER_DISABLE_JIT, or install flashinfer-jit-cache")
    root = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = os.environ.get("FLASHINFER_NVCC") or (str(Path(root, "bin", "nvcc")) if root else shutil.which("nvcc"))
    if nvcc is None and Path("/usr/local/cuda/bin/nvcc").is_file():
        nvcc = "/usr/local/cuda/bin/nvcc"
    if nvcc is None or shutil.which(nvcc) is None:
        where = f"{nvcc} is not a command" if nvcc else "no nvcc on PATH"
        return lacking(subject, "toolkit_missing", f"it would be compiled, but {where}", remedy)
    if shutil.which("ninja") is None:
        return lacking(
            subject, "toolkit_missing", "it would be compiled, but ninja is not on PATH", "pip install ninja"
        )
    made = toolchain.cxx_compiler()
    if not made.ok:
        return lacking(subject, made.code, f"it would be compiled, but {made.reason}", made.remedy)
    answer = _answer_of(nvcc)
    if not answer.ok:
        return lacking(subject, answer.code, f"it would be compiled, but {answer.reason}", answer.remedy)
    kept = cache.writable(cache_folder(), "FLASHINFER_WORKSPACE_BASE")
    if not kept.ok:
        return lacking(subject, kept.code, f"it would be compiled, but {kept.reason}", kept.remedy)
    return found(subject, nvcc, f"compiled by {nvcc} at first use")


def _answer_of(nvcc: str) -> Finding:
    """Whether nvcc can be used; it is probed only if the library is installed."""
    there = package("flashinfer").ok
    return (
        toolchain.nvcc_at(Path(shutil.which(nvcc) or nvcc)) if there else found("nvcc", None, "no compiler would run")
    )


def compiler_of_kernels() -> Finding:
    """nvcc as TensorRT-LLM's DeepGEMM looks for it, the C++ compiler that nvcc runs, and the folder it fills."""
    subject = "nvcc of FlashInfer's DeepGEMM"
    root = os.environ.get("CUDA_HOME")
    nvcc = os.environ.get("TRTLLM_DG_NVCC_COMPILER") or (str(Path(root, "bin", "nvcc")) if root else "nvcc")
    remedy = "install a CUDA toolkit and set CUDA_HOME, or set TRTLLM_DG_NVCC_COMPILER to its nvcc"
    path = shutil.which(nvcc)
    if path is None:
        reason = f"nvcc compiles each class of shapes at its first call, and {nvcc} is not a command"
        return lacking(subject, "toolkit_missing", reason, remedy)
    made = toolchain.cxx_compiler()
    if not made.ok:
        return lacking(subject, made.code, f"nvcc needs a C++ compiler, but {made.reason}", made.remedy)
    answer = _answer_of(path)
    if not answer.ok:
        return lacking(subject, answer.code, answer.reason, answer.remedy)
    kept = cache.writable(kernels_folder(), "TRTLLM_DG_CACHE_DIR")
    if not kept.ok:
        return lacking(subject, kept.code, kept.reason, kept.remedy)
    return found(subject, path, f"compiled by {path} at the first call of each class of shapes")


def kernels_folder() -> Path:
    """The folder of kernels that TensorRT-LLM's form of DeepGEMM compiles."""
    named = os.environ.get("TRTLLM_DG_CACHE_DIR")
    return Path(named) if named else Path(os.path.expanduser("~"), ".tensorrt_llm")


def cache_folder() -> Path:
    """The folder of kernels that FlashInfer compiles or downloads."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or os.path.expanduser("~")) / ".cache" / "flashinfer"


def built_module(names: tuple[str, ...], arch: str) -> Finding:
    """One of the modules in the package itself, in flashinfer-jit-cache, or compiled here before for `arch`, as 90.

    The library has ninja look again at what it compiled here, with nvcc at hand, before it loads that; so without a
    compiler, or with FLASHINFER_DISABLE_JIT, such a module is of no use.
    """
    places = [Path(root, "data", "aot") for root in folders("flashinfer")]
    places += [Path(root, "jit_cache") for root in folders("flashinfer_jit_cache")]
    for folder in places:
        for name in names:
            path = folder / name / f"{name}.so"
            if path.is_file():
                return found(name, str(path), f"{path} is built")
    version = package("flashinfer", distribution="flashinfer-python").value or "*"
    for name in names:
        for path in cache_folder().glob(f"{version}/*{arch}*/cached_ops/{name}/{name}.so"):
            made = compiler_of_modules()
            if made.ok:
                return found(name, str(path), f"{path} is built")
            return lacking(
                name, "symbol_missing", f"{path} was compiled here, but loading it requires a compiler", INSTALL
            )
    return lacking(names[0], "symbol_missing", f"the module {names[0]} is not built", INSTALL)


def cubins() -> Finding:
    """flashinfer-cubin, or a folder that someone filled."""
    subject = "FlashInfer's cubins"
    named = os.environ.get("FLASHINFER_CUBIN_DIR")
    places = [Path(named)] if named else [Path(root, "cubins") for root in folders("flashinfer_cubin")]
    for folder in (*places, *cache_folder().glob("*/cubins"), cache_folder() / "cubins"):
        if folder.is_dir() and any(folder.iterdir()):
            return found(subject, str(folder), f"cubins in {folder}")
    return lacking(
        subject,
        "cubins_missing",
        "the kernels are binaries that would be downloaded at the first call",
        "install the flashinfer-cubin of the same version, or run `flashinfer download-cubin`",
    )


def products() -> Finding:
    """Batched products where the library looks: in a folder that is named, else in flashinfer-cubin or its cache."""
    subject = "FlashInfer's batched products"
    named = os.environ.get("FLASHINFER_CUBIN_DIR")
    places = [Path(named)] if named else [Path(root, "cubins") for root in folders("flashinfer_cubin")]
    if not named:
        places += [*cache_folder().glob("*/cubins"), cache_folder() / "cubins"]
    for folder in places:
        first = next(folder.glob("*/batched_gemm-*/*"), None)  # <hash of a release>/batched_gemm-<those of its sources>
        if first is not None:
            return found(subject, str(first.parent), f"batched products in {first.parent}")
    where = f"FLASHINFER_CUBIN_DIR={named} has none" if named else "there are none here"
    return lacking(
        subject,
        "cubins_missing",
        f"batched products are binaries that would be downloaded at the first call, and {where}",
        "install the flashinfer-cubin of the same version, or run `flashinfer download-cubin`",
    )


def dtype_part(q_dtype: str, kv_dtype: str) -> str:
    """The dtypes in a module's name."""
    q = _DTYPES.get(q_dtype, q_dtype)
    return f"dtype_q_{q}_dtype_kv_{_DTYPES.get(kv_dtype, kv_dtype)}_dtype_o_{q}_dtype_idx_i32"
