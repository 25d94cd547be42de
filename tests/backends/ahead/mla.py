"""Multi-head latent attention."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.triton.mla.concat_adapter import Concat
from kernelhub.ops.mla.problem import ConcatProblem
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _concat(facets: dict[str, Any], device: DeviceFacts) -> None:
    """The keys of a chunk of prefill."""
    problem = ConcatProblem(device=device, **facets)
    heads, nope, rope = problem.num_heads, problem.nope_dim, problem.rope_dim
    dtype = getattr(torch, problem.dtype)
    k_nope = torch.empty(2048, heads, nope + 128, dtype=dtype, device="cuda").narrow(2, 0, nope)
    k_rope = torch.empty(2048, rope, dtype=dtype, device="cuda")
    Concat(problem).launch(k_nope, k_rope, torch.empty(2048, heads, nope + rope, dtype=dtype, device="cuda"))


CASES = [
    Case(f"concat {dtype}", functools.partial(_concat, {"dtype": dtype})) for dtype in ("bfloat16", "float8_e4m3fn")
]
