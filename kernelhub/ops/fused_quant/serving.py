"""Calls of `rms_norm_quant` and `silu_and_mul_quant` as serving makes them."""

from __future__ import annotations

from typing import Any

import torch

from kernelhub.ops.fused_quant.problem import FP8_TENSOR, NONE, NVFP4, ActivationProblem, NormProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values


def form_of(problem: Any, values: Values) -> Arguments:
    """The form of the result, with the scale that it is given. `problem` has the facets of form of a `FusedProblem`."""
    if problem.format == NONE:
        return {}
    said: Arguments = {"format": problem.format, "ue8m0": problem.ue8m0}
    said["scale_dtype"] = getattr(torch, problem.scale_dtype)
    said["scale_layout"] = "column" if problem.column else "row"
    if problem.format == FP8_TENSOR:
        said["scale"] = values.near(size=2.0**-6)
    elif problem.format == NVFP4:
        said["global_scale"] = values.near(size=2.0**-9)
    return said


def norm_calls(problem: NormProblem, sizes: Sizes, values: Values) -> Calls:
    """What a layer gave, beside the residual."""
    weight = values.near(problem.width, size=1.0, dtype=getattr(torch, problem.weight_dtype))
    said = {"weight": weight, "unit_offset": problem.unit_offset, **form_of(problem, values)}

    def call(batch: Batch) -> Arguments:
        rows = ("x", "residual") if problem.residual else ("x",)
        return {name: values.normal(batch.tokens, problem.width, dtype=problem.dtype) for name in rows} | said

    return call


def activation_calls(problem: ActivationProblem, sizes: Sizes, values: Values) -> Calls:
    """Gate and up of a projection."""
    said = form_of(problem, values)
    return lambda batch: {"x": values.normal(batch.tokens, 2 * problem.width, dtype=problem.dtype), **said}
