"""The reference of the quantisers against the definitions, by other ways: float64, search over all codes."""

from __future__ import annotations

import math

import pytest
import torch

import kernelhub
from kernelhub.ops.formats import from_e8m0
from kernelhub.ops.quant.cases import OPTIONS, SHAPES, SPECIAL
from kernelhub.ops.quant.inputs import activations
from kernelhub.ops.quant.tolerance import round_trip_error_allowed
from tests.contract.quant import every_bfloat16, special_rows

E4M3_VALUES = torch.arange(127, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).double()
E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def nearest(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The index of the nearest of `values` to |x|, of two the even one."""
    size = x.double().abs().clamp(max=float(values[-1]))
    distance = (size.unsqueeze(-1) - values).abs()
    best = distance.amin(-1, keepdim=True)
    index = torch.arange(len(values))
    return torch.where(distance == best, index % 2 * 1000 + index, 10**6).argmin(-1)


def codes_of(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


class TestCodes:
    @pytest.mark.parametrize("granularity", ["tensor", "token", "group", "block"])
    def test_fp8_takes_the_nearest_code_of_the_quotient(self, granularity: str) -> None:
        x = activations(7, 300, dtype=torch.float32)
        codes, scale = kernelhub.quantize_fp8.reference(x, granularity)
        columns = {"group": 128, "block": 128}.get(granularity, 300)
        factor = scale.repeat_interleave(columns, -1)[..., :300]
        want = nearest(x / factor, E4M3_VALUES)
        assert torch.equal(codes.view(torch.uint8).int() & 0x7F, want.int())
        assert torch.equal(codes.view(torch.uint8) >> 7, torch.signbit(x).to(torch.uint8))

    def test_scales_are_the_largest_magnitude_over_448(self) -> None:
        x = activations(130, 300, dtype=torch.float32)
        for granularity in ("tensor", "token", "group", "block"):
            scale = kernelhub.quantize_fp8.reference(x, granularity)[1]
            if granularity == "tensor":
                amax = x.abs().amax().view(1)
            elif granularity == "token":
                amax = x.abs().amax(1, keepdim=True)
            else:
                rows = 128 if granularity == "block" else 1
                amax = torch.stack(
                    [
                        torch.stack([x[i : i + rows, j : j + 128].abs().amax() for j in range(0, 300, 128)])
                        for i in range(0, 130, rows)
                    ]
                )
            assert torch.equal(scale, (amax.double() / 448).float())
            up = kernelhub.quantize_fp8.reference(x, granularity, ue8m0=True)[1]
            mantissa, _ = torch.frexp(up)
            assert (mantissa == 0.5).all()
            assert ((up >= scale) & (up < 2 * scale)).all()

    def test_mx_scales_are_those_of_the_specification(self) -> None:
        x = activations(50, 320, dtype=torch.float32)
        amax = x.view(50, 10, 32).abs().amax(-1)
        for name, emax, largest in (("mxfp4", 2, 6.0), ("mxfp8", 8, 448.0)):
            function = getattr(kernelhub, f"quantize_{name}").reference
            floor = from_e8m0(function(x)[1])
            assert torch.equal(floor, torch.pow(2.0, amax.log2().floor() - emax))
            up = from_e8m0(function(x, "up")[1])
            assert ((up * largest >= amax) & (up * largest < 2 * amax)).all()

    @pytest.mark.parametrize("rounding", ["floor", "up"])
    def test_mx_takes_the_nearest_code(self, rounding: str) -> None:
        x = activations(9, 320, dtype=torch.float32)
        for name, values in (("mxfp4", E2M1_VALUES), ("mxfp8", E4M3_VALUES)):
            codes, scale = getattr(kernelhub, f"quantize_{name}").reference(x, rounding)
            want = nearest(x / from_e8m0(scale).repeat_interleave(32, 1), values)
            got = codes_of(codes) & 7 if name == "mxfp4" else codes.view(torch.uint8) & 0x7F
            assert torch.equal(got.int(), want.int())

    def test_nvfp4_takes_the_nearest_scale_and_code(self) -> None:
        x = activations(9, 320, dtype=torch.float32)
        codes, scale, factor = kernelhub.quantize_nvfp4.reference(x)
        assert float(factor) == torch.tensor(float(x.abs().max()) / 2688).item()
        amax = x.view(9, 20, 16).abs().amax(-1)
        want = nearest(amax / 6 / factor, E4M3_VALUES).clamp(min=1)
        assert torch.equal(scale.view(torch.uint8).int(), want.int())
        both = (scale.float() * factor).repeat_interleave(16, 1)
        assert torch.equal((codes_of(codes) & 7).int(), nearest(x / both, E2M1_VALUES).int())

    def test_the_first_of_two_is_in_the_low_four_bits(self) -> None:
        x = torch.tensor([[0.5, 6.0] * 16])
        assert kernelhub.quantize_mxfp4.reference(x)[0].unique().tolist() == [0x71]

    def test_every_bfloat16_that_is_finite_reads_back_nearly(self) -> None:
        x = every_bfloat16(1)
        x = x[x.float().isfinite().squeeze(1)]
        codes, scale = kernelhub.quantize_fp8.reference(x, "group")
        back = codes.double() * scale.double()
        # alone in its group a value is the largest: code 448, and only the scale's own rounding is lost
        normal = x.double().abs() >= 448 * 2.0**-126
        assert ((back - x.double()).abs() <= 2.0**-23 * x.double().abs())[normal].all()


FORMS = [(format, name) for format, options in OPTIONS.items() for name in options]


class TestOptions:
    """Kernels have the reference's bits, so what holds for these holds for them."""

    @pytest.mark.parametrize(("format", "name"), FORMS, ids=" ".join)
    def test_the_round_trip_is_within_half_a_step(self, format: str, name: str) -> None:
        options = OPTIONS[format][name]
        quantize, dequantize = (getattr(kernelhub, f"{way}_{format}").reference for way in ("quantize", "dequantize"))
        size = {"group_size": options["group_size"]} if "group_size" in options else {}
        fp4 = format.endswith("fp4")
        for shape in ((5, 320), *SHAPES.get(f"{format} {name}", ())):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                x = activations(*shape, dtype=dtype)
                codes, *scales = quantize(x, **options)
                back = dequantize(codes, *scales, **size, out_dtype=dtype)
                ones = torch.full_like(codes.view(torch.uint8), 0x22 if fp4 else 0x38).view(codes.dtype)
                factor = dequantize(ones, *scales, **size, out_dtype=torch.float32)
                assert ((back.double() - x.double()).abs() <= round_trip_error_allowed(x, factor, fp4, dtype)).all()

    def test_they_change_the_result(self) -> None:
        x = activations(4, 320)
        first = kernelhub.quantize_fp8.reference(x, "group")[0].view(torch.uint8)
        for options in ({"group_size": 64}, {"ue8m0": True}, {"granularity": "token"}, {"granularity": "tensor"}):
            other = kernelhub.quantize_fp8.reference(x, **{"granularity": "group", **options})[0]
            assert not torch.equal(other.view(torch.uint8), first), options
        for function in (kernelhub.quantize_mxfp4, kernelhub.quantize_mxfp8):
            floor, up = (function.reference(x, rounding)[1].view(torch.uint8) for rounding in ("floor", "up"))
            assert not torch.equal(floor, up)

    def test_no_tokens_have_the_least_scale(self) -> None:
        assert float(kernelhub.quantize_fp8.reference(torch.empty(0, 320), "tensor")[1]) == 2.0**-126


class TestWhatIsNoOrdinaryNumber:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_fp8(self, dtype: torch.dtype) -> None:
        rows = special_rows(dtype)
        count = len(SPECIAL)
        for x, (codes, scale) in (
            (rows, kernelhub.quantize_fp8.reference(rows, "token")),
            (rows, kernelhub.quantize_mxfp8.reference(rows)),
        ):
            assert scale.float().isfinite().all()
            raw = codes.view(torch.uint8)
            assert torch.equal(raw == 0x7F, x.isnan())
            finite = ~x.isnan()
            assert (raw[finite] & 0x7F < 0x7F).all()
            assert (raw[:2] & 0x7F == 0).all()  # zeros
            infinite = x.isinf()
            assert (raw[infinite] & 0x7F == 0x7E).all()
            ordinary = torch.tensor([math.isfinite(value) for value in SPECIAL])
            alone = codes[:count].double() * (
                scale[:count].double() if scale.dtype == torch.float32 else from_e8m0(scale[:count])[:, :1].double()
            )
            given = x[:count].double()
            tiny = given.abs() < 1e-35
            close = (alone - given).abs() <= given.abs() / 8
            assert (close | tiny)[ordinary].all()

    @pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
    def test_fp4_marks_the_group_of_a_nan(self, name: str) -> None:
        x = activations(3, 128)
        x[1, 40] = torch.nan
        function = getattr(kernelhub, f"quantize_{name}").reference
        codes, scale, *more = function(x)
        group = 32 if name == "mxfp4" else 16
        lost = torch.zeros(3, 128 // group, dtype=torch.bool)
        lost[1, 40 // group] = True
        assert torch.equal(scale.float().isnan(), lost)
        back = getattr(kernelhub, f"dequantize_{name}").reference(codes, scale, *more)
        assert torch.equal(back.isnan(), lost.repeat_interleave(group, 1))

    def test_zeros_and_tiny_groups_have_the_least_scale(self) -> None:
        for value in (0.0, 1e-45):
            x = torch.full((2, 64), value)
            assert (kernelhub.quantize_fp8.reference(x)[1] == 2.0**-126).all()
            assert (kernelhub.quantize_fp8.reference(x, ue8m0=True)[1] == 2.0**-126).all()
            for name in ("mxfp4", "mxfp8"):
                scale = getattr(kernelhub, f"quantize_{name}").reference(x)[1]
                assert (scale.view(torch.uint8) == 0).all()
            codes, scale, factor = kernelhub.quantize_nvfp4.reference(x)
            assert (scale.float() == 2.0**-9).all()
            assert float(factor) == 2.0**-117
            assert (codes == 0).all()

    def test_infinity_saturates_at_the_largest_number_of_the_dtype(self) -> None:
        x = torch.tensor([[torch.inf] * 32], dtype=torch.float16)
        codes, scale = kernelhub.quantize_fp8.reference(x)
        assert (codes.float() == 448).all()
        assert float(scale) == torch.tensor(65504.0 / 448).item()
