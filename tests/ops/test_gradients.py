"""Under torch.compile, too, an op refuses by name a tensor that requires a gradient: none is lost silently."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.evidence.cases import CASES
from kernelhub.ops import functions

OPS = {function.op.contract.name: function for function in functions()}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _example(op: str) -> dict[str, Any]:
    """Arguments of the op's first case."""
    return next(CASES[op].cases()).make(torch.device("cpu"))


def _differentiable(arguments: dict[str, Any]) -> list[str]:
    """Tensor parameters that can want a gradient at all."""

    def one(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)

    return [name for name, value in arguments.items() if one(value)]


@pytest.mark.parametrize("op", [op for op in OPS if _differentiable(_example(op))])
def test_every_op_refuses_a_gradient_where_torch_compile_traces_it(op: str) -> None:
    arguments = _example(op)
    parameter = _differentiable(arguments)[0]
    run = torch.compile(lambda given: OPS[op](**given), backend="eager")
    with pytest.raises(Exception, match=f"{parameter} requires grad"):
        run(arguments | {parameter: arguments[parameter].clone().requires_grad_()})


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_layer_around_attention_loses_no_gradient(backend: str) -> None:
    layer = torch.nn.Linear(16, 16)
    q = torch.randn(1, 5, 2, 16)
    run = torch.compile(lambda q: layer(kernelhub.attention(layer(q), q, q, causal=True)), backend=backend)
    with pytest.raises(Exception, match="q requires grad"):
        run(q)
    torch._dynamo.reset()
    with torch.no_grad():
        want = layer(kernelhub.attention(layer(q), q, q, causal=True))
        assert torch.allclose(run(q), want, atol=1e-5)
