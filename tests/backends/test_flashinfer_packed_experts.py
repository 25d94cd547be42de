"""FlashInfer's experts with packed weights keep the contract of `fused_moe`, their weights read as kernels do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.flashinfer.kernels import KERNELS as RECORDS
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.probes.device import simulated
from tests.backends.flashinfer_experts_contract import Experts, check
from tests.backends.test_flashinfer import OnFake
from tests.contract.experts import PLAIN

MODEL = dataclasses.replace(PLAIN, num_experts=8, hidden_size=256, intermediate_size=128)
GPT_OSS = dataclasses.replace(
    MODEL, hidden_size=288, intermediate_size=160, bias=True, activation="swiglu_oai", weights="mxfp4"
)
KIMI = dataclasses.replace(MODEL, intermediate_size=256, weights="mxint4")
KERNELS = {
    "flashinfer.trtllm_experts": MODEL,
    "flashinfer.trtllm_experts_fp8": dataclasses.replace(MODEL, weights="fp8_tensor"),
    "flashinfer.trtllm_experts_mxfp4": GPT_OSS,
    "flashinfer.trtllm_experts_mxint4": KIMI,
    "flashinfer.cutlass_experts_mxfp4": GPT_OSS,
    "flashinfer.trtllm_experts_blocks": dataclasses.replace(MODEL, weights="fp8_block"),
    "flashinfer.cutlass_experts_blocks": dataclasses.replace(MODEL, weights="fp8_block_ue8m0"),
    "flashinfer.trtllm_experts_nvfp4": dataclasses.replace(MODEL, weights="nvfp4"),
    "flashinfer.cutlass_experts_nvfp4": dataclasses.replace(MODEL, weights="nvfp4"),
    "flashinfer.trtllm_experts_mxfp8": GPT_OSS,
    "flashinfer.cutlass_experts_mxfp8": GPT_OSS,
    "flashinfer.trtllm_experts_mxfp8_blocks": dataclasses.replace(MODEL, weights="fp8_block_ue8m0"),
}
FORMATS = {
    "flashinfer.trtllm_experts_blocks": "fp8_block_gate_up",
    "flashinfer.cutlass_experts_blocks": "fp8_block",
    "flashinfer.trtllm_experts_nvfp4": "nvfp4",
    "flashinfer.cutlass_experts_nvfp4": "nvfp4",
    "flashinfer.trtllm_experts_mxfp8": "mxfp8",
    "flashinfer.cutlass_experts_mxfp8": "mxfp8",
    "flashinfer.trtllm_experts_mxfp8_blocks": "mxfp8",
}
# Codes of w2 lie as in a checkpoint.
PLAIN_W2 = {
    f"flashinfer.{name}" for name in ("trtllm_experts_blocks", "cutlass_experts_blocks", "cutlass_experts_nvfp4")
}
LAYER = tuple(side + part for part in ("", "_scale", "_global_scale", "_bias") for side in ("w13", "w2"))


def inputs(kernel: str, **changes: Any) -> dict[str, Any]:
    arguments = moe_inputs(**{"model": KERNELS[kernel], "tokens": 7, "activation_dtype": FORMATS.get(kernel)} | changes)
    if kernel.endswith("_fp8"):
        scales = {"a1_scale": torch.tensor(3.0 / 448), "a2_scale": torch.tensor([1.0 / 448])}
        return arguments | scales
    return arguments


def layer(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {name: arguments[name] for name in LAYER if arguments.get(name) is not None}


def packed(kernel: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with weights as the kernel packs them."""
    plan = kernelhub.fused_moe.prepare(**arguments, backend=kernel)
    w13, w2 = plan.pack(**layer(arguments))
    return {name: item for name, item in arguments.items() if name not in LAYER} | {"w13": w13, "w2": w2}


def one_element_on(tensor: Tensor) -> Tensor:
    """A copy that begins an element past an address of whole 16 bytes."""
    buffer = torch.zeros(tensor.nbytes + 2 * tensor.itemsize, dtype=torch.uint8).view(tensor.dtype)
    place = buffer[1 : 1 + tensor.numel()].view(tensor.shape)
    place.copy_(tensor)
    assert place.data_ptr() % 16
    return place


