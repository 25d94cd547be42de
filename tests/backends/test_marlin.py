"""Marlin's kernels against one in plain torch; weights that its format does not hold are refused when packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.marlin.order import ordered_codes, ordered_scales, padded_rows, plain_codes, plain_scales
from kernelhub.backends.marlin.scales import e4m3_scales, nvfp4_scales
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.testing import KernelCase
from tests.backends.marlin_fake import on_the_cpu, weights
from tests.contract import fp4_gemm

FP16 = torch.float16
E4M3 = torch.float8_e4m3fn


class Packed(fp4_gemm.Fp4GemmContract):
    """The contract, of weights that are packed first."""

    device = "cpu"
    form: dict[str, Any]
    formats: tuple[str, ...]

    @pytest.fixture(autouse=True)
    def fake(self, clean_hub):
        with on_the_cpu():
            yield

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        """Without scales of NaN, which its format does not hold: tests below say so."""
        with on_the_cpu():
            return [case for case in super().accepted_cases() if "NaN" not in case.label]

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return super().inputs(**self.form | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        packed = self.packed(arguments) if isinstance(arguments["b"], Tensor) else arguments
        return super().run(packed, **more)

    def test_only_packed_weights_are_taken(self) -> None:
        arguments = self.inputs()
        with pytest.raises(NoKernel, match="layout"):
            kernelhub.fp4_gemm(**arguments, backend=self.kernel)
        assert kernelhub.fp4_gemm.prepare(**arguments, backend=self.kernel).needs_packing

    def test_a_packed_weight_needs_no_other_selection(self) -> None:
        arguments = self.inputs()
        packed = self.packed(arguments)
        assert packed["b"].layout.startswith("marlin.")
        assert torch.equal(kernelhub.fp4_gemm(**packed), self.run(arguments))

    def test_every_operand_changes_the_result(self) -> None:
        arguments = self.inputs()
        first = self.run(arguments)
        for name in self.formats:
            if name == "b_scale" and arguments[name].dtype is not E4M3:
                other = (arguments[name].view(torch.uint8) + 1).view(arguments[name].dtype)
            else:
                other = (arguments[name].float() / 2).to(arguments[name].dtype)
            assert not torch.equal(self.run({**arguments, name: other}), first), name

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs()
        want = self.run(arguments)
        moved = dict(arguments)
        for name in ("a", "b", "b_scale"):
            tensor = arguments[name]
            raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            apart = torch.stack([raw, torch.zeros_like(raw)], 2).flatten(1)[:, ::2]
            moved[name] = apart.view(tensor.dtype) if tensor.itemsize == 1 else apart
        assert torch.equal(self.run(moved), want)
        for columns in (72, 64):  # rows that are filled up, and whole tiles
            arguments = self.inputs(n=columns)
            wide = torch.full((5, 2 * columns), torch.nan, dtype=arguments["out_dtype"])
            assert torch.equal(self.run(arguments, out=wide[:, ::2]), self.run(arguments))
            assert wide[:, 1::2].isnan().all()

    def test_leading_dimensions_are_kept(self) -> None:
        arguments = self.inputs(tokens=6)
        want = self.run(arguments)
        assert torch.equal(self.run({**arguments, "a": arguments["a"].unflatten(0, (2, 3))}), want.unflatten(0, (2, 3)))

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        packed = self.packed(arguments)
        plan = kernelhub.fp4_gemm.prepare(**packed, backend=self.kernel)
        assert plan.kernel == self.kernel
        assert torch.equal(plan.run(packed["a"], packed["b"]), self.run(arguments))
        with pytest.raises(InvalidArgument, match="is laid out as checkpoint"):
            plan.run(*(arguments.get(name) for name in ("a", "b", "a_scale", "b_scale")),
                     b_global_scale=arguments.get("b_global_scale"))  # fmt: skip

    def test_a_weight_moved_as_a_whole_stays_what_it_is(self) -> None:
        arguments = self.inputs()
        packed = self.packed(arguments)
        moved = {**packed, "b": packed["b"].to("cpu")}
        assert torch.equal(self.run(moved), self.run(packed))

    test_float32_results_need_no_rounding = None  # it gives no float32
    test_scales_at_the_ends_of_their_range_are_right = None  # refused, as tests below say
    test_bytes_and_dtypes_of_one_format_are_the_same = None  # of other formats of a


class TestNvfp4Bfloat16(Packed):
    kernel = "fake.nvfp4_bfloat16"
    form = {}  # noqa: RUF012
    formats = ("a", "b_scale", "b_global_scale")

    def test_bytes_and_dtypes_of_one_format_are_the_same(self) -> None:
        arguments = self.inputs()
        as_fp4 = {"b": arguments["b"].view(torch.float4_e2m1fn_x2)}
        assert torch.equal(self.run({**arguments, **as_fp4}), self.run(arguments))

    def every_scale(self, low: int, high: int, **changes: Any) -> dict[str, Any]:
        arguments = self.inputs(n=64, k=2048, **changes)
        count = high - low
        raw = (torch.arange(64 * 128) % count + low).to(torch.uint8).view(64, 128)
        return {**arguments, "b_scale": raw.view(E4M3)}

    def test_scales_of_16_powers_of_two_are_exact(self) -> None:
        """From 2^-7, a subnormal, to 448; and all but the largest, which leaves room for smaller ones."""
        for low, high in ((4, 0x7F), (2, 0x78), (1, 0x70), (1, 0x30)):
            arguments = self.every_scale(low, high)
            self.check(self.run(arguments), arguments)
            packed = self.packed(arguments)["b"]
            codes, scale, factor = packed.tensors.values()
            held = weights(codes.view(torch.int32), scale, torch.bfloat16, 64, 2048).double() * factor.double()
            b, b_scale, b_global_scale = packed.unpack()
            exact = {"b": b, "b_scale": b_scale, "b_global_scale": b_global_scale}
            want = kernelhub.fp4_gemm.reference(torch.eye(2048), **exact, dtype=torch.float64)
            assert torch.equal(held.t(), want)

    def test_scales_further_apart_are_refused_unless_their_groups_are_zero(self) -> None:
        arguments = self.every_scale(1, 0x7F)
        with pytest.raises(InvalidArgument, match=r"b_scale holds scales over 2\^15 times larger.*backend='triton'"):
            self.packed(arguments)
        small = arguments["b_scale"].view(torch.uint8) < 4
        arguments["b"] = arguments["b"].masked_fill(small.repeat_interleave(8, 1), 0x80)
        self.check(self.run(arguments), arguments)
        back = self.packed(arguments)["b"].unpack()[1]
        assert torch.equal(back.view(torch.uint8), arguments["b_scale"].view(torch.uint8))

    def test_a_global_scale_that_float32_does_not_hold_then_is_refused(self) -> None:
        arguments = self.inputs()
        for value in (torch.inf, torch.nan, 1e6):
            with pytest.raises(InvalidArgument, match=r"b_global_scale is .*, and Marlin multiplies it by"):
                self.packed({**arguments, "b_global_scale": torch.full((1,), value)})
        for value in (torch.full((), -0.5), torch.full((1,), 1e-42), torch.zeros(1, 1)):
            back = self.packed({**arguments, "b_global_scale": value})["b"].unpack()[2]
            assert back.shape == value.shape
            assert torch.equal(back, value)

    def test_small_activations_keep_their_bits_far_below_those_of_models(self) -> None:
        """Of normal numbers: down to 2^-24 of them. Sums in float32 are too small 2^-40 of them down, as documented."""
        for exponent in (-8, -16, -24):
            arguments = self.inputs(n=64)
            arguments["a"] = (arguments["a"].double() * 2.0**exponent).to(arguments["a"].dtype)
            self.check(self.run(arguments), arguments)
        if self.kernel == "fake.nvfp4_bfloat16":
            arguments["a"] = (arguments["a"].double() * 2.0**-16).to(arguments["a"].dtype)
            with pytest.raises(AssertionError):
                self.check(self.run(arguments), arguments)

    def test_a_weight_of_zeros_is_zero(self) -> None:
        arguments = self.inputs()
        arguments |= {"b_scale": torch.zeros_like(arguments["b_scale"].view(torch.uint8)).view(E4M3)}
        assert not self.run(arguments).any()


class TestNvfp4Float16(TestNvfp4Bfloat16):
    kernel = "fake.nvfp4_float16"
    form = {"a_format": "float16", "out_dtype": FP16}  # noqa: RUF012

    def test_scales_of_16_powers_of_two_are_exact(self) -> None:
        arguments = self.every_scale(0, 0x7F)
        self.check(self.run(arguments), arguments)

    def test_a_global_scale_that_float32_does_not_hold_then_is_refused(self) -> None:
        for value in (torch.inf, torch.nan, 1e37):
            with pytest.raises(InvalidArgument, match=r"b_global_scale is .*, and Marlin multiplies it by"):
                self.packed({**self.inputs(), "b_global_scale": torch.full((1,), value)})

    test_scales_further_apart_are_refused_unless_their_groups_are_zero = None  # float16 holds them


class TestMxfp4(Packed):
    kernel = "fake.mxfp4"
    form = {"b_format": "mxfp4"}  # noqa: RUF012
    formats = ("a", "b_scale")

    def test_scales_at_the_ends_of_their_range_are_right(self) -> None:
        arguments = self.inputs(n=64)
        raw = arguments["b_scale"].view(torch.uint8)
        raw[:] = torch.tensor([2, 60, 100, 127, 150, 180, 190, 200]).to(torch.uint8)
        self.check(self.run(arguments), arguments)
        packed = self.packed({**arguments, "b_scale": torch.full_like(raw, 252)})["b"]
        codes, scale, _ = packed.tensors.values()
        assert weights(codes.view(torch.int32), scale, torch.bfloat16, 64, 256).isfinite().all()
        for byte, match in (*((byte, "not normal in bfloat16") for byte in (0, 1, 253)), (255, "has NaN")):
            raw[3, 2] = byte
            with pytest.raises(InvalidArgument, match=match):
                self.packed(arguments)
        arguments["b"][3, 32:48] = 0x08
        raw[3, 2] = 0
        self.check(self.run(arguments), arguments)
        raw[3, 2] = 254
        self.check(self.run(arguments), arguments)

    def test_bytes_and_dtypes_of_one_format_are_the_same(self) -> None:
        arguments = self.inputs()
        as_bytes = {"b_scale": arguments["b_scale"].view(torch.uint8)}
        assert torch.equal(self.run({**arguments, **as_bytes}), self.run(arguments))
        assert self.packed({**arguments, **as_bytes})["b"].unpack()[1].dtype is torch.uint8


@pytest.mark.parametrize("byte", [0x80, 0x81, 0xFE, 0x7F, 0xFF])
def test_negative_scales_and_nan_are_refused(byte: int, clean_hub) -> None:
    for form in ({}, {"a_format": "float16", "out_dtype": FP16}):
        arguments = fp4_gemm_inputs(tokens=2, n=64, k=64, **form)
        arguments["b_scale"].view(torch.uint8)[5, 1] = byte
        weight = {name: arguments[name] for name in ("b", "b_scale", "b_global_scale")}
        with on_the_cpu():
            plan = kernelhub.fp4_gemm.prepare(**arguments, backend="fake")
            with pytest.raises(InvalidArgument, match="scales that are negative or NaN"):
                plan.pack(**weight)


def test_every_scale_comes_back() -> None:
    for dtype, low in (("float16", 0), ("bfloat16", 4)):
        raw = torch.arange(low, 0x7F, dtype=torch.uint8)[None]
        made, shift = nvfp4_scales(raw.view(E4M3), torch.ones_like(raw).bool(), dtype)
        assert torch.equal(e4m3_scales(made, shift).view(torch.uint8), raw)
        value = (made.short() << 7).view(FP16).double() if dtype == "float16" else None
        if value is not None:
            assert torch.equal(value, raw.view(E4M3).double() * 2**7)


def test_codes_and_scales_come_back_from_their_order() -> None:
    random = torch.Generator().manual_seed(0)
    for n, k in ((64, 16), (128, 48), (192, 128)):
        codes = torch.randint(0, 256, (n, k // 2), generator=random).to(torch.uint8)
        assert torch.equal(plain_codes(ordered_codes(codes)), codes)
        scale = torch.randint(0, 256, (n, k // 16), generator=random).to(torch.uint8)
        assert torch.equal(plain_scales(ordered_scales(scale)), scale)


def test_rows_are_filled_up_to_what_the_tiles_take() -> None:
    assert [padded_rows(n, 128) for n in (1, 64, 65)] == [64, 64, 128]
    assert [padded_rows(n, 64) for n in (1, 64, 128, 129)] == [128, 128, 128, 256]
