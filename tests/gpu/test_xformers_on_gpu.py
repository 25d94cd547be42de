"""xformers' operators on a GPU, where xformers is installed: the contract, and queries that see no key."""

from __future__ import annotations

from typing import ClassVar

import pytest

import kernelhub
from kernelhub.ops.attention.inputs import AttentionModel, attention_inputs
from tests.contract.attention import DenseContract
from tests.gpu.test_flash_attn_on_gpu import OnThisGpu, agrees, need

pytestmark = pytest.mark.gpu

GROUPED = AttentionModel("grouped", 8, 2, 128, 128)


class TestFlash(OnThisGpu, DenseContract):
    kernel = "xformers.flash"
    fewest_cases: ClassVar[int] = 25


class TestCutlass(OnThisGpu, DenseContract):
    kernel = "xformers.cutlass"
    fewest_cases: ClassVar[int] = 25


@pytest.mark.parametrize("kernel", ["xformers.flash", "xformers.cutlass"])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_that_see_no_key(kernel, causal) -> None:
    need("attention", kernel)
    for q_lens, kv_lens in (((170, 5, 0, 3), (90, 5, 4, 300)), ((1, 0, 1), (4, 2, 1)), ((2, 3), (0, 0))):
        arguments = attention_inputs(GROUPED, q_lens=q_lens, kv_lens=kv_lens, device="cuda") | {"causal": causal}
        agrees(kernelhub.attention(**arguments, backend=kernel), arguments)