def run(kernel: str, arguments: dict[str, Any], **more: Any) -> Tensor:
    return kernelhub.fused_moe(**packed(kernel, arguments), **more, backend=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
class TestPackedExperts(Experts):
    inputs = staticmethod(inputs)
    run = staticmethod(run)

    @pytest.mark.parametrize(("experts", "top_k"), [(24, 1), (24, 22), (4, 3)])
    def test_any_number_of_experts_per_token(self, kernel, experts, top_k) -> None:
        arguments = inputs(kernel, num_experts=experts, top_k=top_k, tokens=3)
        check(run(kernel, arguments), arguments)

    def test_weights_come_back_bit_for_bit(self, kernel) -> None:
        arguments = inputs(kernel)
        mine = packed(kernel, arguments)
        record = next(record for record in RECORDS if record.name == kernel)
        for side in ("w13", "w2"):
            assert (mine[side].layout, mine[side].kernel) == (record.packs_to, kernel)
            names = (side, f"{side}_scale", f"{side}_global_scale", f"{side}_bias")
            for name, got in zip(names, mine[side].unpack(), strict=True):
                same(got, arguments.get(name))
            if side == "w13" or kernel not in PLAIN_W2:
                assert mine[side].tensors["weight"].data_ptr() != arguments[side].data_ptr()

    def test_packed_weights_may_lie_anywhere_in_memory(self, kernel) -> None:
        arguments = packed(kernel, inputs(kernel))
        want = kernelhub.fused_moe(**arguments, backend=kernel)
        for side in ("w13", "w2"):
            weight = arguments[side]
            moved = {name: None if of is None else one_element_on(of) for name, of in weight.tensors.items()}
            arguments[side] = dataclasses.replace(weight, tensors=moved)
        assert torch.equal(kernelhub.fused_moe(**arguments, backend=kernel), want)

    def test_a_plan_runs_a_checkpoint_s_weights_and_packed_ones(self, kernel) -> None:
        arguments = inputs(kernel)
        step = (arguments["x"], arguments["topk_weights"], arguments["topk_ids"])
        plan = kernelhub.fused_moe.prepare(**arguments, backend=kernel)
        again = kernelhub.fused_moe.prepare(**packed(kernel, arguments), backend=kernel)
        assert plan.kernel == again.kernel == kernel
        assert plan.needs_packing
        assert plan.layout == plan.selection.problem.weight_layout == again.selection.problem.weight_layout
        want = run(kernel, arguments)
        for _ in range(2):
            assert torch.equal(plan.run(*step), want)
            assert torch.equal(again.run(*step), want)
        assert plan.workspace_bytes(num_tokens=64) >= 64 * 2 * (256 + 128) * 2

    def test_a_checkpoint_s_weights_are_refused_without_a_plan(self, kernel) -> None:
        with pytest.raises(NoKernel, match="pack them as experts"):
            kernelhub.fused_moe(**inputs(kernel), backend=kernel)

    def test_a_layer_of_another_form_is_not_packed(self, kernel) -> None:
        arguments = inputs(kernel)
        plan = kernelhub.fused_moe.prepare(**arguments, backend=kernel)
        with pytest.raises(InvalidArgument, match="the plan is for num_experts 8"):
            plan.pack(**layer(inputs(kernel, num_experts=12)))


def same(got: Tensor | None, want: Tensor | None) -> None:
    if want is None or got is None:
        assert got is want
        return
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


class TestFormats(OnFake):
    @pytest.mark.parametrize("kernel", FORMATS)
    def test_a_call_without_a_format_gets_its_name(self, kernel) -> None:
        arguments = inputs(kernel)
        for name in ("activation_dtype", "a1_scale", "a2_scale"):
            arguments.pop(name, None)
        with pytest.raises(NoKernel, match=f"activation_dtype='{FORMATS[kernel]}'"):
            kernelhub.fused_moe(**arguments, backend=kernel)


class TestMxfp4(OnFake):
    kernels = pytest.mark.parametrize("kernel", [name for name, model in KERNELS.items() if model is GPT_OSS])

    @kernels
    @pytest.mark.parametrize(("hidden", "inner"), [(256, 256), (32, 96), (544, 32)])
    @pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
    @pytest.mark.parametrize("bias", [False, True])
    def test_widths_are_filled_up(self, kernel, hidden, inner, activation, bias) -> None:
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "activation": activation, "bias": bias}
        arguments = inputs(kernel, **sizes)
        check(run(kernel, arguments), arguments)

    @kernels
    def test_every_control_counts(self, kernel) -> None:
        base = inputs(kernel) | {"limit": 0.5}
        out = run(kernel, base)
        for change in ({"alpha": 1.0}, {"limit": 1.0}, {"activation": "silu"}):
            assert not compare(out, base | change).ok
            check(run(kernel, base | change), base | change)
        for name in ("w13_bias", "w2_bias", "w13_scale", "w2_scale"):
            raw = base[name].view(torch.uint8) if base[name].itemsize == 1 else base[name]
            change = {name: raw.roll(1, 1).view(base[name].dtype)}
            assert not compare(out, base | change).ok, name
            check(run(kernel, base | change), base | change)

    @kernels
    @pytest.mark.parametrize("form", ["bytes", "pairs", "float32 bias"])
    def test_what_is_given_in_other_dtypes_comes_back_in_them(self, kernel, form) -> None:
        arguments = inputs(kernel)
        if form == "bytes":
            change = {name: arguments[name].view(torch.uint8) for name in ("w13_scale", "w2_scale")}
        elif form == "pairs":
            change = {name: arguments[name].view(torch.float4_e2m1fn_x2) for name in ("w13", "w2")}
        else:
            change = {name: arguments[name].float() for name in ("w13_bias", "w2_bias")}
        mine = packed(kernel, arguments | change)
        assert torch.equal(kernelhub.fused_moe(**mine, backend=kernel), run(kernel, arguments))
        for side in ("w13", "w2"):
            names = (side, f"{side}_scale", f"{side}_global_scale", f"{side}_bias")
            for name, got in zip(names, mine[side].unpack(), strict=True):
                same(got, (arguments | change).get(name))

    @pytest.mark.parametrize("form", ["mxfp4", "mxfp8"])
    def test_a_bias_that_would_be_rounded_is_refused(self, form) -> None:
        arguments = inputs(f"flashinfer.cutlass_experts_{form}")
        arguments |= {name: arguments[name].float() * 1.1 for name in ("w13_bias", "w2_bias")}
        with pytest.raises(InvalidArgument, match="w13_bias has values that bfloat16 cannot represent"):
            packed(f"flashinfer.cutlass_experts_{form}", arguments)
        check(run(f"flashinfer.trtllm_experts_{form}", arguments), arguments)


