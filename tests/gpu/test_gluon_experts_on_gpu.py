"""What only a GPU can show of Gluon's experts: their contract, real sizes, the same bits again, a captured call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import BLOCK_FORMATS, FP8_BLOCK, PLAIN
from kernelhub.ops.moe.experts.tolerance import compare
from tests.contract.experts import ExpertsContract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="sm_90 only"
    ),
]
KERNELS = {FP8_BLOCK: "gluon.experts", PLAIN: "gluon.experts_halves"}
formats = pytest.mark.parametrize("weights", KERNELS)


class TestExperts(ExpertsContract):
    kernel = KERNELS[FP8_BLOCK]
    weights = "fp8_block"
    wide = False
    formats = BLOCK_FORMATS


class TestExpertsOfHalves(ExpertsContract):
    kernel = KERNELS[PLAIN]
    formats = (PLAIN,)
    widest = torch.float16


def layer(weights: str, tokens: int, **sizes: Any) -> dict[str, Any]:
    small = {"num_experts": 16, "top_k": 4, "hidden_size": 512, "intermediate_size": 256}
    return moe_inputs(tokens=tokens, weights=weights, device="cuda", **small | sizes)


def agrees(out: torch.Tensor, arguments: dict[str, Any]) -> None:
    agreement = compare(out, arguments)
    assert agreement.ok, str(agreement)


@formats
@pytest.mark.parametrize("tokens", [1, 33, 700])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3.2"])
def test_real_widths_are_right(weights: str, model: str, tokens: int) -> None:
    arguments = moe_inputs(model, tokens=tokens, num_experts=16, weights=weights, device="cuda")
    agrees(kernelhub.fused_moe(**arguments, backend=KERNELS[weights]), arguments)


@formats
@pytest.mark.parametrize("tokens", [40, 999])
def test_a_thousand_calls_give_the_same_bits(weights: str, tokens: int) -> None:
    arguments = layer(weights, tokens)
    want = kernelhub.fused_moe(**arguments, backend=KERNELS[weights])
    out, unequal = torch.empty_like(want), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out.zero_()
        kernelhub.fused_moe(**arguments, out=out, backend=KERNELS[weights])
        unequal += (out != want).any()
    assert int(unequal) == 0


@formats
@pytest.mark.parametrize("tokens", [3, 600, 2500])
def test_a_captured_call_reads_the_ids_of_each_replay(weights: str, tokens: int) -> None:
    arguments = layer(weights, tokens)
    out = kernelhub.fused_moe(**arguments, backend=KERNELS[weights])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernelhub.fused_moe(**arguments, out=out, backend=KERNELS[weights])
    ids = arguments["topk_ids"]
    for spread in ("even", "one", "none of some"):
        arguments["x"].normal_()
        ids.copy_(torch.rand(tokens, 16, device="cuda").topk(4, 1).indices)
        if spread == "one":
            ids.fill_(-1)
            ids[:, 0] = 7
        elif spread == "none of some":
            ids.copy_(ids % 5 - 1)
        out.fill_(torch.nan)
        graph.replay()
        agrees(out, arguments)


@formats
def test_more_tokens_than_a_round_has(weights: str) -> None:
    arguments = layer(weights, 40_000, top_k=8, hidden_size=2048, intermediate_size=128)
    out = kernelhub.fused_moe(**arguments, backend=KERNELS[weights])
    for part in (slice(0, 50), slice(32_700, 32_800), slice(39_950, 40_000)):
        some = arguments | {name: arguments[name][part] for name in ("x", "topk_weights", "topk_ids")}
        agrees(out[part], some)
