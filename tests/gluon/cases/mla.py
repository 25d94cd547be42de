"""Decode of latent attention."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.gluon.mla.adapter import Decode
from kernelhub.ops.arguments import lse_shape
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _launch(facets: dict[str, Any], device: DeviceFacts) -> None:
    """A step of four sequences, their keys shared among programs."""
    problem = MlaProblem(device=device, **facets)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    q = empty(*((4,) if problem.q_len == "one" else (4, 2)), problem.num_heads, 576)
    step = PagedStep(empty(4, 64, dtype=torch.int32), empty(4, dtype=torch.int32))
    lse = empty(*lse_shape(q.shape), dtype=torch.float32) if problem.lse else None
    values = MlaValues(0.1, empty(problem.num_heads) if problem.sinks else None)
    Decode(problem).launch(q, empty(256, 64, 576), None, step, values, empty(*q.shape[:-1], 512), lse)


CASES = [
    Case("mla decode, 128 heads", functools.partial(_launch, {})),
    Case("mla decode, 16 heads", functools.partial(_launch, {"num_heads": 16, "lse": True})),
    Case(
        "mla decode, 2 tokens, everything",
        functools.partial(_launch, {"q_len": "few", "causal": True, "sinks": True, "lse": True}),
    ),
]
