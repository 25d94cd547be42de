"""What every kernel of the quantisers must do. Subclass `QuantizeContract` and name the kernels."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.quant.inputs import activations
from kernelhub.ops.quant.tolerance import round_trip_error_allowed
from tests.conftest import DEVICE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
E8M0 = torch.float8_e8m0fnu


@dataclasses.dataclass(frozen=True)
class Case:
    """One quantiser with its options, and the shape it is given."""

    label: str
    format: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    shape: tuple[int, ...] = (5, 320)
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return self.label

    @property
    def quantize(self) -> Any:
        return getattr(kernelhub, f"quantize_{self.format}")

    @property
    def dequantize(self) -> Any:
        return getattr(kernelhub, f"dequantize_{self.format}")

    def back_options(self) -> dict[str, Any]:
        size = self.options.get("group_size")
        return {} if size is None else {"group_size": size}


def _fp8(label: str, granularity: str, shape: tuple[int, ...] = (5, 320), **options: Any) -> Case:
    return Case(f"fp8 {label}", "fp8", {"granularity": granularity, **options}, shape)


CASES = [
    *(_fp8(granularity, granularity) for granularity in ("tensor", "token", "group", "block")),
    *(_fp8(f"{granularity} ue8m0", granularity, ue8m0=True) for granularity in ("tensor", "token", "group", "block")),
    *(_fp8(f"{name} as e8m0", name, scale_dtype=E8M0) for name in ("tensor", "token", "group", "block")),
    *(_fp8(f"group of {size}", "group", group_size=size) for size in (1, 24, 64, 1024)),
    *(_fp8(f"group, {width} wide", "group", (3, width)) for width in (1, 127, 128, 129, 2047, 2048, 2049, 2176)),
    *(_fp8(f"token, {width} wide", "token", (3, width)) for width in (1, 2047, 2048, 2049)),
    *(_fp8(f"tensor, {shape}", "tensor", shape) for shape in ((1, 1), (3, 2049), (2, 3, 7))),
    *(_fp8(f"block, {shape}", "block", shape) for shape in ((1, 1), (127, 129), (129, 127), (2, 130, 257))),
    *(_fp8(f"{name}, three dimensions", name, (2, 3, 160)) for name in ("token", "group")),
    *(_fp8(f"{name}, one dimension", name, (160,)) for name in ("tensor", "token", "group")),
    *(_fp8(f"{name}, column by column", name, (2, 5, 300), scale_layout="column") for name in ("token", "group")),
    _fp8("block, column by column", "block", (2, 130, 257), scale_layout="column"),
    _fp8("group as e8m0, column by column", "group", (7, 300), scale_layout="column", scale_dtype=E8M0),
    *(
        Case(f"{name} {str(dtype)[6:]}", name, {}, (5, 320), dtype)
        for name in ("nvfp4", "mxfp4", "mxfp8")
        for dtype in DTYPES
    ),
    *(Case(f"fp8 {str(dtype)[6:]}", "fp8", {"granularity": "group"}, (5, 320), dtype) for dtype in DTYPES[1:]),
    *(Case(f"{name} up", name, {"scale_rounding": "up"}) for name in ("mxfp4", "mxfp8")),
    *(Case(f"nvfp4 {shape}", "nvfp4", {}, shape) for shape in ((1, 16), (3, 2032), (2, 3, 2064), (48,))),
    *(Case(f"mxfp4 {shape}", "mxfp4", {}, shape) for shape in ((1, 32), (3, 2016), (2, 3, 2080), (64,))),
    *(Case(f"mxfp8 {shape}", "mxfp8", {}, shape) for shape in ((1, 1), (3, 31), (3, 33), (2, 3, 2080), (65,))),
]

SPECIAL = (0.0, -0.0, 1e-23, 1e-38, 1e-40, 1e-45, 3e38, -3e38, 65504.0, 1.0, -448.0, 6.0, torch.inf, -torch.inf)


def special_rows(dtype: torch.dtype, width: int = 128) -> Tensor:
    """Rows of one awkward value, rows of it among ordinary ones, and rows with NaN."""
    values = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    plain = activations(len(SPECIAL), width, dtype=dtype)
    among = plain.clone()
    among[:, 5] = values
    with_nan = among.clone()
    with_nan[:, 40] = torch.nan
    only_nan = torch.full_like(plain[:1], torch.nan)
    return torch.cat([values[:, None].expand(-1, width), among, with_nan, only_nan])


def every_bfloat16(width: int = 256) -> Tensor:
    """Every pattern of 16 bits, neighbours together."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, width)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(got: Tensor, want: Tensor) -> bool:
    """Equal bits, but that any NaN is as good as another."""
    if got.dtype is not want.dtype or got.shape != want.shape:
        return False
    if got.dtype.itemsize == 1:
        return torch.equal(bits(got), bits(want))
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))


