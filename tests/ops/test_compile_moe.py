"""Mixtures of experts under torch.compile and with fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelhub
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.routing.inputs import routing_inputs
from tests.conftest import DEVICE
from tests.ops.test_compile import compiled

SIZES = {"num_experts": 3, "top_k": 2, "hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def test_routing_compiles_at_most_two_graphs_over_sizes() -> None:
    run, counter = compiled(lambda a: [result * 2 for result in kernelhub.route_experts(**a)])
    for tokens in (2, 3, 9, 17):
        arguments = routing_inputs(tokens=tokens, device=DEVICE)
        want = kernelhub.route_experts(**arguments)
        assert all(torch.equal(got, 2 * result) for got, result in zip(run(arguments), want, strict=True))
    assert counter.frame_count <= 2


def test_routing_writes_into_given_tensors() -> None:
    arguments = routing_inputs("gpt-oss-120b", tokens=5, device=DEVICE)
    want, want_ids = kernelhub.route_experts(**arguments)
    for given in (("out_weights", "out_ids"), ("out_weights",), ("out_ids",)):
        places = {"out_weights": torch.full_like(want, torch.nan), "out_ids": torch.full_like(want_ids, -7)}
        chosen = {name: places[name] for name in given}
        run, counter = compiled(lambda a, places: kernelhub.route_experts(**a, **places))
        weights, ids = run(arguments, chosen)
        assert torch.equal(weights, want)
        assert torch.equal(ids, want_ids)
        for name, result in (("out_weights", want), ("out_ids", want_ids)):
            assert name not in chosen or torch.equal(chosen[name], result)
        assert counter.frame_count == 1


@pytest.mark.parametrize("weights", ["plain", "fp8_block", "nvfp4", "mxint4"])
def test_experts_compile_at_most_two_graphs_over_sizes(weights: str) -> None:
    run, counter = compiled(lambda a: kernelhub.fused_moe(**a) * 2)
    layer = moe_inputs(tokens=1, weights=weights, device=DEVICE, **SIZES)
    for tokens in (2, 3, 9, 17):
        step = moe_inputs(tokens=tokens, device=DEVICE, **SIZES)
        arguments = layer | {name: step[name] for name in ("x", "topk_weights", "topk_ids")}
        assert torch.equal(run(arguments), kernelhub.fused_moe(**arguments) * 2)
    assert counter.frame_count <= 2


def test_scales_and_dtypes_of_activations_go_through() -> None:
    arguments = moe_inputs(tokens=4, weights="fp8_tensor", device=DEVICE, **SIZES)
    scales = {name: torch.tensor(0.02, device=DEVICE) for name in ("a1_scale", "a2_scale")}
    results = []
    for more in ({}, scales, {"activation_dtype": torch.bfloat16}, {"activation_dtype": torch.float8_e4m3fn}):
        run, counter = compiled(lambda a: kernelhub.fused_moe(**a) + 0)
        results.append(run(arguments | more))
        assert torch.equal(results[-1], kernelhub.fused_moe(**arguments | more))
        assert counter.frame_count == 1
    assert torch.equal(results[0], results[3])
    assert not any(torch.equal(results[0], other) for other in results[1:3])


@pytest.mark.parametrize(("form", "weights"), [("fp8_block_gate_up", "fp8_block"), ("nvfp4", "nvfp4")])
def test_formats_of_activations_go_through(form: str, weights: str) -> None:
    arguments = moe_inputs(tokens=4, weights=weights, activation_dtype=form, device=DEVICE, **SIZES)
    run, counter = compiled(lambda a: kernelhub.fused_moe(**a) + 0)
    assert torch.equal(run(arguments), kernelhub.fused_moe(**arguments))
    assert counter.frame_count == 1
    plan = kernelhub.fused_moe.prepare(**arguments)
    step = (arguments["x"], arguments["topk_weights"], arguments["topk_ids"])
    run, counter = compiled(lambda *step: plan.run(*step) * 2)
    assert torch.equal(run(*step), kernelhub.fused_moe(**arguments) * 2)
    assert counter.frame_count == 1


def test_experts_write_into_given_tensors_also_of_operands() -> None:
    arguments = moe_inputs("gpt-oss-120b", tokens=5, weights="plain", device=DEVICE, **SIZES)
    residual = torch.randn_like(arguments["x"])
    want = kernelhub.fused_moe(**arguments, residual=residual)
    run, counter = compiled(lambda a, residual, out: kernelhub.fused_moe(**a, residual=residual, out=out) + 0)
    out = torch.full_like(want, torch.nan)
    assert torch.equal(run(arguments, residual, out), want)
    assert torch.equal(out, want)
    assert counter.frame_count == 1
    in_place, _ = compiled(lambda a, residual: kernelhub.fused_moe(**a, residual=residual, out=residual) + 0)
    place = residual.clone()
    assert torch.equal(in_place(arguments, place), want)
    assert torch.equal(place, want)


def test_plans_run_inside_a_compiled_region() -> None:
    routing, layer = routing_inputs("minimax-m2.5", tokens=5, device=DEVICE), moe_inputs(device=DEVICE, **SIZES)
    route = kernelhub.route_experts.prepare(**routing)
    run, counter = compiled(lambda logits, bias: route.run(logits, bias)[0] * 2)
    want = kernelhub.route_experts(**routing)[0] * 2
    assert torch.equal(run(routing["logits"], routing["correction_bias"]), want)
    assert "kernelhub.route_experts" in counter.graphs[0].code
    plan = kernelhub.fused_moe.prepare(**layer)
    step = (layer["x"], layer["topk_weights"], layer["topk_ids"])
    run, counter = compiled(lambda *step: plan.run(*step) * 2)
    assert torch.equal(run(*step), kernelhub.fused_moe(**layer) * 2)
    assert "kernelhub.fused_moe" in counter.graphs[0].code


def test_fake_tensors_give_shapes_dtypes_and_device() -> None:
    with FakeTensorMode():
        logits = torch.empty(7, 256, device="cuda")
        weights, ids = kernelhub.route_experts(logits, 8, scoring="sigmoid")
        assert (tuple(weights.shape), weights.dtype, weights.device.type) == ((7, 8), torch.float32, "cuda")
        assert (tuple(ids.shape), ids.dtype) == ((7, 8), torch.int32)
        x, w13, w2 = (torch.empty(s, device="cuda") for s in ((7, 64), (256, 64, 64), (256, 64, 32)))
        assert tuple(kernelhub.fused_moe(x, w13, w2, weights, ids).shape) == (7, 64)


def test_the_operators_pass_torch_s_own_check() -> None:
    operands = (torch.randn(5, 8), 3, "sigmoid", 4, 2, torch.randn(8), True, 2.5, None)
    torch.library.opcheck(torch.ops.kernelhub.route_experts.default, operands)
    destinations = (torch.empty(5, 3), torch.empty(5, 3, dtype=torch.int32))
    torch.library.opcheck(torch.ops.kernelhub.route_experts_out.default, (*operands, *destinations))
    given = moe_inputs(tokens=5, **SIZES)
    x, w13, w2, topk_weights, topk_ids = (given[name] for name in ("x", "w13", "w2", "topk_weights", "topk_ids"))
    weights = ([w13], "", [w2], "", topk_weights, topk_ids)
    experts = (x, *weights, "silu", None, None, *[None] * 8, 1.7, 7.0, False, None, x, None)
    torch.library.opcheck(torch.ops.kernelhub.fused_moe.default, experts)
    torch.library.opcheck(torch.ops.kernelhub.fused_moe_out.default, (*experts, torch.empty_like(given["x"])))
