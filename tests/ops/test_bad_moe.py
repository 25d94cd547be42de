"""Mixtures of experts that cannot be: one clear error that names the parameter, on a first call and on a warm one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.moe.experts.inputs import moe_inputs

z = torch.zeros
INT = torch.int32


def routing(**changes: Any) -> dict[str, Any]:
    return {"logits": z(4, 12), "top_k": 3, "num_groups": 4, "topk_groups": 2} | changes


ROUTINGS = [
    ("logits", routing(logits=3), "is int"),
    ("logits", routing(logits=z(12)), r"\[12\]"),
    ("logits", routing(logits=z(4, 0)), "at least one expert"),
    ("logits", routing(logits=z(4, 12).double()), "float64"),
    ("logits", routing(logits=z(4, 12, device="meta")), "meta"),
    ("logits", routing(logits=z(4, 12, requires_grad=True)), "requires grad"),
    ("top_k", routing(top_k=0), "1 to 12"),
    ("top_k", routing(top_k=13), "1 to 12"),
    ("top_k", routing(top_k=2.0), "2.0"),
    ("top_k", routing(top_k=7), "at most 6, the experts of 2 groups"),
    ("scoring", routing(scoring="relu"), "softmax_after_topk"),
    ("scoring", routing(scoring=["softmax"]), "give one of"),
    ("num_groups", routing(num_groups=5), "does not divide 12 experts; give 4, say"),
    ("num_groups", routing(num_groups=-1), "-1"),
    ("num_groups", routing(num_groups="4"), "'4'"),
    ("topk_groups", routing(topk_groups=5), "1 to 4"),
    ("topk_groups", routing(topk_groups=None), "None"),
    ("topk_groups", routing(topk_groups=0), "1 to 4"),
    ("topk_groups", routing(num_groups=None), "give num_groups too"),
    ("topk_groups", routing(num_groups=1, topk_groups=3), "give num_groups too"),
    ("correction_bias", routing(correction_bias=1.0), "is float"),
    ("correction_bias", routing(correction_bias=z(11)), r"\[11\]"),
    ("correction_bias", routing(correction_bias=z(12).half()), "float16"),
    ("correction_bias", routing(correction_bias=z(12, device="meta")), "on meta"),
    ("scaling_factor", routing(scaling_factor="2"), "is '2'"),
    ("scaling_factor", routing(scaling_factor=z(1)), "is Tensor"),
    ("scaling_factor", routing(scaling_factor=float("nan")), "finite"),
    ("out_weights", routing(out_weights=z(4, 2)), r"\[4, 3\]"),
    ("out_weights", routing(out_weights=z(4, 3).half()), "float16"),
    ("out_ids", routing(out_ids=z(4, 3)), "give int32"),
    ("out_ids", routing(out_ids=z(4, 3, dtype=INT, device="meta")), "on meta"),
    ("out_ids", routing(out_ids=[1]), "is list"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), ROUTINGS)
def test_the_parameter_of_a_routing_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        kernelhub.route_experts(**routing())
        kernelhub.route_experts(z(4, 12), 3)
        kernelhub.route_experts(**routing(correction_bias=z(12), scaling_factor=2.0))
    calls = sum(row.calls for row in kernelhub.report().rows)
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.route_experts(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == calls


SIZES = {"num_experts": 3, "top_k": 2, "hidden_size": 128, "intermediate_size": 128}
E = {
    name: moe_inputs(tokens=4, weights=name, **SIZES)
    for name in ("plain", "fp8_channel", "fp8_block", "nvfp4", "mxint4")
}
X, W13, W2 = (E["plain"][name] for name in ("x", "w13", "w2"))
FP8 = E["fp8_channel"]["w13"]


def plain(**changes: Any) -> dict[str, Any]:
    return E["plain"] | changes


def channel(**changes: Any) -> dict[str, Any]:
    return E["fp8_channel"] | changes


def block(**changes: Any) -> dict[str, Any]:
    return E["fp8_block"] | changes


def nvfp4(**changes: Any) -> dict[str, Any]:
    return E["nvfp4"] | changes


def mxint4(**changes: Any) -> dict[str, Any]:
    return E["mxint4"] | changes


EXPERTS = [
    ("x", plain(x=3), "is int"),
    ("x", plain(x=z(4, 2, 128)), r"\[4, 2, 128\]"),
    ("x", plain(x=z(4, 128).double()), "float64"),
    ("x", plain(x=X.to("meta")), "meta"),
    ("x", plain(x=X.clone().requires_grad_()), "requires grad"),
    ("w13", plain(w13=None), "NoneType"),
    ("w13", plain(w13=W13[0]), r"give \[E, 2I, H\]"),
    ("w13", plain(w13=W13.half()), "give bfloat16, as x"),
    ("w13", plain(w13=W13[..., :64]), r"give \[E, 2I, 128\] for an x 128 wide"),
    ("w13", plain(w13=W13[:, :255]), "even number, gate and up: 256"),
    ("w13", plain(w13=W13.transpose(1, 2).contiguous().transpose(1, 2)), "contiguous along its last dimension"),
    ("w13", plain(w13=W13.to("meta")), "on meta"),
    ("w2", plain(w2=W2[:2]), r"give \[3, 128, 128\], as w13 demands"),
    ("w2", plain(w2=W2[..., :64]), r"give \[3, 128, 128\]"),
    ("w2", plain(w2=FP8[:, :128]), "w13 has bfloat16"),
    ("topk_weights", plain(topk_weights=z(4, 2).half()), "give float32"),
    ("topk_weights", plain(topk_weights=z(4, 3)), r"\[4, 2\]"),
    ("topk_ids", plain(topk_ids=z(4, 2).long()), "give int32"),
    ("topk_ids", plain(topk_ids=z(5, 2, dtype=INT)), r"\[5, 2\]"),
    ("topk_ids", plain(topk_ids=z(4, 0, dtype=INT)), r"\[4, 0\]"),
    ("activation", plain(activation="relu"), "swiglu_oai"),
    ("activation_dtype", plain(activation_dtype=torch.float8_e4m3fn), "give None, bfloat16"),
    ("activation_dtype", channel(activation_dtype=torch.float16), "give None, bfloat16, float8_e4m3fn"),
    ("activation_dtype", nvfp4(activation_dtype=torch.float8_e4m3fn), "give None, bfloat16"),
    ("activation_dtype", plain(activation_dtype="nvfp4"), "is 'nvfp4' for weights plain; give None, bfloat16"),
    ("activation_dtype", nvfp4(activation_dtype="mxfp8"), "give None, bfloat16, 'nvfp4'"),
    ("activation_dtype", nvfp4(activation_dtype="bfloat16"), "give None, bfloat16, 'nvfp4'"),
    ("activation_dtype", block(activation_dtype="fp8"), "float8_e4m3fn, 'fp8_block', 'fp8_block_gate_up'"),
    ("a1_scale", nvfp4(activation_dtype="nvfp4"), "give a1_scale and a2_scale for nvfp4"),
    ("a2_scale", nvfp4(activation_dtype="nvfp4", a1_scale=z(1)), "give both"),
    ("a1_scale", nvfp4(activation_dtype="nvfp4", a1_scale=z(3), a2_scale=z(1)), "one element"),
    ("a1_scale", nvfp4(a1_scale=z(1), a2_scale=z(1)), "only fp8_tensor and fp8_channel"),
    ("a1_scale", block(activation_dtype="fp8_block", a1_scale=z(1), a2_scale=z(1)), "only fp8_tensor"),
    ("alpha", plain(alpha="1"), "finite float"),
    ("limit", plain(limit=float("inf")), "finite float"),
    ("w13_scale", plain(w13_scale=z(3)), "bfloat16 weights have no scale"),
    ("w2_scale", plain(w2_scale=z(3)), "bfloat16 weights have no scale"),
    ("w13_scale", channel(w13_scale=None), r"is None; give float32 \[3\]"),
    ("w2_scale", channel(w2_scale=None), r"give float32 \[3, 128\]"),
    ("w13_scale", channel(w13_scale=z(2, 256)), r"give float32 \[3, 256\] or float32 \[3, 256, 1\]"),
    ("w13_scale", channel(w13_scale=z(3, 256).half()), "float16"),
    ("w2_scale", channel(w2_scale=z(3, 1)), r"for weights fp8_channel"),
    ("w13_scale", block(w13_scale=z(3, 2, 2)), r"give float32 \[3, 2, 1\] for weights fp8_block"),
    ("w2_scale", block(w2_scale=z(3, 1, 1).to(torch.float8_e8m0fnu)), "give float32"),
    ("w13_scale", nvfp4(w13_scale=z(3, 256, 4).to(torch.float8_e4m3fn)), r"\[3, 256, 8\]"),
    ("w13_global_scale", nvfp4(w13_global_scale=None), r"give float32 \[3\] for weights nvfp4"),
    ("w2_global_scale", nvfp4(w2_global_scale=z(2)), r"give float32 \[3\]"),
    ("w2_global_scale", channel(w2_global_scale=z(3)), "weights fp8_channel have none"),
    ("w13_scale", mxint4(w13_scale=z(3, 256, 8).bfloat16()), r"give bfloat16 \[3, 256, 4\] for weights mxint4"),
    ("w2_scale", mxint4(w2_scale=z(3, 128, 4)), r"give bfloat16 \[3, 128, 4\]"),
    ("w2_scale", mxint4(w2_scale=None), r"is None; give bfloat16 \[3, 128, 4\]"),
    ("w13_global_scale", mxint4(w13_global_scale=z(3)), "weights mxint4 have none"),
    ("activation_dtype", mxint4(activation_dtype=torch.float8_e4m3fn), "for weights mxint4; give None, bfloat16"),
    ("activation_dtype", mxint4(activation_dtype="mxfp8"), "for weights mxint4; give None, bfloat16"),
    (
        "w13",
        mxint4(w13=z(3, 256, 16, dtype=INT)),
        r"weight_packed of compressed-tensors is w\.view\(torch\.uint8\) \^ 0x88",
    ),
    ("w13_scale", mxint4(w13_scale=z(3, 256, 4)), r"for 4-bit integers bfloat16 \[3, 256, 4\]"),
    ("w13_scale", mxint4(w13_scale=None), r"for 4-bit integers bfloat16 \[3, 256, 4\]"),
    ("w13", mxint4(w13=z(3, 256, 64, dtype=torch.int8)), "uint8 with two codes of four bits a byte"),
    ("w13_bias", plain(w13_bias=z(3, 128)), r"\[3, 256\]"),
    ("w2_bias", plain(w2_bias=z(3, 128).half()), "float16"),
    ("a1_scale", plain(a1_scale=z(1), a2_scale=z(1)), "only fp8_tensor and fp8_channel"),
    ("a1_scale", block(a1_scale=z(1), a2_scale=z(1)), "only fp8_tensor and fp8_channel"),
    ("a2_scale", channel(a1_scale=z(1)), "give both"),
    ("a2_scale", channel(a1_scale=z(1), a2_scale=z(3)), "one element"),
    ("a1_scale", channel(a1_scale=z(1), a2_scale=z(1), activation_dtype=torch.bfloat16), "only fp8"),
    ("expert_map", plain(expert_map=z(3)), "give int32"),
    ("expert_map", plain(expert_map=z(0, dtype=INT)), r"int32 \[0\]"),
    ("residual", plain(residual=z(4, 128)), "float32"),
    ("residual", plain(residual=X[:3]), r"\[3, 128\]"),
    ("out", plain(out=X[:, :64]), r"\[4, 64\]"),
    ("out", plain(out=[1]), "is list"),
    ("out", plain(out=X.to("meta")), "on meta"),
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize(("parameter", "arguments", "words"), EXPERTS)
def test_the_parameter_of_experts_is_named(parameter: str, arguments: dict[str, Any], words: str, warm: bool) -> None:
    if warm:
        for good in E.values():
            kernelhub.fused_moe(**good)
    calls = sum(row.calls for row in kernelhub.report().rows)
    with pytest.raises(InvalidArgument, match=words) as caught:
        kernelhub.fused_moe(**arguments)
    assert caught.value.parameter == parameter
    assert sum(row.calls for row in kernelhub.report().rows) == calls


def test_sizes_that_no_format_holds_are_refused_with_the_nearest_that_it_does() -> None:
    for weights, sizes, parameter, words in (
        ("fp8_block", {"intermediate_size": 192}, "w13", "pad them to 256"),
        ("mxfp4", {"hidden_size": 144}, "w13", "pad it to 160, a multiple of 32"),
        ("nvfp4", {"intermediate_size": 40}, "w2", "pad it to 48, a multiple of 16"),
        ("mxint4", {"intermediate_size": 48}, "w2", "pad it to 64, a multiple of 32"),
    ):
        good = moe_inputs(tokens=2, weights="plain", **SIZES | sizes)
        arguments = dict(good)
        for name in ("w13", "w2"):
            experts, rows, columns = good[name].shape
            if weights == "fp8_block":
                arguments[name] = good[name].to(torch.float8_e4m3fn)
                arguments[name + "_scale"] = z(experts, -(-rows // 128), -(-columns // 128))
            else:
                groups = {
                    "mxfp4": (32, torch.uint8),
                    "nvfp4": (16, torch.float8_e4m3fn),
                    "mxint4": (32, torch.bfloat16),
                }
                group, dtype = groups[weights]
                arguments[name] = z(experts, rows, columns // 2, dtype=torch.uint8)
                arguments[name + "_scale"] = z(experts, rows, columns // group).to(dtype)
        with pytest.raises(InvalidArgument, match=words) as caught:
            kernelhub.fused_moe(**arguments)
        assert caught.value.parameter == parameter


def test_what_no_kernel_can_do_is_refused_with_reasons() -> None:
    with pytest.raises(NoKernel, match=r"torch\.experts .*not_requested"):
        kernelhub.fused_moe(**E["plain"], backend="torch.sdpa")
    for weights in ("mxfp4", "mxint4"):
        selection = kernelhub.explain("fused_moe", device="H200", weights=weights, dtype="float16", backend="triton")
        assert any("exceeds float16" in item.reason for d in selection.decisions for item in d.rejections)
    with pytest.raises(NoKernel, match="not exact in bfloat16"):
        kernelhub.fused_moe(**E["mxint4"], backend="cpp.experts")
