"""Calls of `fp8_gemm` and `bmm_fp8` as serving makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3, E5M2, E8M0
from kernelhub.ops.gemm.fp8.batched.problem import BATCH, BmmFp8Problem
from kernelhub.ops.gemm.fp8.problem import BLOCK, FLOAT, GROUP, ROW, TENSOR, Fp8GemmProblem
from kernelhub.ops.gemm.fp8.scaling import blocks
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values

_BATCH = 128
_CODE = 2.0**-6  # what a code counts


def fp8_gemm_calls(problem: Fp8GemmProblem, sizes: Sizes, values: Values) -> Calls:
    """A linear layer. `sizes`: ``column``, whether scales of a are column-major, as DeepGEMM reads them."""
    n, k, scaling = problem.n, problem.k, problem.scaling
    out_dtype: torch.dtype = getattr(torch, problem.out_dtype)
    kinds = {name: torch.float32 if kind == FLOAT else E8M0 for name, kind in _scale_dtypes(problem).items()}
    wide = blocks(k, GROUP.get(scaling, k))
    high = {TENSOR: 0, ROW: n, BLOCK: blocks(n, 128)}.get(scaling, n)
    shape = () if scaling == TENSOR else (high, wide)
    layer: Arguments = {
        "b": values.normal(n, k, dtype=E4M3),
        "b_scale": values.near(*shape, size=_CODE * k**-0.5, dtype=kinds["b"]),
        "out_dtype": out_dtype,
    }
    if problem.bias:
        layer["bias"] = values.normal(n, dtype=out_dtype)

    def call(batch: Batch) -> Arguments:
        if problem.weight_only is not None:
            return {"a": values.normal(batch.tokens, k, dtype=problem.weight_only), "a_scale": None, **layer}
        rows = () if scaling == TENSOR else (batch.tokens, wide)
        a_scale: Tensor = values.near(*rows, size=_CODE, dtype=kinds["a"])
        if sizes.get("column") and rows:
            a_scale = _by_column(a_scale)
        return {"a": values.normal(batch.tokens, k, dtype=E5M2 if problem.e5m2 else E4M3), "a_scale": a_scale, **layer}

    return call


def bmm_fp8_calls(problem: BmmFp8Problem, sizes: Sizes, values: Values) -> Calls:
    """An absorbed projection, its heads first. `sizes`: ``batch``, how many heads."""
    num = sizes.get("batch", _BATCH)
    shapes = {"a": (num,) if problem.a_scaling == BATCH else (), "b": (num,) if problem.b_scaling == BATCH else ()}
    layer: Arguments = {
        "b": values.normal(num, problem.n, problem.k, dtype=E5M2 if problem.e5m2 == "b" else E4M3),
        "b_scale": values.near(*shapes["b"], size=_CODE * problem.k**-0.5),
        "out_dtype": getattr(torch, problem.out_dtype),
    }

    def call(batch: Batch) -> Arguments:
        a = values.normal(batch.tokens, num, problem.k, dtype=E5M2 if problem.e5m2 == "a" else E4M3).transpose(0, 1)
        return {"a": a, "a_scale": values.near(*shapes["a"], size=_CODE), **layer}

    return call


def _scale_dtypes(problem: Fp8GemmProblem) -> dict[str, str]:
    return {"a": problem.a_scale_dtype, "b": problem.b_scale_dtype}


def _by_column(scale: Tensor) -> Tensor:
    """The same scales, those of a column side by side, columns 16 bytes aligned."""
    rows, columns = scale.shape
    step = 16 // scale.itemsize
    memory = torch.empty(columns, -(-rows // step) * step, dtype=scale.dtype, device=scale.device)
    view = memory.transpose(0, 1)[:rows]
    view.copy_(scale)
    return view
