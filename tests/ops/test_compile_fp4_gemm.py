"""`fp4_gemm` under torch.compile: one opaque operator, few graphs over sizes, packed weights too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import kernelhub
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from tests.conftest import DEVICE


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def compiled(function):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def inputs(tokens: int, **more: Any) -> dict[str, Any]:
    return fp4_gemm_inputs(**{"tokens": tokens, "n": 24, "k": 64, "bias": True, "device": DEVICE} | more)


@pytest.mark.parametrize("a_format", ["bfloat16", "fp8", "nvfp4"])
def test_at_most_two_graphs_over_sizes(a_format: str) -> None:
    run, counter = compiled(lambda arguments: kernelhub.fp4_gemm(**arguments) * 2)
    for tokens in (2, 3, 9, 40):
        arguments = inputs(tokens, a_format=a_format)
        assert torch.equal(run(arguments), kernelhub.fp4_gemm(**arguments) * 2)
    assert counter.frame_count <= 2


def test_destinations_are_written() -> None:
    arguments = inputs(5)
    want = kernelhub.fp4_gemm(**arguments)
    out = torch.full_like(want, torch.nan)
    run, counter = compiled(lambda arguments, out: kernelhub.fp4_gemm(**arguments, out=out) * 2)
    assert torch.equal(run(arguments, out), want * 2)
    assert torch.equal(out, want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_packed_weights_and_plans_go_through(backend: str) -> None:
    arguments = inputs(5)
    want = kernelhub.fp4_gemm(**arguments, backend=backend) * 2
    plan = kernelhub.fp4_gemm.prepare(**arguments, backend=backend)
    packed = plan.pack(arguments["b"], arguments["b_scale"], arguments["b_global_scale"])
    a, bias = arguments["a"], arguments["bias"]
    run, counter = compiled(lambda a: kernelhub.fp4_gemm(a, packed, bias=bias, backend=backend) * 2)
    assert torch.equal(run(a), want)
    assert counter.frame_count == 1
    again = kernelhub.fp4_gemm.prepare(a, packed, bias=bias, backend=backend)
    run, counter = compiled(lambda a: again.run(a, packed, bias=bias) * 2)
    assert torch.equal(run(a), want)
    assert counter.frame_count == 1
