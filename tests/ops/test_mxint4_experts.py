"""Experts of integers of four bits: what a checkpoint of Kimi K2 holds, multiplied in float64 with nothing of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.tolerance import compare
from tests.conftest import DEVICE

EXPERTS, HIDDEN, INNER = 4, 96, 64


def checkpoint(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """compressed-tensors' weight_packed int32 [E, N, K / 8] and weight_scale, and the weights they stand for."""
    integers = torch.randint(-8, 8, (EXPERTS, rows, columns))
    eights = (integers + 8).unflatten(2, (-1, 8))
    words = sum(eights[..., place] << 4 * place for place in range(8))
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    scale = ((torch.rand(EXPERTS, rows, columns // 32) + 0.5) / columns**0.5 / 4).bfloat16()
    return packed, scale, integers.double() * scale.double().repeat_interleave(32, 2)


def layer() -> tuple[dict[str, Any], Tensor, Tensor]:
    (first, w13_scale, w13), (second, w2_scale, w2) = checkpoint(2 * INNER, HIDDEN), checkpoint(HIDDEN, INNER)
    taken = {name: packed.view(torch.uint8) ^ 0x88 for name, packed in (("w13", first), ("w2", second))}
    given = taken | {"w13_scale": w13_scale, "w2_scale": w2_scale}
    return {name: tensor.to(DEVICE) for name, tensor in given.items()}, w13.to(DEVICE), w2.to(DEVICE)


def by_hand(step: dict[str, Tensor], w13: Tensor, w2: Tensor) -> Tensor:
    out = torch.zeros(step["x"].shape, dtype=torch.float64, device=DEVICE)
    for token, row in enumerate(step["x"].double()):
        for expert, weight in zip(step["topk_ids"][token].tolist(), step["topk_weights"][token].double(), strict=True):
            gate, up = (w13[expert] @ row).chunk(2)
            out[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


def step_of(dtype: torch.dtype) -> dict[str, Tensor]:
    sizes = {"num_experts": EXPERTS, "top_k": 2, "hidden_size": HIDDEN, "intermediate_size": INNER}
    made = moe_inputs(tokens=6, weights="plain", dtype=dtype, device=DEVICE, **sizes)
    return {name: made[name] for name in ("x", "topk_weights", "topk_ids")}


def test_a_checkpoint_s_weights_mean_what_they_stand_for() -> None:
    given, w13, w2 = layer()
    step = step_of(torch.float32)
    want = by_hand(step, w13, w2)
    in_float32, in_float64 = (
        kernelhub.fused_moe.reference(**step, **given, dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    # What joins gate and up is rounded to the dtype of the tokens, also in the reference in float64.
    torch.testing.assert_close(in_float64, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(in_float32.double(), in_float64, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kernelhub.fused_moe(**step, **given).double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_selected_kernel_agrees(dtype: torch.dtype) -> None:
    given, _, _ = layer()
    arguments = step_of(dtype) | given
    selection = kernelhub.fused_moe.explain(**arguments)
    assert (selection.problem.weights, selection.problem.activation_dtype) == ("mxint4", str(dtype)[6:])
    plan = kernelhub.fused_moe.prepare(**arguments)
    out = plan.run(arguments["x"], arguments["topk_weights"], arguments["topk_ids"])
    assert compare(out, arguments).ok
    assert torch.equal(out, kernelhub.fused_moe(**arguments))
    w13, w2 = plan.pack(**given)
    for packed, name in ((w13, "w13"), (w2, "w2")):
        weight, scale, global_scale, bias = packed.unpack()
        assert torch.equal(weight, given[name])
        assert torch.equal(scale, given[f"{name}_scale"])
        assert global_scale is bias is None


def test_one_projection_in_another_format_is_refused() -> None:
    given, _, _ = layer()
    arguments = step_of(torch.bfloat16) | given
    other = torch.ones(EXPERTS, HIDDEN, INNER // 32, device=DEVICE).to(torch.float8_e8m0fnu)
    with pytest.raises(InvalidArgument, match="for weights mxint4") as caught:
        kernelhub.fused_moe(**arguments | {"w2_scale": other})
    assert caught.value.parameter == "w2_scale"
    if hasattr(torch, "float4_e2m1fn_x2"):
        pairs = {name: arguments[name].view(torch.float4_e2m1fn_x2) for name in ("w13", "w2")}
        with pytest.raises(InvalidArgument, match="for weights mxfp4"):
            kernelhub.fused_moe(**arguments | pairs)
