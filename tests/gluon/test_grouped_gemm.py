"""The Gluon grouped products in the emulator: their contract."""

from __future__ import annotations

from tests.contract.grouped_gemm import GroupedGemmContract
from tests.gluon.emulated import Emulated


class TestGroupedFp8(Emulated, GroupedGemmContract):
    kernel = "emulated.grouped_fp8"
    quick = True
    formats = ("block", "tensor")


class TestGroupedHalves(Emulated, GroupedGemmContract):
    kernel = "emulated.grouped_halves"
    quick = True
    formats = ("bfloat16",)
