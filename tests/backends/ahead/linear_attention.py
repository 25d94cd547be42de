"""Linear attention."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.triton.linear_attention.adapter import Chunked, Recurrent
from kernelhub.ops.linear_attention.adapter import States
from kernelhub.ops.linear_attention.problem import ONE, LinearProblem
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case

_STATES = {"state": True, "out_state": True, "state_indices": True}


def _launch(adapter: type[Any], facets: dict[str, Any], device: DeviceFacts) -> None:
    """A batch of 4, with states in a pool where there are any."""
    problem = LinearProblem(device=device, **facets)
    heads, width, value_width = problem.num_heads, problem.head_dim, problem.value_dim
    rows = (2048,) if problem.ragged else (4, 1 if problem.q_len == ONE else 512)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    dtype = getattr(torch, problem.dtype)
    q, k = (empty(*rows, heads, width, dtype=dtype) for _ in range(2))
    v, out = (empty(*rows, heads, value_width, dtype=dtype) for _ in range(2))
    pool = empty(9, heads, width, value_width)
    at = empty(4, dtype=torch.int32) if problem.state_indices else None
    states = States(pool if problem.state else None, at, pool if problem.out_state else None, at)
    offsets = empty(5, dtype=torch.int32) if problem.ragged else None
    adapter(problem).launch(q, k, v, empty(heads), 1.0, offsets, states, out)


CASES = [
    *(
        Case(f"linear prefill, {dtype}", functools.partial(_launch, Chunked, {"dtype": dtype, **_STATES}))
        for dtype in ("bfloat16", "float16", "float32")
    ),
    Case("linear prefill, ragged", functools.partial(_launch, Chunked, {"q_len": "any", "ragged": True, **_STATES})),
    Case("linear prefill, 64 wide", functools.partial(_launch, Chunked, {"head_dim": 64, "value_dim": 64})),
    Case("linear prefill, values 256 wide", functools.partial(_launch, Chunked, {"value_dim": 256})),
    Case("linear decode", functools.partial(_launch, Recurrent, {"q_len": ONE, **_STATES})),
    Case(
        "linear decode, 256 wide",
        functools.partial(_launch, Recurrent, {"q_len": ONE, "head_dim": 256, "value_dim": 256, **_STATES}),
    ),
]
