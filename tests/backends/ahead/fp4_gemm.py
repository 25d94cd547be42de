"""Products with float4 weights: every format of a, few rows and many, packed or not."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch

from kernelhub.backends.triton.gemm import decoded
from kernelhub.backends.triton.gemm.fp4.adapter import Fp4Gemm
from kernelhub.backends.triton.gemm.fp4.packing import LAYOUT, TILE_K, TILE_N
from kernelhub.ops.gemm.fp4.adapter import Activations, Weights
from kernelhub.ops.gemm.fp4.problem import GROUP, Fp4GemmProblem
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _launch(facets: dict[str, Any], rows: int, device: DeviceFacts) -> None:
    problem = Fp4GemmProblem(device=device, **facets)
    n, k, form = problem.n, problem.k, problem.a_format
    one = _empty(1, dtype=torch.float32)
    group = GROUP[problem.b_format]
    if problem.weight_layout == LAYOUT:
        tiles = (-(-n // TILE_N), -(-k // TILE_K), TILE_N)
        codes = _empty(*tiles, TILE_K // 2, dtype=torch.uint8)
        scale = _empty(*tiles, TILE_K // group, dtype=torch.uint8)
    else:
        codes, scale = _empty(n, k // 2, dtype=torch.uint8), _empty(n, k // group, dtype=torch.uint8)
    if form in ("bfloat16", "float16"):
        a, a_scale = _empty(rows, k, dtype=getattr(torch, form)), None
    elif form == "fp8":
        a, a_scale = _empty(rows, k, dtype=torch.float8_e4m3fn), _empty(rows, 1, dtype=torch.float32)
    elif form == "mxfp8":
        a, a_scale = _empty(rows, k, dtype=torch.float8_e4m3fn), _empty(rows, k // 32, dtype=torch.uint8)
    else:
        a, a_scale = _empty(rows, k // 2, dtype=torch.uint8), _empty(rows, k // GROUP[form], dtype=torch.uint8)
    bias = _empty(n, dtype=torch.float32) if problem.bias else None
    out = _empty(rows, n, dtype=getattr(torch, problem.out_dtype))
    nvfp4_a = one if form == "nvfp4" else None
    nvfp4_b = one if problem.b_format == "nvfp4" else None
    # The product of a weight that is decoded first is torch's, which a build without CUDA cannot ask for.
    product = _empty(rows, n, dtype=torch.float32)
    with mock.patch.object(decoded, "multiplied", return_value=product):
        Fp4Gemm(problem).launch(Activations(a, a_scale, nvfp4_a), Weights(codes, scale, nvfp4_b), bias, out)


def _cases() -> list[Case]:
    kinds: dict[str, dict[str, Any]] = {
        "nvfp4": {},
        "nvfp4 packed": {"weight_layout": LAYOUT},
        "float16 x nvfp4": {"a_format": "float16"},
        "mxfp4": {"b_format": "mxfp4"},
        "mxfp4 wide": {"b_format": "mxfp4", "n": 28672, "k": 4096},
        "nvfp4 wide": {"n": 28672, "k": 4096},
        "mxfp4 packed": {"b_format": "mxfp4", "weight_layout": LAYOUT, "n": 5760, "k": 2880, "bias": True},
        "float16 x mxfp4": {"a_format": "float16", "b_format": "mxfp4"},
        "fp8 x nvfp4": {"a_format": "fp8"},
        "mxfp8 x mxfp4": {"a_format": "mxfp8", "b_format": "mxfp4"},
        "nvfp4 x nvfp4": {"a_format": "nvfp4"},
    }
    return [
        Case(f"fp4 gemm {rows}, {name}", functools.partial(_launch, facets, rows))
        for name, facets in kinds.items()
        for rows in (8, 16, 32, 64, 256, 512)
    ]


CASES = _cases()
