"""Check an installed wheel: the launcher and the C++ kernels for this CPU are in it, need no compiler, and are right.

    python scripts/check_wheel.py

It runs outside of the repository, beside torch. It prints which library this CPU uses.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys

os.environ["CXX"] = "no-compiler"
os.environ["KERNELHUB_CACHE_DIR"] = os.devnull

import torch

import kernelhub
from kernelhub.backends.cpp import build
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.probes.device import facts

# By the instructions of a CPU; of others the base library.
LEVELS = {"amx": "avx512bf16", "avx512_bf16": "avx512bf16", "avx512": "avx512", "avx2": "avx2"}


def main() -> int:
    library = build.library("attention.cpp")
    about = f"{platform.machine()}, Python {sys.version.split()[0]}, torch {torch.__version__}"
    launcher = importlib.import_module("kernelhub._launch")
    print(f"{about}: {library._name}, {launcher.__file__}")
    level = LEVELS.get(facts(torch.device("cpu")).arch, "base")
    if not library._name.endswith(f"_{level}.so"):
        print(f"not the library of {level}, which this CPU runs")
        return 1
    paged = paged_attention_inputs("llama-3.1-8b", seq_lens=(70, 3))
    for op, arguments in (
        ("paged_attention", paged),
        ("fp8_gemm", fp8_gemm_inputs(tokens=3, n=64, k=256)),
        ("fp4_gemm", fp4_gemm_inputs(tokens=3, n=64, k=256)),
    ):
        function = getattr(kernelhub, op)
        selected = function.explain(**arguments).selected
        got, want = function(**arguments).float(), function.reference(**arguments).float()
        error = float((got - want).abs().max() / want.abs().max())
        print(f"{op}: {selected}, largest error {error:.1e} of the largest element")
        if not selected.startswith("cpp.") or error > 1e-2:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
