"""Small calls of each form of `cuda.fp8_gemm`, for compute-sanitizer: python -m tests.gpu.products_sanitized [I/N]."""

from __future__ import annotations

import dataclasses
import sys

import torch

import kernelhub
from kernelhub.backends.cuda.gemm.fp8 import HIGH, IN_PARTS, LOW, MIDDLE, Form, Fp8Gemm
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare


def name_of(form: Form) -> str:
    """Rows x columns of a tile, parts of K, blocks that share a."""
    return f"{form.rows}x{form.columns} p{form.parts}{f' s{form.sharing}' if form.sharing > 1 else ''}"


FOR_FEW_ROWS = {name_of(form): form for form in IN_PARTS}


def forms() -> list[Form]:
    """Each height of tiles, with clusters and without, with early waits and without; with K in parts."""
    more = (dataclasses.replace(form, sharing=3 - form.sharing) for form in (MIDDLE, LOW))
    return [HIGH, dataclasses.replace(HIGH, early=False), MIDDLE, LOW, *more, *FOR_FEW_ROWS.values()]


def main() -> None:
    """The I-th of N parts of the forms; all by default."""
    part, parts = map(int, sys.argv[1].split("/")) if sys.argv[1:] else (0, 1)
    for tokens, n, k, bias in ((300, 200, 400, True), (600, 384, 256, False), (70, 136, 4096, True)):
        arguments = fp8_gemm_inputs(tokens=tokens, n=n, k=k, bias=bias, device="cuda")
        problem = kernelhub.fp8_gemm.explain(**arguments, backend="cuda.fp8_gemm").problem
        for form in forms()[part::parts]:
            made = type("Formed", (Fp8Gemm,), {"form": form})(problem)
            out = torch.full((tokens, n), torch.nan, dtype=torch.bfloat16, device="cuda")
            made.launch(*(arguments.get(name) for name in ("a", "b", "a_scale", "b_scale", "bias")), out)
            torch.cuda.synchronize()
            agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=True)
            print(f"{tokens} rows, {form}: {'right' if agreement.ok else 'WRONG'} {agreement}", flush=True)


if __name__ == "__main__":
    main()
