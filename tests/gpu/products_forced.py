"""The contract of `cuda.fp8_gemm` with one form for all calls: python -m tests.gpu.products_forced NAME [OPTION...]."""

from __future__ import annotations

import sys

import pytest

from kernelhub.backends.cuda.gemm.fp8 import Fp8Gemm
from tests.gpu.products_sanitized import FOR_FEW_ROWS

_FILE = "tests/gpu/test_cuda_products_on_gpu.py"


def main() -> int:
    name, *options = sys.argv[1:]
    Fp8Gemm.form = FOR_FEW_ROWS[name]
    chosen = ("-k", "TestFp8Gemm or real_sizes or captured", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider")
    return int(pytest.main([_FILE, *chosen, *options]))


if __name__ == "__main__":
    sys.exit(main())
