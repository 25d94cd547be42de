"""Small calls of `cuda.fp4_gemm` of each kind, for compute-sanitizer: python -m tests.gpu.fp4_sanitized."""

from __future__ import annotations

import torch

import kernelhub
from kernelhub.evidence.cases import CASES
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs


def main() -> None:
    for tokens, n, k, form, dtype in (
        (5, 75, 288, "nvfp4", torch.bfloat16),
        (70, 300, 2080, "mxfp4", torch.float16),
        (190, 1000, 4096, "nvfp4", torch.float32),
        (256, 1000, 4096, "nvfp4", torch.bfloat16),
        (600, 2048, 512, "mxfp4", torch.bfloat16),
    ):
        arguments = fp4_gemm_inputs(tokens=tokens, n=n, k=k, b_format=form, out_dtype=dtype, bias=True, device="cuda")
        got = kernelhub.fp4_gemm(**arguments, backend="cuda.fp4_gemm")
        torch.cuda.synchronize()
        print(f"{tokens} x {n} x {k} {form}: right {CASES['fp4_gemm'].judge({'out': got}, arguments).ok}", flush=True)


if __name__ == "__main__":
    main()
