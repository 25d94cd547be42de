"""Why FlashInfer's other mixtures of experts are not `fused_moe`'s default: what they round, and how far off.

Each model differs from the reference by the one rounding that the library's source shows (0.6.18.post1), sums being
exact; so its error is the least that the kernel can have. Figures are in units of what `fused_moe` allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelhub.backends.flashinfer import kernels as records
from kernelhub.dispatch.constraint import OneOf
from kernelhub.ops.formats import to_e4m3
from kernelhub.ops.moe.experts.activations import Activations
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import ASKED_FORMATS
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.ops.moe.experts.weights import dequantized, matrix
from tests.contract.experts import PLAIN

Rounding = Callable[[Tensor], Tensor]
SIZES = {"model": PLAIN, "num_experts": 4, "hidden_size": 512, "intermediate_size": 256, "tokens": 48}


def as_given(values: Tensor) -> Tensor:
    return values


def bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().double()


def fp8_by_128(values: Tensor) -> Tensor:
    return Activations("float8_e4m3fn", True).rounded(values, None, torch.float64)


def by_reciprocals(values: Tensor) -> Tensor:
    groups = values.float().unflatten(-1, (-1, 128))
    largest = groups.abs().amax(-1, keepdim=True)
    factor = torch.where(largest > 0, 448 / largest, 1.0)
    return (to_e4m3(groups * factor).double() / factor.double()).flatten(-2)


def mxfp8(values: Tensor) -> Tensor:
    groups = values.unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448).log2().ceil().exp2()
    return (to_e4m3((groups / scale).float()).double() * scale).flatten(-2)


def nvfp4(values: Tensor) -> Tensor:
    """With the best second scale, that of each row."""
    most = values.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (6 * 448)
    groups = values.unflatten(-1, (-1, 16))
    scale = to_e4m3((groups.abs().amax(-1) / 6 / most).float()).double() * most
    codes = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    sizes = (groups / scale.clamp(min=1e-30).unsqueeze(-1)).abs()
    nearest = codes[(sizes.unsqueeze(-1) - codes).abs().argmin(-1)]
    return (nearest.copysign(groups) * scale.unsqueeze(-1)).flatten(-2)


def modelled(arguments: dict[str, Any], weights: str, tokens: Rounding, halves: Rounding, inner: Rounding) -> Tensor:
    """The op with these roundings of the tokens, of gate and up each, and of what they join to."""
    first, second = (
        matrix(weights, *(arguments.get(side + part) for part in ("", "_scale", "_global_scale", "_bias")))
        for side in ("w13", "w2")
    )
    x = arguments["x"]
    result = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(arguments["w13"].shape[0]):
        rows, places = torch.nonzero(arguments["topk_ids"] == expert, as_tuple=True)
        both = tokens(x[rows].double()) @ dequantized(weights, first, expert, torch.float64).T
        gate, up = (halves(half) for half in both.chunk(2, 1))
        joined = inner(gate * gate.sigmoid() * up)
        down = joined @ dequantized(weights, second, expert, torch.float64).T
        result.index_add_(0, rows, down * arguments["topk_weights"][rows, places].double().unsqueeze(1))
    return result


def rounded_first(inner: Rounding) -> Rounding:
    """As the contract has it: to the dtype of the tokens, then to fp8."""
    return lambda values: inner(bfloat16(values))


CONTRACT = {
    "fp8_block": (fp8_by_128, as_given, rounded_first(fp8_by_128)),
    "fp8_block_ue8m0": (fp8_by_128, as_given, rounded_first(fp8_by_128)),
    "nvfp4": (as_given, as_given, bfloat16),
    "mxfp4": (as_given, as_given, bfloat16),
}
REFUSED = [
    ("trtllm fp8 in blocks", "fp8_block", (fp8_by_128, fp8_by_128, fp8_by_128), 2.3),
    ("MXFP8 for blocks of powers of two", "fp8_block_ue8m0", (mxfp8, as_given, mxfp8), 2.0),
    ("NVFP4 tokens", "nvfp4", (nvfp4, as_given, nvfp4), 20.0),
    ("MXFP8 tokens of MXFP4", "mxfp4", (mxfp8, as_given, mxfp8), 5.0),
]


@pytest.mark.parametrize("weights", CONTRACT)
def test_the_model_without_more_rounding_is_the_contract(weights) -> None:
    arguments = moe_inputs(**SIZES, weights=weights)
    assert compare(modelled(arguments, weights, *CONTRACT[weights]).bfloat16(), arguments).ok


@pytest.mark.parametrize(("mode", "weights", "roundings", "least"), REFUSED, ids=[mode for mode, *_ in REFUSED])
def test_what_the_kernel_rounds_is_more_than_is_allowed(mode, weights, roundings, least) -> None:
    arguments = moe_inputs(**SIZES, weights=weights)
    agreement = compare(modelled(arguments, weights, *roundings).bfloat16(), arguments)
    print(mode, agreement)
    assert agreement.overall > least, str(agreement)


@pytest.mark.parametrize(("top_k", "inner"), [(1, 128), (8, 768)])
def test_cutlass_s_blocks_of_fp8_are_too_far_off_for_some_tokens(top_k, inner) -> None:
    """It rounds gate and up to bfloat16, and multiplies by the reciprocal of a scale where the contract divides by it.

    Values that lie between two codes go the other way then: of bfloat16 tokens many at once, as their quotients are
    simple. Either alone may be within what is allowed; no number of groups brings both below.
    """
    errors = []
    for seed in range(6):
        sizes = {"num_experts": 10, "top_k": top_k, "intermediate_size": inner, "tokens": 7}
        arguments = moe_inputs(**SIZES | sizes, weights="fp8_block", seed=seed)
        made = modelled(arguments, "fp8_block", by_reciprocals, bfloat16, rounded_first(by_reciprocals))
        errors.append(compare(made.bfloat16(), arguments).overall)
    print("cutlass fp8 in blocks", errors)
    assert max(errors) > 1.05, errors


@pytest.mark.parametrize("weights", ["fp8_block", "fp8_block_ue8m0", "nvfp4", "fp8_channel"])
def test_no_record_takes_them_unless_a_format_is_requested(weights) -> None:
    for kernel in records.KERNELS:
        if kernel.op == "fused_moe":
            takes, activations = (
                next((item for item in kernel.constraints if getattr(item, "field", "") == field), None)
                for field in ("weights", "activation_dtype")
            )
            assert isinstance(takes, OneOf)
            if weights in takes.values:
                assert isinstance(activations, OneOf)
                assert set(activations.values) <= set(ASKED_FORMATS)
                assert repr(activations.values[0]) in activations.remedy
