"""Merges of attention states."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.triton.merge.adapter import Merge
from kernelhub.ops.arguments import lse_shape
from kernelhub.ops.merge.problem import MergeProblem
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _launch(facets: dict[str, Any], stacked: bool, device: DeviceFacts) -> None:
    """A merge of a chunk of prefill."""
    problem = MergeProblem(device=device, **facets)
    rows = (4, 512) if problem.batched else (2048,)
    shape = (*rows, problem.num_heads, problem.head_dim)
    parts = 2 if problem.parts == "two" else 5
    dtype = getattr(torch, problem.dtype)
    outs = torch.empty((parts, *shape), dtype=dtype, device="cuda")
    lses = torch.empty((parts, *lse_shape(shape)), dtype=torch.float32, device="cuda")
    lse = torch.empty(lse_shape(shape), dtype=torch.float32, device="cuda") if problem.lse else None
    if not stacked:
        outs, lses = outs.unbind(0), lses.unbind(0)
    scale = torch.empty(1, device="cuda") if problem.out_scale == "tensor" else 0.5 if problem.out_scale else None
    out_dtype = dtype if scale is None else torch.float8_e4m3fn
    Merge(problem).launch(outs, lses, torch.empty(shape, dtype=out_dtype, device="cuda"), lse, scale)


CASES = [
    *(
        Case(
            f"merge of {parts}, {dtype}{', stacked' if stacked else ''}",
            functools.partial(_launch, {"parts": parts, "dtype": dtype, "lse": True}, stacked),
        )
        for parts, stacked in (("two", False), ("many", False), ("many", True))
        for dtype in ("bfloat16", "float32")
    ),
    *(
        Case(f"merge of {parts} to float8, scale by {kind}", functools.partial(_launch, facets, False))
        for parts, kind in (("two", "value"), ("many", "tensor"))
        for facets in ({"parts": parts, "out_scale": kind, "lse": True},)
    ),
    Case("merge, 192 wide", functools.partial(_launch, {"head_dim": 192, "batched": True}, False)),
]
