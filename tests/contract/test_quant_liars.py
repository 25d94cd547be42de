"""The contract of the quantisers catches kernels that lie: each of these is the right one with one defect."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch

from kernelhub.backends.torch.quant import quantize as right
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.ops import functions
from tests.contract.quant import QuantizeContract
from tests.dispatch.backends import register

OPS = {function.op.contract.name: function.op.contract for function in functions() if "quantize" in function.__name__}
TARGETS = {
    "quantize_fp8": right.QuantizeFp8,
    "quantize_nvfp4": right.QuantizeNvfp4,
    "quantize_mxfp4": right.QuantizeMxfp4,
    "quantize_mxfp8": right.QuantizeMxfp8,
    "dequantize_fp8": right.DequantizeFp8,
    "dequantize_nvfp4": right.DequantizeNvfp4,
    "dequantize_mxfp4": right.Dequantize,
    "dequantize_mxfp8": right.Dequantize,
}


class Subject(QuantizeContract):
    """A contract over the liars, on a third of the cases, for a test that collects none of it."""

    kernel = "liar.quantize"
    back = "liar.dequantize"
    device = "cpu"
    __test__ = False

    @classmethod
    def accepted_cases(cls):
        return super().accepted_cases()[::3]


class Truth:
    def change(self, x, codes, scale, out):
        pass


class OneCodeOff(Truth):
    def change(self, x, codes, scale, out):
        if x is not None:
            codes.view(torch.uint8)[..., -1, -1:] ^= 1


class ScaleOfTheFirstRow(Truth):
    def change(self, x, codes, scale, out):
        if x is not None and scale.dtype is torch.float32 and scale.shape[-2] > 1:
            scale[..., 1:, :] = scale[..., :1, :].clone()


class NibblesSwapped(Truth):
    def change(self, x, codes, scale, out):
        if x is not None and codes.dtype is torch.uint8:
            codes.copy_((codes >> 4) | (codes << 4))


class ScaleRoundedDown(Truth):
    def change(self, x, codes, scale, out):
        if x is not None and scale.dtype is torch.float8_e8m0fnu:
            scale.view(torch.uint8).sub_(1)


class TwoPercentTooMuch(Truth):
    def change(self, x, codes, scale, out):
        if out is not None:
            out.mul_(1.02)


class LeavesTheTail(Truth):
    def change(self, x, codes, scale, out):
        if out is not None:
            out[..., -1:] = torch.nan


class HidesNan(Truth):
    def change(self, x, codes, scale, out):
        if out is not None:
            out.nan_to_num_(nan=0.0)


LIES = Truth.__subclasses__()


def _make(lie: type, op: str) -> str:
    base = TARGETS[op]

    if op.startswith("quantize"):

        def launch(self, x, codes, scale, global_scale):
            base.launch(self, x, codes, scale, global_scale)
            self.change(x, codes, scale, None)
    else:

        def launch(self, codes, scale, global_scale, out):
            base.launch(self, codes, scale, global_scale, out)
            self.change(None, codes, scale, out)

    name = f"{lie.__name__}_{op}"
    globals()[name] = type(name, (lie, base), {"__module__": __name__, "launch": launch})
    return f"{__name__}:{name}"


def _register(lie: type) -> None:
    kernels = []
    for op, contract in OPS.items():
        schema = contract.schema
        kind = "quantize" if op.startswith("quantize") else "dequantize"
        constraints = (anything(*schema.structural),)
        target = _make(lie, op)
        kernels.append(Kernel(op, f"liar.{kind}", target, "lies", Band.PLUGIN, constraints, schema.features))
    register("liar", *kernels)


def failures() -> list[str]:
    """The first test of the contract that the registered kernels fail."""
    subject = Subject()
    for name, test in inspect.getmembers(subject, inspect.ismethod):
        if name.startswith("test_"):
            try:
                for arguments in _arguments(test):
                    test(**arguments)
            except AssertionError:
                return [name]
    return []


def _arguments(test: Any) -> list[dict[str, Any]]:
    """Every set of arguments that pytest would call it with."""
    marks = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    if "case" in inspect.signature(test).parameters:
        marks.append(("case", Subject.accepted_cases()))
    return [
        dict(zip([name for name, _ in marks], values, strict=True))
        for values in itertools.product(*(v for _, v in marks))
    ]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_is_detected(lie: type) -> None:
    _register(lie)
    assert failures(), f"nothing tells {lie.__name__} from a right kernel"


def test_a_right_kernel_is_not() -> None:
    _register(Truth)
    assert failures() == []
