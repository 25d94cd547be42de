"""Variables that FlashInfer and DeepGEMM read by themselves, and vLLM's variable for FlashInfer's cubins.

None of them chooses a kernel of kernelhub. kernelhub lists them beside those that do, and reports invalid values before
the library fails on them. Only `kernelhub.set_cache_variables` sets any of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kernelhub.compat.env.variable import DEEP_GEMM, FLASHINFER, VLLM, EngineVariable, Meaning, switch


def _says(sentence: str) -> Callable[[str], Meaning]:
    return lambda text: Meaning(sentence)


def _written_folder(sentence: str) -> Callable[[str], Meaning]:
    """A folder that the library creates and writes."""

    def read(text: str) -> Meaning:
        path = Path(text).expanduser()
        above = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise ValueError(f"{above} is not a writable folder")
        return Meaning(f"{sentence} {path}")

    return read


def _read_folder(sentence: str) -> Callable[[str], Meaning]:
    """A folder that must exist."""

    def read(text: str) -> Meaning:
        if not Path(text).expanduser().is_dir():
            raise ValueError(f"there is no folder {text}")
        return Meaning(f"{sentence} {text}")

    return read


def _any_text_is_true(sentence: str) -> Callable[[str], Meaning]:
    """Some FlashInfer releases treat any text as true, also 0 (its issue 2722)."""

    def read(text: str) -> Meaning:
        if text.strip().lower() in ("0", "false", "no", "off"):
            raise ValueError(f"some FlashInfer releases treat {text!r} as true (its issue 2722); unset it instead")
        return Meaning(sentence)

    return read


_FOLDER, _FLAG = "path of a folder", "0 or 1"

LIBRARIES = (
    EngineVariable(
        "VLLM_HAS_FLASHINFER_CUBIN",
        VLLM,
        _FLAG,
        switch(
            Meaning("kernelhub.compat.vllm.flashinfer assumes that FlashInfer's cubins are installed"),
            Meaning("kernelhub.compat.vllm.flashinfer looks for FlashInfer's cubins itself"),
        ),
    ),
    EngineVariable(
        "FLASHINFER_WORKSPACE_BASE", FLASHINFER, _FOLDER, _written_folder("FlashInfer keeps what it compiles under")
    ),
    EngineVariable("FLASHINFER_CUBIN_DIR", FLASHINFER, _FOLDER, _read_folder("FlashInfer reads cubins from")),
    EngineVariable(
        "FLASHINFER_CUBINS_REPOSITORY", FLASHINFER, "address", _says("FlashInfer downloads cubins from there")
    ),
    EngineVariable(
        "FLASHINFER_CUDA_ARCH_LIST",
        FLASHINFER,
        "9.0a 10.0a",
        _says("FlashInfer compiles for these, not for the device"),
    ),
    EngineVariable("FLASHINFER_NVCC", FLASHINFER, "path of nvcc", _says("FlashInfer compiles with it")),
    EngineVariable("FLASHINFER_NVCC_THREADS", FLASHINFER, "a number", _says("FlashInfer sets the threads of nvcc")),
    EngineVariable(
        "FLASHINFER_DISABLE_JIT", FLASHINFER, "1, or unset", _any_text_is_true("FlashInfer compiles nothing")
    ),
    EngineVariable(
        "FLASHINFER_NO_DOWNLOAD", FLASHINFER, "1, or unset", _any_text_is_true("FlashInfer downloads nothing")
    ),
    EngineVariable(
        "FLASHINFER_DISABLE_VERSION_CHECK",
        FLASHINFER,
        "1, or unset",
        _any_text_is_true("FlashInfer loads cubins and compiled modules of other versions"),
    ),
    EngineVariable("FLASHINFER_JIT_VERBOSE", FLASHINFER, _FLAG, _says("FlashInfer prints what it compiles")),
    EngineVariable(
        "FLASHINFER_JIT_DEBUG", FLASHINFER, _FLAG, _says("FlashInfer compiles without optimisation; kernels are slow")
    ),
    EngineVariable("FLASHINFER_LOGLEVEL", FLASHINFER, "0, 1, 3, 5 or 10", _says("FlashInfer logs its calls")),
    EngineVariable(
        "FLASHINFER_LOGGING_LEVEL",
        FLASHINFER,
        "debug, info, ...",
        _says("FlashInfer logs what it compiles"),
    ),
    EngineVariable("DG_JIT_CACHE_DIR", DEEP_GEMM, _FOLDER, _written_folder("DeepGEMM keeps what it compiles in")),
    EngineVariable("DG_JIT_NVCC_COMPILER", DEEP_GEMM, "path of nvcc", _says("DeepGEMM compiles with it")),
    EngineVariable(
        "DG_JIT_USE_NVRTC", DEEP_GEMM, _FLAG, _says("DeepGEMM compiles with NVRTC, in releases that have it")
    ),
    EngineVariable("DG_JIT_CPP_STANDARD", DEEP_GEMM, "20", _says("DeepGEMM compiles with this C++ standard")),
    EngineVariable("DG_JIT_DEBUG", DEEP_GEMM, _FLAG, _says("DeepGEMM prints what it compiles")),
    EngineVariable("DG_JIT_PTXAS_VERBOSE", DEEP_GEMM, _FLAG, _says("DeepGEMM prints the output of ptxas")),
    EngineVariable(
        "DG_JIT_PRINT_COMPILER_COMMAND", DEEP_GEMM, _FLAG, _says("DeepGEMM prints how it calls the compiler")
    ),
    EngineVariable("DG_PRINT_CONFIGS", DEEP_GEMM, _FLAG, _says("DeepGEMM prints the tiles it selects")),
)