def poison(tensor: Tensor) -> Tensor:
    """Memory like this, full of what no result holds."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if tensor.dtype.itemsize == 1:
        made.view(torch.uint8).fill_(0x5A)
    else:
        made.fill_(torch.nan)
    return made


class QuantizeContract:
    kernel: ClassVar[str]
    back: ClassVar[str]
    device: ClassVar[str] = DEVICE

    @classmethod
    def accepted_cases(cls) -> list[Case]:
        return CASES

    def x(self, case: Case, seed: int = 0) -> Tensor:
        return activations(*case.shape, dtype=case.dtype, device=self.device, seed=seed)

    def agrees(self, case: Case, x: Tensor) -> tuple[Tensor, ...]:
        """The results are the reference's bit for bit, forth and back."""
        got = case.quantize(x, **case.options, backend=self.kernel)
        want = case.quantize.reference(x.cpu(), **case.options)
        for name, one, other in zip(("codes", "scale", "global_scale"), got, want, strict=False):
            assert same(one.cpu(), other), f"{case}: {name}"
        for dtype in (torch.bfloat16, torch.float32):
            back = case.dequantize(*got, **case.back_options(), out_dtype=dtype, backend=self.back)
            other = case.dequantize.reference(*want, **case.back_options(), out_dtype=dtype)
            assert same(back.cpu(), other), f"{case}: back to {dtype}"
        return tuple(got)

    def test_bits_are_those_of_the_reference(self, case: Case) -> None:
        got = self.agrees(case, self.x(case))
        assert got[0].is_contiguous()
        if case.options.get("scale_layout") == "column":
            assert got[1].stride(-2) == 1
            assert got[1].stride(-1) * got[1].itemsize % 16 == 0
        else:
            assert got[1].is_contiguous()

    def test_destinations_are_filled_and_returned(self, case: Case) -> None:
        x = self.x(case)
        want = case.quantize(x, **case.options, backend=self.kernel)
        outs = [poison(tensor) for tensor in want]
        names = ("out", "out_scale", "out_global_scale")
        got = case.quantize(x, **case.options, **dict(zip(names, outs, strict=False)), backend=self.kernel)
        for one, other, out in zip(got, want, outs, strict=True):
            assert one is out
            assert same(one, other)
        back = case.dequantize(*want, **case.back_options(), backend=self.back)
        out = poison(back)
        assert case.dequantize(*want, **case.back_options(), out=out, backend=self.back) is out
        assert same(out, back)

    def test_the_round_trip_is_within_half_a_step(self, case: Case) -> None:
        x = self.x(case)
        got = case.quantize(x, **case.options, backend=self.kernel)
        back = case.dequantize(*got, **case.back_options(), out_dtype=x.dtype, backend=self.back)
        ones = torch.full_like(got[0].view(torch.uint8), 0x22 if case.format.endswith("fp4") else 0x38)
        factor = case.dequantize.reference(
            *(tensor.cpu() for tensor in (ones.view(got[0].dtype), *got[1:])),
            **case.back_options(),
            out_dtype=torch.float32,
        )
        allowed = round_trip_error_allowed(x.cpu(), factor, case.format.endswith("fp4"), x.dtype)
        assert ((back.double() - x.double()).abs().cpu() <= allowed).all()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("format", ["group", "token", "block", "tensor", "nvfp4", "mxfp4", "mxfp8"])
    def test_what_is_no_ordinary_number_has_the_reference_s_result(self, format: str, dtype: torch.dtype) -> None:
        x = special_rows(dtype).to(self.device)
        if format in ("mxfp4", "mxfp8"):
            cases = [Case(format, format, {"scale_rounding": rounding}) for rounding in ("floor", "up")]
        elif format == "nvfp4":
            one = torch.tensor([0.01], device=self.device)
            cases = [Case(format, format)]
            got = kernelhub.quantize_nvfp4(x, one, backend=self.kernel)
            want = kernelhub.quantize_nvfp4.reference(x.cpu(), one.cpu())
            assert all(same(a.cpu(), b) for a, b in zip(got, want, strict=True))
            assert got[2] is one
        else:
            cases = [Case(format, "fp8", {"granularity": format, "ue8m0": up}) for up in (False, True)]
        for case in cases:
            scale = self.agrees(case, x)[1].float()
            if case.format in ("fp8", "mxfp8"):
                assert scale.isfinite().all()
                assert (scale > 0).all()

    @pytest.mark.parametrize("format", ["fp8", "nvfp4", "mxfp4", "mxfp8"])
    def test_every_bfloat16_has_the_reference_s_bits(self, format: str) -> None:
        options = {"granularity": "group"} if format == "fp8" else {}
        self.agrees(Case(format, format, options), every_bfloat16(1 << 13).to(self.device))

    def test_every_byte_reads_back_as_the_reference_s(self) -> None:
        every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        codes = every.repeat(256, 1).to(self.device)
        for name, scale, more in (
            ("fp8", torch.linspace(0.0, 3.0, 256)[:, None], ()),
            ("mxfp8", every[:, None].expand(-1, 8).contiguous().view(E8M0), ()),
            ("mxfp4", every[:, None].expand(-1, 16).contiguous().view(E8M0), ()),
            ("nvfp4", every[:, None].expand(-1, 32).contiguous().view(torch.float8_e4m3fn), (torch.tensor(0.3),)),
        ):
            x = codes if name.endswith("fp4") else codes.view(torch.float8_e4m3fn)
            function = getattr(kernelhub, f"dequantize_{name}")
            for dtype in DTYPES:
                more_here = tuple(tensor.to(self.device) for tensor in more)
                rows = slice(None) if dtype is DTYPES[0] else slice(1, None, 5)  # each scale once, then some
                got = function(x[rows], scale[rows].to(self.device), *more_here, out_dtype=dtype, backend=self.back)
                want = function.reference(x[rows].cpu(), scale[rows], *more, out_dtype=dtype)
                assert same(got.cpu(), want), (name, dtype)

    @pytest.mark.parametrize("granularity", ["tensor", "token"])
    def test_a_given_scale_is_used_and_returned(self, granularity: str) -> None:
        x = special_rows(torch.bfloat16).to(self.device)
        rows = (1,) if granularity == "tensor" else (x.shape[0], 1)
        for value in (0.05, 3.0, 0.0, torch.inf, torch.nan):
            scale = torch.full(rows, value, device=self.device)
            if granularity == "token" and value > 0:
                scale *= torch.linspace(0.5, 2.0, x.shape[0], device=self.device)[:, None]
            codes, same_scale = kernelhub.quantize_fp8(x, granularity, scale=scale, backend=self.kernel)
            assert same_scale is scale
            want = kernelhub.quantize_fp8.reference(x.cpu(), granularity, scale=scale.cpu())[0]
            assert same(codes.cpu(), want)
            if granularity == "token":
                flat = kernelhub.quantize_fp8(x, "token", scale=scale[:, 0], backend=self.kernel)[0]
                assert same(flat, codes)

    def test_options_change_the_result(self) -> None:
        x = activations(4, 320, device=self.device)
        first = kernelhub.quantize_fp8(x, "group", backend=self.kernel)
        for options in ({"group_size": 64}, {"ue8m0": True}, {"granularity": "token"}, {"granularity": "tensor"}):
            other = kernelhub.quantize_fp8(x, **{"granularity": "group", **options}, backend=self.kernel)
            assert not torch.equal(bits(other[0]), bits(first[0])), options
        for name in ("mxfp4", "mxfp8"):
            function = getattr(kernelhub, f"quantize_{name}")
            floor, up = (function(x, rounding, backend=self.kernel) for rounding in ("floor", "up"))
            assert not torch.equal(bits(floor[1]), bits(up[1]))

    def test_operands_may_have_any_strides(self) -> None:
        for case in (CASES[0], CASES[1], CASES[2], CASES[3], *(Case(n, n) for n in ("nvfp4", "mxfp4", "mxfp8"))):
            x = self.x(case)
            want = case.quantize(x, **case.options, backend=self.kernel)
            wide = torch.full((x.shape[0], 2, 2 * x.shape[1]), torch.nan, device=self.device, dtype=x.dtype)
            moved = wide[:, 1, ::2]
            moved.copy_(x)
            outs = []
            for tensor in want[:2]:
                memory = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=torch.uint8, device=self.device)
                if tensor.dtype.itemsize == 4:
                    memory = memory.float()
                outs.append((memory if tensor.dtype.itemsize == 4 else memory.view(tensor.dtype))[..., ::2])
            if case.options.get("granularity") == "tensor":
                outs[1] = torch.empty((), device=self.device).view(1)
            got = case.quantize(moved, **case.options, out=outs[0], out_scale=outs[1], backend=self.kernel)
            for one, other in zip(got, want, strict=True):
                assert same(one, other), str(case)
            back = case.dequantize(*want, backend=self.back)
            spread = torch.full((x.shape[0], 2 * x.shape[1]), torch.nan, device=self.device).bfloat16()
            case.dequantize(*got, out=spread[:, ::2], backend=self.back)
            assert same(spread[:, ::2], back), str(case)
            assert spread[:, 1::2].isnan().all()

    @pytest.mark.parametrize("format", ["fp8", "nvfp4", "mxfp4", "mxfp8"])
    def test_no_tokens_give_empty_results(self, format: str) -> None:
        case = Case(format, format)
        x = torch.empty(0, 320, device=self.device)
        got = case.quantize(x, backend=self.kernel)
        want = case.quantize.reference(x.cpu())
        assert all(same(a.cpu(), b) for a, b in zip(got, want, strict=True))
        assert case.dequantize(*got, backend=self.back).shape == (0, 320)
        scale = kernelhub.quantize_fp8(x, "tensor", backend=self.kernel)[1]
        assert float(scale) == 2.0**-126

    @pytest.mark.parametrize("format", ["fp8", "nvfp4", "mxfp4", "mxfp8"])
    def test_a_plan_gives_what_the_call_gives(self, format: str) -> None:
        case = Case(format, format)
        x = self.x(case)
        plan = case.quantize.prepare(x, backend=self.kernel)
        assert plan.kernel == self.kernel
        want = case.quantize(x, backend=self.kernel)
        for got, other in zip(plan.run(x), want, strict=True):
            assert same(got, other)
        with pytest.raises(InvalidArgument, match="the plan is for bfloat16"):
            plan.run(x.half())
        back = case.dequantize.prepare(*want, backend=self.back)
        assert same(back.run(*want), case.dequantize(*want, backend=self.back))

    def test_a_plan_refuses_scales_of_another_kind(self) -> None:
        x = activations(4, 320, device=self.device)
        codes, scale = kernelhub.quantize_fp8(x, "token")
        plan = kernelhub.dequantize_fp8.prepare(codes, scale, backend=self.back)
        with pytest.raises(InvalidArgument, match="the plan is for float32 scales, one per token"):
            plan.run(codes, torch.ones(1, device=self.device))
        with pytest.raises(InvalidArgument, match="the plan is for no scale"):
            kernelhub.quantize_fp8.prepare(x, backend=self.kernel).run(x, scale)

    def test_rows_do_not_depend_on_each_other(self) -> None:
        for case in (_fp8("group", "group"), _fp8("token", "token"), Case("mxfp4", "mxfp4"), Case("mxfp8", "mxfp8")):
            x = self.x(case)
            whole = case.quantize(x, **case.options, backend=self.kernel)
            for got, want in zip(case.quantize(x[2:3], **case.options, backend=self.kernel), whole, strict=True):
                assert same(got, want[2:3])
