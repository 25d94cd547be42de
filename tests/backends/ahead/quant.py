"""Quantisation: every format and granularity."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.triton.quant import adapter as adapters
from kernelhub.ops.quant.arguments import fp8_scale_shape
from kernelhub.ops.quant.problem import (
    BLOCK,
    TENSOR,
    DequantizeFp8Problem,
    DequantizeProblem,
    QuantizeFp8Problem,
    QuantizeMxProblem,
    QuantizeNvfp4Problem,
)
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case

M, K = 2048, 7168
_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _fp8_scale(problem: Any) -> torch.Tensor:
    shape = fp8_scale_shape((M, K), problem.granularity, problem.group_size)
    shape = (1, *shape) if problem.granularity in (BLOCK, TENSOR) else shape
    return _empty(*shape, dtype=getattr(torch, problem.scale_dtype))


def _rows(problem: Any, dtype: torch.dtype) -> torch.Tensor:
    """As adapters are given it: matrices where blocks share a scale."""
    return _empty(*((1, M, K) if getattr(problem, "granularity", "") == BLOCK else (M, K)), dtype=dtype)


def _quantize_fp8(facets: dict[str, Any], device: DeviceFacts) -> None:
    problem = QuantizeFp8Problem(device=device, **facets)
    x = _rows(problem, getattr(torch, problem.dtype))
    adapters.QuantizeFp8(problem).launch(x, _rows(problem, _E4M3), _fp8_scale(problem), None)


def _quantize(format: str, facets: dict[str, Any], device: DeviceFacts) -> None:
    problem_type: Any = QuantizeNvfp4Problem if format == "nvfp4" else QuantizeMxProblem
    problem = problem_type(device=device, **facets)
    adapter = getattr(adapters, f"Quantize{format.capitalize()}")(problem)
    fp8, group = format == "mxfp8", 16 if format == "nvfp4" else 32
    codes = _empty(M, K if fp8 else K // 2, dtype=_E4M3 if fp8 else torch.uint8)
    scale = _empty(M, K // group, dtype=_E4M3 if format == "nvfp4" else _E8M0)
    x = _empty(M, K, dtype=getattr(torch, problem.dtype))
    adapter.launch(x, codes, scale, _empty(1, dtype=torch.float32) if format == "nvfp4" else None)


def _dequantize(format: str, facets: dict[str, Any], device: DeviceFacts) -> None:
    problem: Any = (DequantizeFp8Problem if format == "fp8" else DequantizeProblem)(device=device, **facets)
    adapter = getattr(adapters, f"Dequantize{format.capitalize()}")(problem)
    fp4, group = format.endswith("fp4"), 16 if format == "nvfp4" else 32
    codes = _empty(M, K // 2, dtype=torch.uint8) if fp4 else _rows(problem, _E4M3)
    if format == "fp8":
        scale = _fp8_scale(problem)
    else:
        scale = _empty(M, K // group, dtype=_E4M3 if format == "nvfp4" else _E8M0)
    factor = _empty(1, dtype=torch.float32) if format == "nvfp4" else None
    adapter.launch(codes, scale, factor, _rows(problem, getattr(torch, problem.out_dtype)))


def _cases() -> list[Case]:
    fp8: dict[str, dict[str, Any]] = {
        "tensor": {"granularity": "tensor"},
        "token": {"granularity": "token"},
        "given": {"static": True},
        "group": {"granularity": "group"},
        "group ue8m0": {"granularity": "group", "ue8m0": True, "scale_dtype": "float8_e8m0fnu"},
        "group float32": {"granularity": "group", "dtype": "float32"},
        "block": {"granularity": "block"},
    }
    result = [Case(f"quantize fp8 {name}", functools.partial(_quantize_fp8, facets)) for name, facets in fp8.items()]
    for format in ("nvfp4", "mxfp4", "mxfp8"):
        result.append(Case(f"quantize {format}", functools.partial(_quantize, format, {})))
        result.append(Case(f"dequantize {format}", functools.partial(_dequantize, format, {})))
    for granularity in ("token", "group", "block"):
        result.append(
            Case(f"dequantize fp8 {granularity}", functools.partial(_dequantize, "fp8", {"granularity": granularity}))
        )
    return result


CASES = _cases()
