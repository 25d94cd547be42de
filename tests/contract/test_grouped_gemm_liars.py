"""The contract of `grouped_gemm` catches kernels that lie: each of these is the right kernel with one defect."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.backends.torch.gemm.grouped.per_group import PerGroup
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.ops.gemm.grouped.inputs import PAIRS, grouped_gemm_inputs
from kernelhub.ops.gemm.grouped.problem import A_SCALES, B_SCALES
from tests.contract.grouped_gemm import GroupedGemmContract
from tests.contract.lies import lies_of
from tests.contract.test_liars import failures
from tests.dispatch.backends import register


class Subject(GroupedGemmContract):
    """A contract over one of the kernels below, for a test that collects no cases of it."""

    kernel = "liar.k"
    device = "cpu"
    __test__ = False

    @classmethod
    def accepted_cases(cls):
        few = ("N 65, K 160", "N 64, K 65", "257 x 132", "float32 to bfloat16")
        return [case for case in super().accepted_cases() if case.label.endswith(few)]


class Truth(PerGroup):
    pass


class OnePercentTooMuch(PerGroup):
    def launch(self, operands, out):
        super().launch(operands, out)
        out *= 1.01


class ForgetsTheBias(PerGroup):
    def launch(self, operands, out):
        zero = None if operands.bias is None else torch.zeros_like(operands.bias)
        super().launch(operands._replace(bias=zero), out)


class BiasOfTheFirstGroup(PerGroup):
    def launch(self, operands, out):
        bias = operands.bias
        super().launch(operands._replace(bias=None if bias is None else bias[:1].expand_as(bias)), out)


class ForgetsTheGlobalScale(PerGroup):
    def launch(self, operands, out):
        super().launch(operands._replace(b_global_scale=None), out)


class ForgetsTheGlobalScaleOfRows(PerGroup):
    def launch(self, operands, out):
        super().launch(operands._replace(a_global_scale=None), out)


class GlobalScaleOfRowsOfTheFirstGroup(PerGroup):
    def launch(self, operands, out):
        scale = operands.a_global_scale
        super().launch(operands._replace(a_global_scale=None if scale is None else scale[:1]), out)


class HighBitsOfRowsFirst(PerGroup):
    def launch(self, operands, out):
        a = operands.a
        if a.dtype is torch.uint8:
            a = (a >> 4) | (a << 4)
        super().launch(operands._replace(a=a), out)


class DividesByTheGlobalScale(PerGroup):
    def launch(self, operands, out):
        scale = operands.b_global_scale
        super().launch(operands._replace(b_global_scale=None if scale is None else 1 / scale), out)


class ScaleOfTheFirstGroup(PerGroup):
    def launch(self, operands, out):
        scale = operands.b_scale
        first = None if scale is None else scale[:1].expand_as(scale) if scale.ndim else scale
        super().launch(operands._replace(b_scale=first), out)


class BlocksOfScalesTransposed(PerGroup):
    def launch(self, operands, out):
        scale = operands.b_scale
        if scale is not None and self.problem.b_scale in ("block", "block_e8m0"):
            raw = scale.transpose(1, 2).contiguous().flatten().view(torch.uint8)
            scale = raw.view(scale.dtype).view(scale.shape)
        super().launch(operands._replace(b_scale=scale), out)


class HighBitsFirst(PerGroup):
    def launch(self, operands, out):
        b = operands.b
        if b.dtype is torch.uint8:
            b = (b >> 4) | (b << 4)
        super().launch(operands._replace(b=b), out)


class ScalesOfRowsShifted(PerGroup):
    def launch(self, operands, out):
        scale = operands.a_scale
        if scale is not None and scale.ndim and scale.shape[0] > 1:
            raw = scale.view(torch.uint8) if scale.element_size() == 1 else scale
            scale = raw.roll(1, 0).view(scale.dtype)
        super().launch(operands._replace(a_scale=scale), out)


class WeightsOfTheNextGroup(PerGroup):
    def launch(self, operands, out):
        raw = operands.b.view(torch.uint8) if operands.b.element_size() == 1 else operands.b
        super().launch(operands._replace(b=raw.roll(-1, 0).view(operands.b.dtype)), out)


class OffsetsAreStarts(PerGroup):
    def launch(self, operands, out):
        offsets = operands.offsets
        if offsets is not None:
            offsets = torch.cat([offsets[1:], offsets[-1:]])
        super().launch(operands._replace(offsets=offsets), out)


class ForgetsTheLastRowOfAGroup(PerGroup):
    def launch(self, operands, out):
        sizes = operands.group_sizes
        before = out.clone()
        super().launch(operands, out)
        if sizes is not None:
            for group, size in enumerate(sizes.tolist()):
                out[group, max(0, size - 1)] = before[group, max(0, size - 1)]


class WritesRowsOfNoGroup(PerGroup):
    def launch(self, operands, out):
        if operands.offsets is not None:
            out[int(operands.offsets[-1]) :] = 0
        super().launch(operands, out)


class WritesMaskedRows(PerGroup):
    def launch(self, operands, out):
        if operands.group_sizes is not None:
            out[:] = 0
        super().launch(operands, out)


class ForgetsTheTailOfK(PerGroup):
    def launch(self, operands, out):
        whole = operands.a.shape[-1] // 16 * 16
        a = operands.a.clone().contiguous()
        raw = a.view(torch.uint8).unflatten(-1, (-1, a.element_size()))
        raw[..., whole:, :] = 0
        super().launch(operands._replace(a=a), out)


class ForgetsTheTailOfN(PerGroup):
    def launch(self, operands, out):
        before = out.clone()
        super().launch(operands, out)
        if out.shape[-1] > 64 and out.shape[-1] % 64:
            out[..., -1] = before[..., -1]


class RoundsTwice(PerGroup):
    def launch(self, operands, out):
        super().launch(operands, out)
        out.copy_(out.to(torch.bfloat16))


class OtherBitsEachTime(PerGroup):
    def launch(self, operands, out):
        super().launch(operands, out)
        out *= 1 + 2.0**-9 * torch.rand(out.shape)


@pytest.mark.parametrize("lie", lies_of(PerGroup, __name__), ids=lambda lie: lie.__name__)
def test_is_detected(lie) -> None:
    constraints = (anything("device", "a_dtype", "b_dtype", "out_dtype", "num_groups", "n", "k", "rows"),)
    scales = {f"a_scale={value}" for value in A_SCALES} | {f"b_scale={value}" for value in B_SCALES}
    features = frozenset({"masked", "bias", "a_global_scale", "global_scale"} | scales)
    target = f"{__name__}:{lie.__name__}"
    register("liar", Kernel("grouped_gemm", "liar.k", target, "lies", Band.PLUGIN, constraints, features))
    assert bool(failures(Subject, "liar.k", "cpu")) == (lie is not Truth)


class TestReference:
    """The reference is what the docstring says, element by element in Python."""

    @pytest.mark.parametrize("name", ["tensor", "channel", "block", "nvfp4", "mxfp4", *PAIRS])
    def test_decodes_and_scales_as_documented(self, name: str) -> None:
        arguments = grouped_gemm_inputs(sizes=(1, 2), n=130, k=160, format=name, spare=1)
        want = kernelhub.grouped_gemm.reference(**arguments, dtype=torch.float64)
        e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        e2m1 += [-value for value in e2m1]
        a, b, a_scale, b_scale = (arguments.get(key) for key in ("a", "b", "a_scale", "b_scale"))
        for group, row in ((0, 0), (1, 1), (1, 2)):
            for n in (0, 64, 127, 128, 129):
                total = 0.0
                for k in range(160):
                    rows, _, weights = name.rpartition(" x ")
                    if rows.endswith("fp4"):
                        byte = int(a[row, k // 2])
                        x = e2m1[byte >> 4 if k % 2 else byte & 15]
                    else:
                        x = float(a[row, k])
                    if rows:
                        x *= float(a_scale[row, k // (16 if rows == "nvfp4" else 32)].float())
                        x *= float(arguments["a_global_scale"][group]) if rows == "nvfp4" else 1.0
                    if weights == "mxfp8":
                        w = float(b[group, n, k].float()) * float(b_scale[group, n, k // 32].float())
                    elif weights in ("nvfp4", "mxfp4"):
                        byte = int(b[group, n, k // 2])
                        span = 16 if weights == "nvfp4" else 32
                        w = e2m1[byte >> 4 if k % 2 else byte & 15] * float(b_scale[group, n, k // span].float())
                        w *= float(arguments["b_global_scale"][group]) if weights == "nvfp4" else 1.0
                    else:
                        w = float(b[group, n, k].float())
                        if name == "tensor":
                            x, w = x * float(a_scale), w * float(b_scale[group])
                        elif name == "channel":
                            x, w = x * float(a_scale[row]), w * float(b_scale[group, n])
                        else:
                            x, w = x * float(a_scale[row, k // 128]), w * float(b_scale[group, n // 128, k // 128])
                    total += x * w
                assert abs(total - float(want[row, n])) <= 1e-9 * max(1.0, abs(total))
        assert want[3].isnan().all()

    def test_in_float32_it_is_within_the_tolerance_of_float64(self) -> None:
        from kernelhub.ops.gemm.grouped.tolerance import error_allowed

        for name in ("float32", "channel", "block", "nvfp4", *PAIRS):
            arguments = grouped_gemm_inputs(sizes=(3, 40), k=512, format=name, spare=0)
            exact = kernelhub.grouped_gemm.reference(**arguments, dtype=torch.float64)
            made = kernelhub.grouped_gemm.reference(**arguments)
            assert made.dtype is torch.float32
            assert bool(((made - exact).abs() <= error_allowed(arguments, exact, torch.float32)).all())
