"""Calls of `grouped_gemm` as serving makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.gemm.grouped.problem import BLOCK, BLOCKS, FP4, FP8, GROUPS, SMALL, SPAN, GroupedGemmProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values


def grouped_gemm_calls(problem: GroupedGemmProblem, sizes: Sizes, values: Values) -> Calls:
    """One projection of experts; a batch's tokens are the rows of all groups, shared out evenly."""
    groups, k = problem.num_groups, problem.k
    layer = _weights(problem, values)

    def call(batch: Batch) -> Arguments:
        lengths = [batch.tokens * (group + 1) // groups - batch.tokens * group // groups for group in range(groups)]
        lead: tuple[int, ...] = (groups, max(lengths)) if problem.masked else (batch.tokens,)
        if problem.a_dtype == FP4:
            made: Arguments = {"a": values.codes(*lead, k // 2)}
        else:
            made = {"a": values.normal(*lead, k, dtype=problem.a_dtype)}
        if problem.masked:
            made["group_sizes"] = values.integers(lengths)
        else:
            made["offsets"] = values.offsets(lengths)[1:].contiguous()
        if problem.a_scale in SMALL:
            made["a_scale"] = _small_scale(problem.a_scale, lead, k, values, 2.0**-6)
        elif problem.a_scale is not None:
            shapes = {"tensor": (1,), "token": lead} | dict.fromkeys(GROUPS, (*lead, -(-k // BLOCK)))
            kind = E8M0 if problem.a_scale.endswith("e8m0") else torch.float32
            made["a_scale"] = values.near(*shapes[problem.a_scale], size=2.0**-6, dtype=kind)
        if problem.a_global_scale:
            made["a_global_scale"] = values.near(groups, size=2.0**-10)
        return made | layer

    return call


def _weights(problem: GroupedGemmProblem, values: Values) -> Arguments:
    """The weights of all groups, with what belongs to them."""
    groups, n, k, size = problem.num_groups, problem.n, problem.k, problem.k**-0.5
    made: Arguments = {"out_dtype": getattr(torch, problem.out_dtype)}
    if problem.b_dtype == FP4:
        made["b"] = values.codes(groups, n, k // 2)
    else:
        made["b"] = values.normal(groups, n, k, dtype=problem.b_dtype, size=1.0 if problem.b_dtype == FP8 else size)
    if problem.b_scale in SMALL:
        made["b_scale"] = _small_scale(problem.b_scale, (groups, n), k, values, size / 4)
    elif problem.b_scale is not None:
        shapes: dict[str, tuple[int, ...]] = {"tensor": (groups,), "channel": (groups, n)}
        shapes |= dict.fromkeys(BLOCKS, (groups, -(-n // BLOCK), -(-k // BLOCK)))
        kind = E8M0 if problem.b_scale.endswith("e8m0") else torch.float32
        made["b_scale"] = values.near(*shapes[problem.b_scale], size=size / 64, dtype=kind)
    if problem.global_scale:
        made["b_global_scale"] = values.near(groups, size=size / 48)
    if problem.bias:
        made["bias"] = values.normal(groups, n, dtype=problem.out_dtype)
    return made


def _small_scale(scale: str, lead: tuple[int, ...], k: int, values: Values, size: float) -> Tensor:
    """Scales of rows that have one for 16 or 32 columns; large in NVFP4, whose global factor is small."""
    columns = -(-k // SPAN[scale])
    if scale == "nvfp4":
        return values.near(*lead, columns, size=16.0, dtype=E4M3)
    return values.near(*lead, columns, size=size, dtype=E8M0)
