"""The indexer of sparse attention."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.triton.indexer.logits_adapter import Logits, PagedLogits
from kernelhub.backends.triton.indexer.topk_adapter import TopK
from kernelhub.backends.triton.indexer.topk_search_adapter import Search
from kernelhub.ops.indexer.problem import LogitsProblem, PagedLogitsProblem, TopKProblem
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _logits(facets: dict[str, Any], device: DeviceFacts) -> None:
    """A chunk of prefill."""
    problem = LogitsProblem(device=device, **facets)
    heads, width, dtype = problem.num_heads, problem.head_dim, getattr(torch, problem.dtype)
    ranges = _empty(512, dtype=torch.int32), _empty(512, dtype=torch.int32)
    k_scale = _empty(4096) if problem.k_scale else None
    operands = _empty(512, heads, width, dtype=dtype), _empty(4096, width, dtype=dtype), k_scale
    Logits(problem).launch(*operands, _empty(512, heads), *ranges, _empty(512, 4096))


def _paged(facets: dict[str, Any], device: DeviceFacts) -> None:
    """A step of decode with one token of speculation, from a cache whose pages hold scales."""
    problem = PagedLogitsProblem(device=device, **facets)
    heads, width, dtype = problem.num_heads, problem.head_dim, getattr(torch, problem.dtype)
    page = problem.page_size
    apart = page * (width + 4)
    k_cache = torch.empty_strided((100, page, width), (apart, width, 1), dtype=dtype, device="cuda")
    scales = torch.empty_strided((100, page), (apart // 4, 1), device="cuda") if problem.k_scale else None
    table, lengths = _empty(8, 64, dtype=torch.int32), _empty(8, dtype=torch.int32)
    q, weights = _empty(8, 2, heads, width, dtype=dtype), _empty(16, heads)
    PagedLogits(problem).launch(q, k_cache, scales, weights, table, lengths, _empty(16, 4096))


def _topk(adapter: type[TopK | Search], rows: int, facets: dict[str, Any], device: DeviceFacts) -> None:
    """Few or many long rows."""
    problem = TopKProblem(device=device, **facets)
    starts = _empty(rows, dtype=torch.int32) if problem.row_starts else None
    ends = _empty(rows, dtype=torch.int32) if problem.row_ends else None
    adapter(problem).launch(_empty(rows, 40000), starts, ends, _empty(rows, problem.k, dtype=torch.int32))


CASES = [
    *(
        Case(f"{name} of {label}", functools.partial(launch, facets))
        for name, launch in (("logits", _logits), ("paged logits", _paged))
        for label, facets in (
            ("64 heads, fp8", {"k_scale": True}),
            ("32 heads, fp8", {"k_scale": True, "num_heads": 32}),
            ("64 heads, bf16", {"dtype": "bfloat16"}),
            ("64 heads, float32", {"dtype": "float32"}),
            ("64 heads of 256, float32", {"dtype": "float32", "head_dim": 256}),
            ("128 heads of 256", {"dtype": "float16", "num_heads": 128, "head_dim": 256}),
        )
    ),
    Case("topk of ranges", functools.partial(_topk, TopK, 8, {"row_starts": True, "row_ends": True})),
    Case("topk of rows", functools.partial(_topk, TopK, 8, {})),
    Case("topk search of ranges", functools.partial(_topk, Search, 8, {"row_starts": True, "row_ends": True})),
    Case("topk search of rows", functools.partial(_topk, Search, 8, {})),
    Case("topk search of many ranges", functools.partial(_topk, Search, 400, {"row_starts": True, "row_ends": True})),
]
