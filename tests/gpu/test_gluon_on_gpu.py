"""The whole contracts of the Gluon kernels of attention, on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.testing import OpContract
from tests.conftest import DEVICE
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
    rich = PagedContract.rich | {"kv_scale": "head"}


class TestDecodeOfLists(OpContract):
    op, kernel, device = "mla_attention", "gluon.decode_listed", DEVICE
