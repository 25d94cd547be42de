"""FlashAttention-2 that torch ships, called as an operator, on a GPU: the contract, graphs, syncs."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.ops.attention.inputs import attention_inputs
from kernelhub.ops.models.shapes import AttentionModel
from tests.contract.attention import DenseContract
from tests.gpu.test_attention_on_gpu import captured
from tests.gpu.test_cutlass_on_gpu import without_syncs
from tests.gpu.test_flash_attn_on_gpu import OnThisGpu, agrees, need

pytestmark = pytest.mark.gpu

KERNEL = "torch.varlen_attn"
GROUPED = AttentionModel("grouped", 8, 2, 128, 128)


class TestContract(OnThisGpu, DenseContract):
    kernel = KERNEL


@pytest.fixture
def installed() -> None:
    need("attention", KERNEL)


@pytest.mark.usefixtures("installed")
class TestCalls:
    @pytest.mark.parametrize("ragged", [False, True])
    def test_a_captured_call_sees_new_operands(self, ragged) -> None:
        sizes = {"q_lens": (300, 1, 70), "kv_lens": (300, 80, 70)} if ragged else {"batch": 2, "q_tokens": 200}
        arguments = attention_inputs(GROUPED, **sizes, device="cuda") | {"causal": True}
        out = torch.empty_like(arguments["q"])
        graph = captured(lambda: kernelhub.attention(**arguments, backend=KERNEL, out=out))
        for name in "qkv":
            arguments[name].normal_()
        if ragged:
            arguments["cu_seqlens_q"].copy_(torch.tensor((0, 1, 301, 371)))
        out.fill_(torch.nan)
        graph.replay()
        agrees(out, arguments)

    def test_no_call_waits_for_the_gpu(self) -> None:
        arguments = attention_inputs(GROUPED, q_lens=(70, 5), kv_lens=(70, 90), device="cuda")
        agrees(without_syncs(lambda: kernelhub.attention(**arguments, backend=KERNEL)), arguments)

    @pytest.mark.parametrize("width", [8, 40, 64, 72, 96, 128, 160, 192, 224, 256])
    def test_every_tile_of_widths(self, width) -> None:
        model = AttentionModel("grouped", 8, 2, width, width)
        arguments = attention_inputs(model, q_lens=(70, 5, 130), kv_lens=(70, 90, 130), device="cuda")
        arguments |= {"causal": True}
        agrees(kernelhub.attention(**arguments, backend=KERNEL), arguments)

    def test_the_same_call_gives_the_same_bits(self) -> None:
        arguments = attention_inputs(GROUPED, q_lens=(700, 5), kv_lens=(700, 900), device="cuda")
        first = kernelhub.attention(**arguments, backend=KERNEL)
        assert all(torch.equal(kernelhub.attention(**arguments, backend=KERNEL), first) for _ in range(20))
