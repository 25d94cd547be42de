"""Calls of `fp4_gemm` as serving makes them."""

from __future__ import annotations

import torch

from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.gemm.fp4.problem import FP8, MXFP4, MXFP8, NVFP4, Fp4GemmProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values


def fp4_gemm_calls(problem: Fp4GemmProblem, sizes: Sizes, values: Values) -> Calls:
    """A linear layer with its weight as in a checkpoint."""
    layer = _operand("b", problem.n, problem.k, problem.b_format, values, problem.k**-0.5)
    layer["out_dtype"] = getattr(torch, problem.out_dtype)
    if problem.bias:
        layer["bias"] = values.normal(problem.n, dtype=problem.out_dtype)

    def call(batch: Batch) -> Arguments:
        return {**_operand("a", batch.tokens, problem.k, problem.a_format, values, 1.0), **layer}

    return call


def _operand(name: str, rows: int, columns: int, form: str, values: Values, size: float) -> Arguments:
    """A matrix in a format, with its scales; its numbers are about `size`."""
    if form == NVFP4:
        return {
            name: values.codes(rows, columns // 2),
            f"{name}_scale": values.near(rows, columns // 16, size=16.0, dtype=E4M3),
            f"{name}_global_scale": values.near(size=size / 48),
        }
    if form == MXFP4:
        scale = values.near(rows, columns // 32, size=size / 4, dtype=E8M0)
        return {name: values.codes(rows, columns // 2), f"{name}_scale": scale}
    if form in (MXFP8, FP8):
        codes = values.normal(rows, columns, dtype=E4M3)
        if form == MXFP8:
            return {name: codes, f"{name}_scale": values.near(rows, columns // 32, size=size / 64, dtype=E8M0)}
        return {name: codes, f"{name}_scale": values.near(rows, 1, size=size / 64)}
    return {name: values.normal(rows, columns, dtype=form, size=size)}
