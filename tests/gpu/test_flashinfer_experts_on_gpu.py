"""FlashInfer's experts with packed weights on the device: only what is built ahead, and binaries that are here, run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer.moe import mixed
from kernelhub.errors import NoKernel
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.tolerance import compare
from tests.gpu.test_flashinfer_products_on_gpu import nothing_is_downloaded

__all__ = ["nothing_is_downloaded"]

pytestmark = pytest.mark.gpu

GPT_OSS = {"model": "gpt-oss-120b", "num_experts": 32, "tensor_parallel": 2}
QWEN3 = {"model": "qwen3-30b-a3b", "num_experts": 64}
LAYER = tuple(side + part for part in ("", "_scale", "_global_scale", "_bias") for side in ("w13", "w2"))
KERNELS: dict[str, dict[str, Any]] = {
    "flashinfer.cutlass_experts_mxfp4": GPT_OSS,
    "flashinfer.trtllm_experts": QWEN3,
    "flashinfer.trtllm_experts_fp8": QWEN3 | {"weights": "fp8_tensor"},
    "flashinfer.trtllm_experts_mxfp4": GPT_OSS,
    "flashinfer.trtllm_experts_mxfp8": GPT_OSS | {"activation_dtype": "mxfp8"},
    "flashinfer.cutlass_experts_mxfp8": GPT_OSS | {"activation_dtype": "mxfp8"},
    "flashinfer.trtllm_experts_mxfp8_blocks": QWEN3 | {"weights": "fp8_block_ue8m0", "activation_dtype": "mxfp8"},
    "flashinfer.trtllm_experts_nvfp4": QWEN3 | {"weights": "nvfp4", "activation_dtype": "nvfp4"},
    "flashinfer.cutlass_experts_nvfp4": QWEN3 | {"weights": "nvfp4", "activation_dtype": "nvfp4"},
    "flashinfer.trtllm_experts_mxint4": {"model": "deepseek-v3.2", "num_experts": 32, "weights": "mxint4"},
}


def inputs(kernel: str, tokens: int, **changes: Any) -> dict[str, Any]:
    arguments = moe_inputs(tokens=tokens, device="cuda", **KERNELS[kernel] | changes)
    if kernel.endswith("_fp8"):
        arguments |= {name: torch.tensor(3.0 / 448, device="cuda") for name in ("a1_scale", "a2_scale")}
    return arguments


def plan_of(kernel: str, arguments: dict[str, Any]) -> Any:
    """A plan, or a skip with the reason that none can be made."""
    try:
        return kernelhub.fused_moe.prepare(**arguments, backend=kernel)
    except NoKernel as error:
        pytest.skip(str(error)[:400])


@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17, 64, 256, 257, 3000])
@pytest.mark.parametrize("kernel", KERNELS)
def test_numbers(kernel: str, tokens: int) -> None:
    """Few tokens and many, since they are sorted in other ways; an expert that is chosen twice; ids outside; a map."""
    arguments = inputs(kernel, tokens)
    plan = plan_of(kernel, arguments)
    ids = arguments["topk_ids"]
    for change in (lambda: None, lambda: ids[:, 1].copy_(ids[:, 0]), lambda: ids[::2, 2].fill_(-1)):
        change()
        step = (arguments["x"], arguments["topk_weights"], ids)
        out = torch.full_like(arguments["x"], torch.nan)
        plan.run(*step, out=out)
        agreement = compare(out, arguments)
        assert agreement.ok, str(agreement)
        assert torch.equal(plan.run(*step), out)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_rank_s_share(kernel: str) -> None:
    arguments = inputs(kernel, 33)
    experts = arguments["w13"].shape[0]
    table = torch.full((2 * experts,), -1, dtype=torch.int32, device="cuda")
    table[1::2] = torch.arange(experts, dtype=torch.int32, device="cuda")
    arguments |= {"expert_map": table, "topk_ids": 2 * arguments["topk_ids"] + (arguments["topk_ids"] % 3 != 0).int()}
    plan = plan_of(kernel, arguments)
    agreement = compare(plan.run(arguments["x"], arguments["topk_weights"], arguments["topk_ids"]), arguments)
    assert agreement.ok, str(agreement)


@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_weights_come_back(kernel: str) -> None:
    arguments = inputs(kernel, 3)
    plan = plan_of(kernel, arguments)
    packed = plan.pack(**{name: arguments[name] for name in LAYER if arguments.get(name) is not None})
    for side, weight in zip(("w13", "w2"), packed, strict=True):
        for part, got in zip(("", "_scale", "_global_scale", "_bias"), weight.unpack(), strict=True):
            want = arguments.get(side + part)
            assert (got is None) == (want is None)
            if want is not None:
                assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.endswith(("_mxfp4", "_mxfp8"))])
@pytest.mark.parametrize("changes", [{"activation": "silu"}, {"bias": False}, {"tensor_parallel": 1, "num_experts": 8}])
def test_other_experts_of_mxfp4(kernel: str, changes: dict[str, Any]) -> None:
    arguments = inputs(kernel, 20, **changes)
    plan = plan_of(kernel, arguments)
    agreement = compare(plan.run(arguments["x"], arguments["topk_weights"], arguments["topk_ids"]), arguments)
    assert agreement.ok, str(agreement)


def test_codes_are_interleaved_as_the_library_does() -> None:
    kernel = "flashinfer.cutlass_experts_mxfp4"
    plan_of(kernel, inputs(kernel, 1))
    from flashinfer.fused_moe import interleave_moe_weights_for_sm90_mixed_gemm

    codes = torch.randint(0, 256, (3, 256, 192), dtype=torch.uint8, device="cuda")
    assert torch.equal(mixed.interleaved(codes), interleave_moe_weights_for_sm90_mixed_gemm(codes, "fp4"))
