"""FlashInfer's experts by activations in small groups; `test_flashinfer_packed_experts.py` has their contract."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer.kernels import KERNELS as RECORDS
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.probes.device import simulated
from tests.backends.flashinfer_experts_contract import check
from tests.backends.test_flashinfer import OnFake
from tests.backends.test_flashinfer_packed_experts import FORMATS, inputs, packed, rejections, run, same

W4A8 = {"weights": "mxfp4", "activation_dtype": "mxfp8", "w13_bias": True, "w2_bias": True, "activation": "swiglu_oai"}
BLOCKS = {"weights": "fp8_block_ue8m0", "activation_dtype": "mxfp8"}
W4A4 = {"weights": "nvfp4", "activation_dtype": "nvfp4", "static_scales": True}


class TestNvfp4(OnFake):
    @pytest.mark.parametrize("kernel", [name for name, form in FORMATS.items() if form == "nvfp4"])
    def test_every_scale_counts(self, kernel) -> None:
        base = inputs(kernel)
        out = run(kernel, base)
        scales = ("w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale", "a1_scale", "a2_scale")
        for name in scales:
            raw = base[name].view(torch.uint8) if base[name].itemsize == 1 else base[name]
            moved = raw / 256 if raw.numel() == 1 else raw.roll(1, -1).view(base[name].dtype)
            if name.endswith("_global_scale"):
                moved = raw * torch.arange(1, len(raw) + 1)
            assert not compare(out, base | {name: moved}).ok, name
            check(run(kernel, base | {name: moved}), base | {name: moved})

    @pytest.mark.parametrize("form", ["pairs", "column of second scales", "0-dimensional"])
    @pytest.mark.parametrize("kernel", [name for name, form in FORMATS.items() if form == "nvfp4"])
    def test_what_is_given_in_other_forms_comes_back_in_them(self, kernel, form) -> None:
        arguments = inputs(kernel)
        if form == "pairs":
            change = {name: arguments[name].view(torch.float4_e2m1fn_x2) for name in ("w13", "w2")}
        elif form == "0-dimensional":
            change = {name: arguments[name].reshape(()) for name in ("a1_scale", "a2_scale")}
        else:
            change = {name: arguments[name][:, None] for name in ("w13_global_scale", "w2_global_scale")}
        mine = packed(kernel, arguments | change)
        assert torch.equal(kernelhub.fused_moe(**mine, backend=kernel), run(kernel, arguments))
        for side in ("w13", "w2"):
            names = (side, f"{side}_scale", f"{side}_global_scale", f"{side}_bias")
            for name, got in zip(names, mine[side].unpack(), strict=True):
                same(got, (arguments | change).get(name))


class TestMxfp8(OnFake):
    def test_weights_that_are_packed_for_bfloat16_tokens_are_taken(self) -> None:
        """One copy serves calls that ask for the format and calls that do not."""
        arguments = inputs("flashinfer.trtllm_experts_mxfp8")
        wide = {name: item for name, item in arguments.items() if name != "activation_dtype"}
        mine = packed("flashinfer.trtllm_experts_mxfp4", wide)
        check(kernelhub.fused_moe(**mine, backend="flashinfer.trtllm_experts_mxfp4"), wide)
        out = kernelhub.fused_moe(**mine, activation_dtype="mxfp8", backend="flashinfer.trtllm_experts_mxfp8")
        assert torch.equal(out, run("flashinfer.trtllm_experts_mxfp8", arguments))
        check(out, arguments)


@pytest.mark.parametrize(
    ("name", "device", "facets", "codes"),
    [
        ("trtllm_experts_nvfp4", "B200", W4A4, set()),
        ("trtllm_experts_nvfp4", "RTX5090", W4A4, {"capability"}),
        ("trtllm_experts_nvfp4", "B300", W4A4 | {"activation_dtype": "bfloat16"}, {"dtype"}),
        ("trtllm_experts_nvfp4", "B200", W4A4 | {"weights": "mxfp4", "static_scales": False}, {"value"}),
        ("cutlass_experts_nvfp4", "B200", W4A4, set()),
        ("cutlass_experts_nvfp4", "RTX5090", W4A4 | {"dtype": "float16"}, set()),
        ("cutlass_experts_nvfp4", "H200", W4A4, {"capability"}),
        ("cutlass_experts_nvfp4", "B300", W4A4 | {"intermediate_size": 96}, {"divisibility"}),
        ("cutlass_experts_nvfp4", "B300", W4A4 | {"num_experts": 512}, {"range"}),
        ("trtllm_experts_mxfp8", "B200", W4A8, set()),
        ("trtllm_experts_mxfp8", "B300", W4A8 | {"hidden_size": 2880, "intermediate_size": 2880}, set()),
        ("trtllm_experts_mxfp8", "B300", W4A8 | {"activation_dtype": "bfloat16"}, {"dtype"}),
        ("trtllm_experts_mxfp8", "H200", W4A8, {"capability"}),
        ("trtllm_experts_mxfp8", "B200", W4A8 | {"weights": "fp8_block_ue8m0"}, {"value"}),
        ("cutlass_experts_mxfp8", "B200", W4A8, set()),
        ("cutlass_experts_mxfp8", "RTX5090", W4A8, set()),
        ("cutlass_experts_mxfp8", "B300", W4A8 | {"dtype": "float16"}, {"dtype"}),
        ("cutlass_experts_mxfp8", "B300", W4A8 | {"w13_bias": False}, {"mismatch"}),
        ("cutlass_experts_mxfp8", "H200", W4A8, {"capability"}),
        ("trtllm_experts_mxfp8_blocks", "B200", BLOCKS, set()),
        ("trtllm_experts_mxfp8_blocks", "B200", BLOCKS | {"weights": "fp8_block"}, {"value"}),
        ("trtllm_experts_mxfp8_blocks", "B300", BLOCKS | {"activation_dtype": "float8_e4m3fn"}, {"dtype"}),
        ("trtllm_experts_mxfp8_blocks", "B300", BLOCKS | {"intermediate_size": 192}, {"divisibility"}),
        ("trtllm_experts_mxfp8_blocks", "RTX5090", BLOCKS, {"capability"}),
    ],
)
def test_limits_are_reported(name, device, facets, codes) -> None:
    assert rejections(name, device, **facets) == codes


@pytest.mark.parametrize(("value", "codes"), [("1", {"rule"}), ("0", set()), ("", set())])
def test_scales_that_a_variable_makes_others_are_refused(value, codes) -> None:
    kernel = next(kernel for kernel in RECORDS if kernel.name == "flashinfer.cutlass_experts_nvfp4")
    problem = ExpertsProblem(device=simulated("B200"), **W4A4)
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1"}, variables={"FLASHINFER_NVFP4_4OVER6": value})
    found = [constraint.reject(problem, machine) for constraint in kernel.constraints]
    assert {rejection.code for rejection in found if rejection} == codes
