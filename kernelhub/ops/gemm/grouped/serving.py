"""Calls of `grouped_gemm` as serving makes them."""

from __future__ import annotations

import torch

from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.gemm.grouped.problem import BLOCK, BLOCKS, FP4, FP4_BLOCK, FP8, GROUPS, GroupedGemmProblem
from kernelhub.ops.serving import Arguments, Batch, Calls, Sizes, Values


def grouped_gemm_calls(problem: GroupedGemmProblem, sizes: Sizes, values: Values) -> Calls:
    """One projection of experts; a batch's tokens are the rows of all groups, shared out evenly."""
    groups, k = problem.num_groups, problem.k
    layer = _weights(problem, values)
    wide = -(-k // BLOCK)

    def call(batch: Batch) -> Arguments:
        lengths = [batch.tokens * (group + 1) // groups - batch.tokens * group // groups for group in range(groups)]
        lead: tuple[int, ...] = (groups, max(lengths)) if problem.masked else (batch.tokens,)
        made: Arguments = {"a": values.normal(*lead, k, dtype=problem.a_dtype)}
        if problem.masked:
            made["group_sizes"] = values.integers(lengths)
        else:
            made["offsets"] = values.offsets(lengths)[1:].contiguous()
        if problem.a_scale is not None:
            shapes = {"tensor": (1,), "token": lead}
            shape = (*lead, wide) if problem.a_scale in GROUPS else shapes[problem.a_scale]
            kind = E8M0 if problem.a_scale.endswith("e8m0") else torch.float32
            made["a_scale"] = values.near(*shape, size=2.0**-6, dtype=kind)
        return made | layer

    return call


def _weights(problem: GroupedGemmProblem, values: Values) -> Arguments:
    """The weights of all groups, with what belongs to them."""
    groups, n, k, size = problem.num_groups, problem.n, problem.k, problem.k**-0.5
    made: Arguments = {"out_dtype": getattr(torch, problem.out_dtype)}
    if problem.b_dtype == FP4:
        assert problem.b_scale is not None
        shape = (groups, n, k // FP4_BLOCK[problem.b_scale])
        nvfp4 = problem.b_scale == "nvfp4"
        made["b"] = values.codes(groups, n, k // 2)
        made["b_scale"] = values.near(*shape, size=16.0 if nvfp4 else size / 4, dtype=E4M3 if nvfp4 else E8M0)
        if problem.global_scale:
            made["b_global_scale"] = values.near(groups, size=size / 48)
    else:
        made["b"] = values.normal(groups, n, k, dtype=problem.b_dtype, size=1.0 if problem.b_dtype == FP8 else size)
        if problem.b_scale is not None:
            shapes: dict[str, tuple[int, ...]] = {"tensor": (groups,), "channel": (groups, n)}
            shapes |= dict.fromkeys(BLOCKS, (groups, -(-n // BLOCK), -(-k // BLOCK)))
            kind = E8M0 if problem.b_scale.endswith("e8m0") else torch.float32
            made["b_scale"] = values.near(*shapes[problem.b_scale], size=size / 64, dtype=kind)
    if problem.bias:
        made["bias"] = values.normal(groups, n, dtype=problem.out_dtype)
    return made
