"""Plans of products with weights: `run` takes the weights of the plan, or those of another layer, in every op alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.moe.experts.inputs import moe_inputs
from tests.conftest import DEVICE

SIZES = {"num_experts": 6, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
LAYERS: dict[str, Any] = {
    "fp8_gemm": lambda seed: fp8_gemm_inputs(tokens=5, n=96, k=160, bias=True, seed=seed, device=DEVICE),
    "fp8_gemm of weights alone": lambda seed: fp8_gemm_inputs(
        tokens=5, n=96, k=160, weight_only=torch.bfloat16, seed=seed, device=DEVICE
    ),
    "fp4_gemm": lambda seed: fp4_gemm_inputs(tokens=5, n=24, k=64, bias=True, seed=seed, device=DEVICE),
    "fused_moe": lambda seed: moe_inputs(tokens=5, weights="nvfp4", bias=True, seed=seed, device=DEVICE, **SIZES),
}


def layers(name: str) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The op, the activations of a layer, its weights, and those of another one."""
    function = getattr(kernelhub, name.partition(" ")[0])
    one, other = LAYERS[name](0), LAYERS[name](1)
    is_weight = ("b", "w") if name == "fused_moe" else ("b",)
    weights = {key: value for key, value in one.items() if key.startswith(is_weight) and isinstance(value, Tensor)}
    return function, {k: v for k, v in one.items() if k not in weights}, weights, {k: other[k] for k in weights}


def of_run(plan: Any, activations: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in activations.items() if isinstance(value, Tensor)}


@pytest.mark.device
@pytest.mark.parametrize("name", LAYERS)
class TestEach:
    def test_without_weights_a_run_takes_those_of_the_plan(self, name: str) -> None:
        function, activations, weights, _ = layers(name)
        plan = function.prepare(**activations, **weights)
        want = function(**activations, **weights)
        assert torch.equal(plan.run(**of_run(plan, activations)), want)
        assert torch.equal(plan.run(**of_run(plan, activations), **weights), want)

    def test_with_weights_it_takes_those(self, name: str) -> None:
        function, activations, weights, others = layers(name)
        plan = function.prepare(**activations, **weights)
        want = function(**activations, **others, backend=plan.kernel)
        assert torch.equal(plan.run(**of_run(plan, activations), **others), want)
        assert not torch.equal(plan.run(**of_run(plan, activations)), want)

    def test_weights_are_given_all_together(self, name: str) -> None:
        function, activations, weights, _ = layers(name)
        plan = function.prepare(**activations, **weights)
        first, *rest = weights
        with pytest.raises(InvalidArgument) as raised:
            plan.run(**of_run(plan, activations), **{rest[0]: weights[rest[0]]})
        assert raised.value.parameter in (rest[0], first)

    def test_prepared_with_shapes_a_plan_has_none(self, name: str) -> None:
        function, activations, weights, _ = layers(name)
        shapes = {key: torch.empty_like(value, device="meta") for key, value in weights.items()}
        plan = function.prepare(**activations, **shapes)
        run = of_run(plan, activations)
        assert torch.equal(plan.run(**run, **weights), function(**activations, **weights))
        with pytest.raises(InvalidArgument, match="is missing") as raised:
            plan.run(**run)
        assert raised.value.parameter == next(iter(weights))

    def test_compiled_runs_do_the_same(self, name: str) -> None:
        torch._dynamo.reset()
        function, activations, weights, others = layers(name)
        plan = function.prepare(**activations, **weights)
        counter = CompileCounterWithBackend("aot_eager")
        run = torch.compile(lambda a, w: (plan.run(**a) + 0, plan.run(**a, **w) + 0), fullgraph=True, backend=counter)
        given = of_run(plan, activations)
        kept, other = run(given, others)
        assert torch.equal(kept, plan.run(**given))
        assert torch.equal(other, plan.run(**given, **others))
