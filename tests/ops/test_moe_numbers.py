"""Numbers that are hard for a mixture of experts: halves, scales of any size, autocast, precisions set by others."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import FORMATS
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.ops.moe.routing.inputs import routing_inputs
from tests.conftest import DEVICE

pytestmark = pytest.mark.device

SIZES = {"num_experts": 4, "top_k": 2, "hidden_size": 128, "intermediate_size": 128}
KERNELS = ("torch.experts", "triton.experts", *(("cpp.experts",) if DEVICE == "cpu" else ()))
ROUTERS = ("torch.routing", "triton.routing", *(("cpp.routing",) if DEVICE == "cpu" else ()))


def experts(weights: str = "plain", dtype: torch.dtype = torch.float16, **more: Any) -> dict[str, Any]:
    made = moe_inputs(tokens=5, weights=weights, dtype=dtype, device=DEVICE, **SIZES)
    return made | {"activation_dtype": dtype} | more


def takes(kernel: str, arguments: dict[str, Any]) -> bool:
    selection = kernelhub.fused_moe.explain(**arguments)
    return next(decision for decision in selection.decisions if decision.kernel == kernel).rejections == ()


def right(kernel: str, arguments: dict[str, Any]) -> Tensor:
    out = kernelhub.fused_moe(**arguments, backend=kernel)
    agreement = compare(out, arguments)
    assert agreement.ok, str(agreement)
    return out


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weights", FORMATS)
def test_products_of_halves_are_not_rounded_to_halves(kernel: str, weights: str) -> None:
    arguments = experts(weights)
    if not takes(kernel, arguments):
        pytest.skip(f"{kernel} has not {weights} in float16 here: one format")
    x = arguments["x"]
    right(kernel, arguments | {"x": x * 16})  # before their scales products reach a million
    if weights != "plain":
        return
    # Gate and up beyond float16, what joins them and the result within it.
    far = {"x": torch.full_like(x, 100.0), "w13": torch.zeros_like(arguments["w13"])}
    far["w13"][:, :128] = -8.0
    far["w13"][:, 128:] = 1e-3
    out = right(kernel, arguments | far)
    assert out.isfinite().all()
    # What two experts add beyond float16, what their sum is within it.
    ids = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE).expand(5, -1)
    down = arguments["w2"].clone()
    down[0], down[1] = 60.0, -59.0
    w13 = torch.full_like(arguments["w13"], 0.05)
    both = {"x": torch.ones_like(x), "w13": w13, "w2": down, "topk_ids": ids, "topk_weights": torch.ones(5, 2)}
    both["topk_weights"] = both["topk_weights"].to(DEVICE)
    out = right(kernel, arguments | both)
    assert out.isfinite().all()
    assert out.abs().amax() > 1000


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [1e-7, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", ["fp8_block", "fp8_channel"])
def test_scales_of_any_size_lose_nothing(kernel: str, weights: str, dtype: torch.dtype, size: float) -> None:
    arguments = experts(weights, dtype)
    for name in ("w13_scale", "w2_scale"):
        other = 1.0 / size if name == "w2_scale" else size
        scale = arguments[name]
        arguments[name] = (scale / scale.mean() * other).to(scale.dtype) * 2e-3
    arguments["x"] = arguments["x"] * (8.0 if size < 1 else 2.0**-9)
    out = right(kernel, arguments)
    assert out.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_autocast_and_the_precision_of_others_change_nothing(kernel: str) -> None:
    arguments = experts("fp8_block", torch.float32)
    want, reference = right(kernel, arguments), kernelhub.fused_moe.reference(**arguments)
    logits = routing_inputs("glm-5", tokens=4, device=DEVICE)
    routed = [kernelhub.route_experts(**logits, backend=name) for name in ROUTERS]
    before = torch.get_float32_matmul_precision()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(DEVICE, dtype=dtype):
            assert torch.equal(kernelhub.fused_moe(**arguments, backend=kernel), want)
            assert torch.equal(kernelhub.fused_moe.reference(**arguments), reference)
            for name, (weights, ids) in zip(ROUTERS, routed, strict=True):
                again = kernelhub.route_experts(**logits, backend=name)
                assert torch.equal(again[0], weights)
                assert torch.equal(again[1], ids)
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(kernelhub.fused_moe(**arguments, backend=kernel), want)
        assert torch.equal(kernelhub.fused_moe.reference(**arguments), reference)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kernel", ROUTERS)
def test_renormalized_weights_of_a_softmax_are_exact_however_small_they_were(kernel: str) -> None:
    logits = torch.zeros(3, 8, device=DEVICE)
    logits[0, 0], logits[1, 0], logits[2, 0] = 50.0, 300.0, 3e38
    bias = torch.zeros(8, device=DEVICE)
    bias[0] = -2.0  # only choosing sees it: the best by far is not chosen
    call = {"logits": logits, "top_k": 2, "correction_bias": bias, "renormalize": True}
    for more in ({}, {"scaling_factor": 2.5}):
        weights, ids = kernelhub.route_experts(**call, **more, backend=kernel)
        reference, wanted = kernelhub.route_experts.reference(**call, **more)
        want = torch.full((3, 2), 0.5 * more.get("scaling_factor", 1.0), device=DEVICE)
        assert torch.equal(weights, want)
        assert torch.equal(reference, want)
        assert torch.equal(ids, wanted)
    assert ids.tolist() == [[1, 2]] * 3
    nothing = torch.full((1, 8), -torch.inf, device=DEVICE)
    assert not kernelhub.route_experts(nothing, 2, renormalize=True, backend=kernel)[0].any()


@pytest.mark.parametrize("kernel", ROUTERS)
def test_renormalized_weights_of_a_sigmoid_are_those_of_deepseek(kernel: str) -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.1], [-45.0, -46.0, -47.0, -48.0]], device=DEVICE)
    weights, ids = kernelhub.route_experts(logits, 2, scoring="sigmoid", renormalize=True, backend=kernel)
    scores = logits.double().sigmoid().gather(1, ids.long())
    torch.testing.assert_close(weights.double(), scores / (scores.sum(1, keepdim=True) + 1e-20), rtol=1e-5, atol=0.0)


def test_activations_are_what_other_libraries_compute() -> None:
    both = torch.tensor([[-3.0, 0.5, 4.0, 9.0, 2.0, -8.0, 0.25, 3.0]])
    gate, up = both.chunk(2, 1)
    limit, silu = 2.5, torch.nn.functional.silu
    clamped = up.clamp(-limit, limit)
    want = {
        "swiglu_oai": gate.clamp(max=limit) * torch.sigmoid(1.5 * gate.clamp(max=limit)) * (clamped + 1),
        "swiglu_clamped": gate.clamp(max=limit) * torch.sigmoid(1.5 * gate.clamp(max=limit)) * clamped,
        "swiglu_step": silu(gate).clamp(max=limit) * clamped,
    }
    eye = torch.eye(8).unsqueeze(0)
    down = torch.eye(8)[:, :4].unsqueeze(0)
    ids, one = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    for activation, result in want.items():
        for kernel in ("torch.experts", "triton.experts"):
            tensors = [tensor.to(DEVICE) for tensor in (both, eye, down, one, ids)]
            more = {"activation": activation, "alpha": 1.5, "limit": limit, "backend": kernel}
            out = kernelhub.fused_moe(*tensors, **more)
            torch.testing.assert_close(out[:, :4].cpu(), result, rtol=1e-5, atol=1e-6)
    plain = kernelhub.fused_moe(*tensors, activation="swiglu_clamped", alpha=1.0, limit=1e9)
    torch.testing.assert_close(plain[:, :4].cpu(), silu(gate) * up)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("setting", ["device", "dtype"])
def test_defaults_that_a_program_sets_change_nothing(kernel: str, setting: str) -> None:
    arguments = experts("fp8_block", torch.bfloat16) | {"activation_dtype": torch.float8_e4m3fn}
    logits = routing_inputs("glm-5", tokens=4, device=DEVICE)
    router = kernel.replace("experts", "routing")
    kernelhub.reload()  # kernels are made with the setting on
    with torch.device("meta") if setting == "device" else contextlib.nullcontext():
        torch.set_default_dtype(torch.float16 if setting == "dtype" else torch.float32)
        try:
            out = kernelhub.fused_moe(**arguments, backend=kernel)
            routed = kernelhub.route_experts(**logits, backend=router)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(out, right(kernel, arguments))
    for found, want in zip(routed, kernelhub.route_experts(**logits, backend=router), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("kernel", ["torch.experts", "triton.experts"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai", "swiglu_step"])
def test_a_gate_beyond_the_least_number_adds_nothing(kernel: str, activation: str) -> None:
    """-2^137 is minus infinity in float32, and the activation of it 0."""
    arguments = experts(dtype=torch.bfloat16, activation=activation)
    w13, half = torch.full_like(arguments["w13"], 2.0**-70), arguments["w13"].shape[1] // 2
    w13[:, : half // 2] = -(2.0**60)
    arguments |= {"x": torch.full_like(arguments["x"], 2.0**70), "w13": w13}
    want = kernelhub.fused_moe.reference(**arguments, dtype=torch.float64)
    made = kernelhub.fused_moe(**arguments, backend=kernel)
    assert want.abs().amax() > 0.1
    assert (made.double() - want).norm() < 2.0**-6 * want.norm()
