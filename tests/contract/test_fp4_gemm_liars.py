"""The contract of `fp4_gemm` catches kernels that lie: each of these is the right one with one defect."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernelhub.backends.torch.gemm.fp4.dequantised import Dequantised
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from tests.contract.fp4_gemm import Fp4GemmContract
from tests.contract.lies import lies_of
from tests.contract.test_liars import failures
from tests.dispatch.backends import register


class Subject(Fp4GemmContract):
    """A contract over the liars, on a third of the cases, for a test that collects none of it."""

    kernel = "liar.k"
    device = "cpu"
    __test__ = False

    @classmethod
    def accepted_cases(cls):
        return super().accepted_cases()[::3]


class Truth(Dequantised):
    pass


class TwoPercentTooMuch(Dequantised):
    def launch(self, a, b, bias, out):
        super().launch(a, b, bias, out)
        out.mul_(1.02)


class SwapsTheNibbles(Dequantised):
    def launch(self, a, b, bias, out):
        super().launch(a, dataclasses.replace(b, codes=(b.codes >> 4) | (b.codes << 4)), bias, out)


class TakesTheScaleOfTheNextGroup(Dequantised):
    def launch(self, a, b, bias, out):
        scale = b.scale.view(torch.uint8).roll(1, 1).view(b.scale.dtype)
        super().launch(a, dataclasses.replace(b, scale=scale), bias, out)


class TakesTheScaleOfTheFirstRow(Dequantised):
    def launch(self, a, b, bias, out):
        if a.scale is not None and a.scale.dtype is torch.float32:
            a = dataclasses.replace(a, scale=a.scale[:1])
        super().launch(a, b, bias, out)


class ForgetsTheGlobalScale(Dequantised):
    def launch(self, a, b, bias, out):
        super().launch(dataclasses.replace(a, global_scale=None), b, bias, out)


class ForgetsTheBias(Dequantised):
    def launch(self, a, b, bias, out):
        super().launch(a, b, None, out)


class RoundsActivationsToE4m3(Dequantised):
    def launch(self, a, b, bias, out):
        if a.scale is None:
            a = dataclasses.replace(a, codes=a.codes.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(a.codes.dtype))
        super().launch(a, b, bias, out)


class MissesTheLastGroup(Dequantised):
    def launch(self, a, b, bias, out):
        codes = b.codes.clone()
        codes[:, -8:] = 0
        super().launch(a, dataclasses.replace(b, codes=codes), bias, out)


class MissesTheLastColumn(Dequantised):
    def launch(self, a, b, bias, out):
        before = out[:, -1:].clone()
        super().launch(a, b, bias, out)
        out[:, -1:] = before


class OneWrongElement(Dequantised):
    def launch(self, a, b, bias, out):
        super().launch(a, b, bias, out)
        out[-1, -1] *= 1.1


class HidesNan(Dequantised):
    def launch(self, a, b, bias, out):
        super().launch(a, b, bias, out)
        out.nan_to_num_()


@pytest.mark.parametrize("lie", lies_of(Dequantised, __name__), ids=lambda lie: lie.__name__)
def test_products_that_lie_are_caught(lie) -> None:
    constraints = (anything("device", "a_format", "b_format", "out_dtype", "n", "k"),)
    target = f"{__name__}:{lie.__name__}"
    register("liar", Kernel("fp4_gemm", "liar.k", target, "lies", Band.PLUGIN, constraints, frozenset({"bias"})))
    assert bool(failures(Subject, "liar.k", "cpu")) == (lie is not Truth)