def rejections(name: str, device: str, **facets: Any) -> set[str]:
    kernel = next(kernel for kernel in RECORDS if kernel.name == f"flashinfer.{name}")
    problem = ExpertsProblem(device=simulated(device), **facets)
    machine = SimulatedMachine({"flashinfer": facets.pop("version", "0.6.18.post1")})
    found = (constraint.reject(problem, machine) for constraint in kernel.constraints)
    return {rejection.code for rejection in found if rejection}


WHOLE = {"weights": "fp8_tensor", "activation_dtype": "float8_e4m3fn", "static_scales": True}
INT4 = {"weights": "mxint4", "num_experts": 384, "hidden_size": 7168, "intermediate_size": 256}
FP4 = {"weights": "mxfp4", "w13_bias": True, "w2_bias": True, "activation": "swiglu_oai"}


@pytest.mark.parametrize(
    ("name", "device", "facets", "codes"),
    [
        ("trtllm_experts", "B200", {}, set()),
        ("trtllm_experts", "B300", {}, set()),
        ("trtllm_experts", "H200", {}, {"capability"}),
        ("trtllm_experts", "RTX5090", {}, {"capability"}),
        ("trtllm_experts", "B200", {"dtype": "float16", "activation_dtype": "float16"}, {"dtype"}),
        ("trtllm_experts", "B200", {"hidden_size": 2112}, {"divisibility"}),
        ("trtllm_experts", "B200", {"num_experts": 6}, {"divisibility", "range"}),
        ("trtllm_experts", "B200", {"num_experts": 64, "top_k": 33}, {"range"}),
        ("trtllm_experts", "B200", {"weights": "fp8_block"}, {"value"}),
        ("trtllm_experts_fp8", "B200", WHOLE, set()),
        ("trtllm_experts_fp8", "B200", WHOLE | {"static_scales": False}, {"value"}),
        ("trtllm_experts_fp8", "B200", WHOLE | {"weights": "fp8_channel"}, {"value"}),
        ("trtllm_experts_mxfp4", "B200", FP4, set()),
        ("trtllm_experts_mxfp4", "B200", FP4 | {"hidden_size": 2880, "intermediate_size": 2880}, set()),
        ("trtllm_experts_mxfp4", "B200", FP4 | {"w2_bias": False}, {"mismatch"}),
        ("trtllm_experts_mxfp4", "B200", FP4 | {"weights": "nvfp4"}, {"value"}),
        ("trtllm_experts_mxint4", "B200", INT4, set()),
        ("trtllm_experts_mxint4", "B300", INT4, set()),
        ("trtllm_experts_mxint4", "H200", INT4, {"capability"}),
        ("trtllm_experts_mxint4", "B200", INT4 | {"intermediate_size": 384}, {"divisibility"}),
        ("trtllm_experts_mxint4", "B200", INT4 | {"weights": "mxfp4"}, {"value"}),
        ("trtllm_experts_mxint4", "B200", INT4 | {"dtype": "float16"}, {"dtype", "mismatch"}),
        ("cutlass_experts_mxfp4", "H200", FP4, set()),
        ("cutlass_experts_mxfp4", "B200", FP4, {"capability"}),
        ("cutlass_experts_mxfp4", "A100", FP4, {"capability"}),
        ("cutlass_experts_mxfp4", "H200", FP4 | {"dtype": "float16"}, {"dtype", "mismatch"}),
    ],
)
def test_limits_are_reported(name, device, facets, codes) -> None:
    assert rejections(name, device, **facets) == codes


