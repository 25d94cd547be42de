"""The contracts of `fp8_gemm` and `bmm_fp8` catch kernels that lie: each of these is right but for one defect."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernelhub.backends.torch.gemm.fp8.dequantized import Dequantized, DequantizedBatch
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.ops.formats import E4M3
from tests.contract.bmm_fp8 import BmmFp8Contract
from tests.contract.fp8_gemm import EveryScaling
from tests.contract.lies import lies_of
from tests.contract.test_liars import failures
from tests.dispatch.backends import register


class Lie(EveryScaling):
    """The contract over one of the kernels below, on a third of the cases, for a test that collects none of it."""

    kernel = "liar.k"
    device = "cpu"
    __test__ = False

    @classmethod
    def accepted_cases(cls):
        return super().accepted_cases()[::3]


class Truth(Dequantized):
    pass


class ForgetsTheBias(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        super().launch(a, b, a_scale, b_scale, None, out)


class ForgetsTheScaleOfA(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        ones = torch.full_like(a_scale.float(), 1.0).to(a_scale.dtype)
        super().launch(a, b, ones, b_scale, bias, out)


class SharesTheScalesOfTheFirstRow(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        first = a_scale[:1].expand_as(a_scale) if a_scale.ndim else a_scale
        super().launch(a, b, first, b_scale, bias, out)


class TakesScalesOfTheNextBlock(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        if b_scale.ndim == 2:
            b_scale = (
                b_scale.view(torch.uint8 if b_scale.itemsize == 1 else b_scale.dtype).roll(1, 1).view(b_scale.dtype)
            )
        super().launch(a, b, a_scale, b_scale, bias, out)


class LastScaleOfBIsThatBefore(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        if b_scale.ndim and b_scale.shape[0] > 1:
            b_scale = b_scale.clone()
            b_scale[-1] = b_scale[-2]
        super().launch(a, b, a_scale, b_scale, bias, out)


class SwapsTheScalesOfRows(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        if self.problem.scaling == "row" and a_scale.numel() == b_scale.numel():
            a_scale, b_scale = b_scale, a_scale
        elif a_scale.ndim and a_scale.shape[0] > 1:
            raw = a_scale.view(torch.uint8 if a_scale.itemsize == 1 else a_scale.dtype)
            a_scale = raw.flip(0).view(a_scale.dtype)
        super().launch(a, b, a_scale, b_scale, bias, out)


class MissesTheTailOfK(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        k = a.shape[1]
        if k % 16:
            a = a.clone()
            a.view(torch.uint8)[:, k // 16 * 16 :] = 0
        super().launch(a, b, a_scale, b_scale, bias, out)


class LeavesTheLastRowUnwritten(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        super().launch(a, b, a_scale, b_scale, bias, out)
        out[-1:] = torch.nan


class OnePercentTooMuch(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        super().launch(a, b, a_scale, b_scale, bias, out)
        out *= 1.01


class OneRowOnePercentTooMuch(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        super().launch(a, b, a_scale, b_scale, bias, out)
        out[0] *= 1.01


class OneWrongElement(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        super().launch(a, b, a_scale, b_scale, bias, out)
        out[0, 0] *= 1.03


class AddsUpInBfloat16(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        super().launch(a, b, a_scale, b_scale, bias, out)
        out.copy_(out.bfloat16())


class FlushesSubnormals(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        raw = b.view(torch.uint8)
        super().launch(a, torch.where((raw & 0x7F) < 8, 0, raw).view(E4M3), a_scale, b_scale, bias, out)


class TakesNanForANumber(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        raw = b.view(torch.uint8)
        super().launch(a, torch.where((raw & 0x7F) == 0x7F, 0x7E, raw).view(E4M3), a_scale, b_scale, bias, out)


class IgnoresStrides(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        flat = b.view(torch.uint8).as_strided((b.numel(),), (1,), b.storage_offset()).view(b.shape).view(E4M3)
        super().launch(a, flat, a_scale, b_scale, bias, out)


class OtherBitsEachTime(Dequantized):
    def launch(self, a, b, a_scale, b_scale, bias, out):
        super().launch(a, b, a_scale, b_scale, bias, out)
        out *= 1 + 0.005 * torch.rand(()).to(out.dtype)


@pytest.mark.parametrize(
    "lie", [lie for lie in Dequantized.__subclasses__() if lie.__module__ == __name__], ids=lambda lie: lie.__name__
)
def test_products_that_lie_are_caught(lie) -> None:
    facets = anything("device", "scaling", "n", "k", "rows", "out_dtype", "a_scale_dtype", "b_scale_dtype")
    target = f"{__name__}:{lie.__name__}"
    record = Kernel("fp8_gemm", "liar.k", target, "lies", Band.PLUGIN, (facets,), frozenset({"bias"}))
    register("liar", dataclasses.replace(record, deterministic=True))
    assert bool(failures(Lie, "liar.k", "cpu")) == (lie is not Truth)


class BatchLie(BmmFp8Contract):
    """The contract over one of the kernels below, for a test that collects no cases of it."""

    kernel = "liar.k"
    device = "cpu"
    __test__ = False


class TrueBatch(DequantizedBatch):
    pass


class SharesTheScaleOfTheFirst(DequantizedBatch):
    def launch(self, a, b, a_scale, b_scale, out):
        super().launch(a, b, a_scale.reshape(-1)[:1], b_scale.reshape(-1)[:1], out)


class SwapsTheScales(DequantizedBatch):
    def launch(self, a, b, a_scale, b_scale, out):
        super().launch(a, b, a_scale.flip(0) if a_scale.ndim else a_scale, b_scale, out)


class SharesTheMatrixOfTheFirst(DequantizedBatch):
    def launch(self, a, b, a_scale, b_scale, out):
        super().launch(a, b[:1].expand_as(b), a_scale, b_scale, out)


class MissesTheLastColumn(DequantizedBatch):
    def launch(self, a, b, a_scale, b_scale, out):
        a = a.clone()
        a.view(torch.uint8)[..., -1] = 0
        super().launch(a, b, a_scale, b_scale, out)


class LastMatrixOnePercentTooMuch(DequantizedBatch):
    def launch(self, a, b, a_scale, b_scale, out):
        super().launch(a, b, a_scale, b_scale, out)
        out[-1] *= 1.01


class LeavesTheLastMatrixUnwritten(DequantizedBatch):
    def launch(self, a, b, a_scale, b_scale, out):
        super().launch(a, b, a_scale, b_scale, out)
        out[-1:] = torch.nan


@pytest.mark.parametrize("lie", lies_of(DequantizedBatch, __name__), ids=lambda lie: lie.__name__)
def test_batches_that_lie_are_caught(lie) -> None:
    facets = anything("device", "a_scaling", "b_scaling", "n", "k", "out_dtype")
    register("liar", Kernel("bmm_fp8", "liar.k", f"{__name__}:{lie.__name__}", "lies", Band.PLUGIN, (facets,)))
    assert bool(failures(BatchLie, "liar.k", "cpu")) == (lie is not TrueBatch)
