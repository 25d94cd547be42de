"""Grouped products: every format, few and many rows of a group."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.triton.gemm.grouped.adapter import Grouped
from kernelhub.ops.gemm.grouped.adapter import GroupedOperands
from kernelhub.ops.gemm.grouped.problem import FP4, GroupedGemmProblem, complete
from kernelhub.ops.gemm.grouped.scales import dtypes_of, shapes_of_a, shapes_of_b
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case

_FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"a_dtype": "float32"},
    "fp8 per tensor": {"a_scale": "tensor", "b_scale": "tensor"},
    "fp8 per channel": {"b_scale": "channel"},
    "fp8 blocks": {"b_scale": "block"},
    "fp8 blocks ue8m0": {"a_scale": "group_e8m0", "b_scale": "block_e8m0"},
    "nvfp4": {"b_scale": "nvfp4", "global_scale": True},
    "mxfp4": {"b_scale": "mxfp4", "bias": True},
    "nvfp4 by nvfp4": {"a_scale": "nvfp4", "a_global_scale": True, "global_scale": True},
    "mxfp8 by mxfp4": {"a_scale": "mxfp8", "b_scale": "mxfp4"},
    "mxfp8 by mxfp8": {"b_scale": "mxfp8"},
    "mxfp4, fp16 rows": {"b_scale": "mxfp4", "a_dtype": "float16"},
}
_ROWS = {"few": 64, "some": 4096, "many": 32768}
# Where others are compiled anyway: the tiles of these that differ.
_TILES = {
    "fp32": ("few", "some"),
    "fp8 per tensor": ("many",),
    "fp8 blocks ue8m0": ("many",),
    "mxfp4, fp16 rows": ("few", "some"),
    "nvfp4": ("few", "many"),
    "nvfp4 by nvfp4": ("few",),
    "mxfp8 by mxfp4": ("many",),
}


def _launch(facets: dict[str, Any], rows: int, device: DeviceFacts) -> None:
    """128 experts of a layer, in all `rows` rows."""
    problem = GroupedGemmProblem(device=device, **complete(facets))
    groups, n, k = problem.num_groups, problem.n, problem.k

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    def codes(rows: tuple[int, ...], dtype: str) -> torch.Tensor:
        packed = dtype == FP4
        return empty((*rows, k // 2 if packed else k), torch.uint8 if packed else getattr(torch, dtype))

    lead = (groups, rows // groups + 1) if problem.masked else (rows,)
    a_scale, b_scale = problem.a_scale, problem.b_scale
    operands = GroupedOperands(
        a=codes(lead, problem.a_dtype),
        b=codes((groups, n), problem.b_dtype),
        offsets=None if problem.masked else empty((groups,), torch.int32),
        group_sizes=empty((groups,), torch.int32) if problem.masked else None,
        a_scale=None if a_scale is None else empty(shapes_of_a(a_scale, lead, k)[0], dtypes_of(a_scale)[0]),
        b_scale=None if b_scale is None else empty(shapes_of_b(b_scale, groups, n, k)[0], dtypes_of(b_scale)[0]),
        a_global_scale=empty((groups,), torch.float32) if problem.a_global_scale else None,
        b_global_scale=empty((groups,), torch.float32) if problem.global_scale else None,
        bias=empty((groups, n), torch.bfloat16) if problem.bias else None,
    )
    Grouped(problem).launch(operands, empty((*lead, n), getattr(torch, problem.out_dtype)))


CASES = [
    *(
        Case(f"grouped {name}, {many}", functools.partial(_launch, facets, rows))
        for name, facets in _FORMATS.items()
        for many, rows in _ROWS.items()
        if many in _TILES.get(name, _ROWS)
    ),
    *(
        Case(f"grouped masked {name}", functools.partial(_launch, _FORMATS[name] | {"masked": True}, 32768))
        for name in ("bf16", "fp8 blocks", "nvfp4 by nvfp4", "mxfp8 by mxfp8")
    ),
    *(
        Case(f"grouped {name}, odd sizes", functools.partial(_launch, _FORMATS[name] | {"n": 1500, "k": 2052}, 32768))
        for name in ("bf16", "fp8 blocks", "nvfp4", "mxfp8 by mxfp4", "mxfp8 by mxfp8")
    ),
]
