"""What every kernel of the quantisers must do. Subclass `QuantizeContract` and name the kernels."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.quant.cases import DTYPES, SPECIAL
from kernelhub.ops.quant.inputs import activations
from kernelhub.testing import KernelCase, OpContract, cases
from tests.conftest import DEVICE

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


class QuantizeContract(OpContract):
    """Of the quantisers of all formats, by one kernel, and of their ways back, by another."""

    back: ClassVar[str]
    device = DEVICE

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        return [
            case
            for format in ("fp8", "nvfp4", "mxfp4", "mxfp8")
            for way, kernel in (("quantize", cls.kernel), ("dequantize", cls.back))
            for case in cases(f"{way}_{format}", kernel=kernel, device=cls.device)
        ]

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

    def test_results_are_contiguous_or_column_by_column(self) -> None:
        for name in ("token", "group", "block"):
            case = Case(name, "fp8", {"granularity": name, "scale_layout": "column"}, (2, 5, 300))
            got = self.agrees(case, self.x(case))
            assert got[0].is_contiguous()
            assert got[1].stride(-2) == 1
            assert got[1].stride(-1) * got[1].itemsize % 16 == 0
            assert all(tensor.is_contiguous() for tensor in self.agrees(Case(name, "fp8"), self.x(case)))

    @pytest.mark.parametrize("format", ["column", "fp8", "nvfp4", "mxfp4", "mxfp8"])
    def test_destinations_are_filled_and_returned(self, format: str) -> None:
        case = Case(format, format)
        if format == "column":
            case = Case(
                format, "fp8", {"granularity": "group", "scale_layout": "column", "scale_dtype": E8M0}, (7, 300)
            )
        x = self.x(case)
        want = case.quantize(x, **case.options, backend=self.kernel)
        outs = [poison(tensor) for tensor in want]
        names = ("out", "out_scale", "out_global_scale")
        got = case.quantize(x, **case.options, **dict(zip(names, outs, strict=False)), backend=self.kernel)
        for one, other, out in zip(got, want, outs, strict=True):
            assert one is out
            assert same(one, other)
        back = case.dequantize(*want, backend=self.back)
        out = poison(back)
        assert case.dequantize(*want, out=out, backend=self.back) is out
        assert same(out, back)

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

    def test_operands_may_have_any_strides(self) -> None:
        fp8 = (Case(name, "fp8", {"granularity": name}) for name in ("tensor", "token", "group", "block"))
        for case in (*fp8, *(Case(name, name) for name in ("nvfp4", "mxfp4", "mxfp8"))):
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
        for case in (
            *(Case(n, "fp8", {"granularity": n}) for n in ("group", "token")),
            Case("mxfp4", "mxfp4"),
            Case("mxfp8", "mxfp8"),
        ):
            x = self.x(case)
            whole = case.quantize(x, **case.options, backend=self.kernel)
            for got, want in zip(case.quantize(x[2:3], **case.options, backend=self.kernel), whole, strict=True):
                assert same(got, want[2:3])