@pytest.mark.parametrize(
    "name", ["trtllm_experts", "trtllm_experts_fp8", "trtllm_experts_mxfp4", "trtllm_experts_mxint4"]
)
def test_older_releases_are_refused(name) -> None:
    kernel = next(kernel for kernel in RECORDS if kernel.name == f"flashinfer.{name}")
    problem = ExpertsProblem(device=simulated("B200"))
    machine = SimulatedMachine({"flashinfer": "0.6.17"})
    found = [constraint.reject(problem, machine) for constraint in kernel.constraints]
    assert "package_version" in {rejection.code for rejection in found if rejection}


def test_features_that_the_kernels_lack_are_refused() -> None:
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1"})
    kernels = {"trtllm_experts": {}, "trtllm_experts_fp8": WHOLE, "trtllm_experts_mxfp4": FP4}
    kernels["trtllm_experts_mxint4"] = INT4
    for name, facets in kernels.items():
        record = next(record for record in RECORDS if record.name == f"flashinfer.{name}")
        about = {"device": "B200", "machine": machine, "backend": record.name, "weight_layout": record.packs_to}
        assert kernelhub.explain("fused_moe", **about, **facets).selected == record.name
        for lacking in ("residual", "apply_router_weight_on_input"):
            assert kernelhub.explain("fused_moe", **about, **facets, **{lacking: True}).selected is None
        for layout in ("checkpoint", "experts.other.v1"):
            assert kernelhub.explain("fused_moe", **about | {"weight_layout": layout}, **facets).selected is None
