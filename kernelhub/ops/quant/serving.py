"""Calls of the quantisers as serving makes them."""

from __future__ import annotations

import torch

from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.quant.arguments import fp8_scale_shape
from kernelhub.ops.quant.problem import (
    GROUP,
    TENSOR,
    DequantizeFp8Problem,
    DequantizeProblem,
    QuantizeFp8Problem,
    QuantizeMxProblem,
    QuantizeNvfp4Problem,
)
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values

_WIDTH = 4096


def quantize_fp8_calls(problem: QuantizeFp8Problem, sizes: Sizes, values: Values) -> Calls:
    """Activations before a product. `sizes`: ``width`` of a token."""
    width = sizes.get("width", _WIDTH)
    said: Arguments = {
        "granularity": problem.granularity,
        "ue8m0": problem.ue8m0,
        "scale_dtype": getattr(torch, problem.scale_dtype),
        "scale_layout": "column" if problem.column else "row",
    }
    if problem.granularity == "group":
        said["group_size"] = problem.group_size

    def call(batch: Batch) -> Arguments:
        made = {"x": values.normal(batch.tokens, width, dtype=problem.dtype), **said}
        if problem.static:
            made["scale"] = values.near(*(() if problem.granularity == TENSOR else (batch.tokens, 1)), size=2.0**-6)
        return made

    return call


def quantize_nvfp4_calls(problem: QuantizeNvfp4Problem, sizes: Sizes, values: Values) -> Calls:
    """Activations before a product. `sizes`: ``width`` of a token."""
    width = sizes.get("width", _WIDTH)
    said: Arguments = {"global_scale": values.near(size=2.0**-9)} if problem.static else {}
    return lambda batch: {"x": values.normal(batch.tokens, width, dtype=problem.dtype), **said}


def quantize_mx_calls(problem: QuantizeMxProblem, sizes: Sizes, values: Values) -> Calls:
    """Activations before a product. `sizes`: ``width`` of a token."""
    width, said = sizes.get("width", _WIDTH), {"scale_rounding": "up" if problem.round_up else "floor"}
    return lambda batch: {"x": values.normal(batch.tokens, width, dtype=problem.dtype), **said}


def dequantize_fp8_calls(problem: DequantizeFp8Problem, sizes: Sizes, values: Values) -> Calls:
    """Codes back to floats. `sizes`: ``width`` of a row."""
    width, kind = sizes.get("width", _WIDTH), getattr(torch, problem.scale_dtype)

    def call(batch: Batch) -> Arguments:
        shape = (batch.tokens, width)
        scale_shape = fp8_scale_shape(shape, problem.granularity, problem.group_size)
        made: Arguments = {"x": values.normal(*shape, dtype=E4M3)}
        made["scale"] = values.near(*scale_shape, size=2.0**-6, dtype=kind)
        made["out_dtype"] = getattr(torch, problem.out_dtype)
        return made | ({"group_size": problem.group_size} if problem.granularity == GROUP else {})

    return call


def dequantize_nvfp4_calls(problem: DequantizeProblem, sizes: Sizes, values: Values) -> Calls:
    """Codes back to floats. `sizes`: ``width`` of a row."""
    return _dequantize(problem, sizes, values, 16)


def dequantize_mxfp4_calls(problem: DequantizeProblem, sizes: Sizes, values: Values) -> Calls:
    """Codes back to floats. `sizes`: ``width`` of a row."""
    return _dequantize(problem, sizes, values, 32)


def dequantize_mxfp8_calls(problem: DequantizeProblem, sizes: Sizes, values: Values) -> Calls:
    """Codes back to floats. `sizes`: ``width`` of a row."""
    return _dequantize(problem, sizes, values, 0)


def _dequantize(problem: DequantizeProblem, sizes: Sizes, values: Values, fp4_group: int) -> Calls:
    """Calls for groups of float4 of this width; 0 for those of MXFP8."""
    width, out_dtype = sizes.get("width", _WIDTH), getattr(torch, problem.out_dtype)

    def call(batch: Batch) -> Arguments:
        rows = batch.tokens
        if not fp4_group:
            codes = values.normal(rows, width, dtype=E4M3)
            return {"x": codes, "scale": values.near(rows, width // 32, size=2.0**-6, dtype=E8M0), **said}
        kind = E4M3 if fp4_group == 16 else E8M0
        scale = values.near(rows, width // fp4_group, size=1.0, dtype=kind)
        return {"x": values.codes(rows, width // 2), "scale": scale, **said}

    said: Arguments = {"out_dtype": out_dtype}
    if fp4_group == 16:
        said["global_scale"] = values.near(size=1.0)
    return call
