"""Grouped products: rows sorted by group and in places of their own."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.gluon.gemm.grouped.adapter import GroupedFp8, GroupedHalves
from kernelhub.ops.gemm.grouped.adapter import GroupedOperands
from kernelhub.ops.gemm.grouped.problem import GroupedGemmProblem, complete
from kernelhub.ops.gemm.grouped.scales import dtypes_of, shapes_of_a, shapes_of_b
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _launch(adapter: Any, rows: int, facets: dict[str, Any], device: DeviceFacts) -> None:
    """32 experts of a layer; `rows` in all, or at most of a group."""
    problem = GroupedGemmProblem(device=device, **complete({"num_groups": 32, "n": 4096, "k": 7168, **facets}))
    groups, n, k, a_scale, b_scale = problem.num_groups, problem.n, problem.k, problem.a_scale, problem.b_scale
    lead = (groups, rows) if problem.masked else (rows,)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    operands = GroupedOperands(
        a=empty((*lead, k), getattr(torch, problem.a_dtype)),
        b=empty((groups, n, k), getattr(torch, problem.b_dtype)),
        offsets=None if problem.masked else empty((groups,), torch.int32),
        group_sizes=empty((groups,), torch.int32) if problem.masked else None,
        a_scale=None if a_scale is None else empty(shapes_of_a(a_scale, lead, k)[0], dtypes_of(a_scale)[0]),
        b_scale=None if b_scale is None else empty(shapes_of_b(b_scale, groups, n, k)[0], dtypes_of(b_scale)[0]),
        a_global_scale=None,
        b_global_scale=None,
        bias=empty((groups, n), torch.bfloat16) if problem.bias else None,
    )
    adapter(problem).launch(operands, empty((*lead, n), getattr(torch, problem.out_dtype)))


_FLOAT16 = {"a_dtype": "float16", "b_dtype": "float16", "out_dtype": "float16"}
_BLOCKS = {"a_scale": "group", "b_scale": "block"}
CASES = [
    Case("grouped fp8 blocks, 16384 rows", functools.partial(_launch, GroupedFp8, 16384, _BLOCKS)),
    Case("grouped fp8 blocks, 4096 rows", functools.partial(_launch, GroupedFp8, 4096, _BLOCKS)),
    Case("grouped fp8 blocks, masked", functools.partial(_launch, GroupedFp8, 128, {**_BLOCKS, "masked": True})),
    Case("grouped bf16", functools.partial(_launch, GroupedHalves, 16384, {})),
    Case("grouped bf16, 4096 rows", functools.partial(_launch, GroupedHalves, 4096, {})),
    Case("grouped bf16, float32", functools.partial(_launch, GroupedHalves, 16384, {"out_dtype": "float32"})),
    Case("grouped bf16, masked, bias", functools.partial(_launch, GroupedHalves, 128, {"masked": True, "bias": True})),
    Case(
        "grouped fp8 by tensor",
        functools.partial(_launch, GroupedFp8, 4096, {"a_scale": "tensor", "b_scale": "tensor"}),
    ),
    Case("grouped fp16, 4096 rows", functools.partial(_launch, GroupedHalves, 4096, _FLOAT16)),
    Case("grouped fp8 by channel", functools.partial(_launch, GroupedFp8, 16384, {"b_scale": "channel"})),
]
