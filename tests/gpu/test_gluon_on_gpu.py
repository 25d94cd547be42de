"""The whole contracts of the Gluon kernels of attention, on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernelhub.ops.models.shapes import AttentionModel
from tests.contract.attention import DenseContract, PagedContract
from tests.contract.mla_attention import MlaContract

pytestmark = pytest.mark.gpu
WIDE = AttentionModel("four heads of 128", 4, 2, 128, 128)  # gluon.prefill takes no heads of 64


class TestPrefill(DenseContract):
    kernel = "gluon.prefill"
    model = WIDE


class TestPagedPrefill(PagedContract):
    kernel = "gluon.prefill"
    model = WIDE
    rich = PagedContract.plain | {"q_lens": 3}


class TestPrefillAny(DenseContract):
    kernel = "gluon.prefill_any"


class TestPagedPrefillAny(PagedContract):
    kernel = "gluon.prefill_any"


class TestDecode(MlaContract):
    kernel = "gluon.decode"
    widths = (512, 64)
    page_size = 64
    fewest_cases = 10


class TestPagedPrefillOfFloat8(PagedContract):
    kernel = "gluon.prefill_fp8"
    widest = torch.float16
    plain = PagedContract.plain | {"kv_scale": "tensor"}
    rich = PagedContract.plain | {"q_lens": 3, "causal": True, "kv_scale": "head"}

    def test_queries_may_have_any_size_and_factors_any_sign(self) -> None:
        for row, factor in ((0.0, 1e-33), (1e-38, -1e-33), (1e36, 1e-33), (0.0, 0.0), (1.0, -1.0)):
            arguments = self.inputs(**self.rich)
            arguments["q"][0, 1], arguments["q"][2, 0] = (
                row,
                arguments["q"][2, 0] * (1e30 if 0 < abs(factor) < 1 else 1.0),
            )
            arguments["k_scale"] = arguments["k_scale"] * factor
            self.check(self.run(arguments), arguments)


class TestDecodeOfLists(MlaContract):
    kernel = "gluon.decode_listed"
    widths = (512, 64)
    fewest_cases = 10
    lists_all = True
