"""Cases of `rms_norm_quant` and `silu_and_mul_quant`."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, joined, same_bits, worst
from kernelhub.ops.formats import E8M0
from kernelhub.ops.fused_quant.formats import GROUPS
from kernelhub.ops.fused_quant.inputs import activation_inputs, norm_inputs
from kernelhub.ops.fused_quant.problem import FORMATS, FP8_TENSOR, FP8_TOKEN, NVFP4
from kernelhub.ops.fused_quant.reference import activated, added, limited, normalised, quantised
from kernelhub.ops.fused_quant.tolerance import COMPUTED, codes_allowed, floats_allowed
from kernelhub.ops.quant.reference import dequantize_rows, scale_values, spread

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALL = (None, *FORMATS[1:])
SCALES: dict[str, Arguments] = {
    "ue8m0": {"ue8m0": True},
    "as e8m0": {"scale_dtype": E8M0},
    "column by column": {"scale_layout": "column"},
}
ROWS, WIDTHS = (0, 1, 2, 3, 17, 33), (1, 127, 129, 2049, 8200)


class FusedCases(OpCases):
    """Every form of the result, odd widths, options of scales, extreme values."""

    @abc.abstractmethod
    def make(self, *, width: int = 320, tokens: int = 5, options: Arguments | None = None, **inputs: Any) -> Make:
        """A call of `tokens` rows that give `width` elements each."""

    def cases(self) -> Iterator[Case]:
        for form in ALL:
            for dtype in DTYPES:
                yield Case(
                    label=f"{form}, {str(dtype)[6:]}",
                    make=self.make(format=form, dtype=dtype),
                    quick=True,
                    repeats=dtype is torch.bfloat16,
                )
            for tokens in ROWS if form in ("fp8_group", FP8_TOKEN) else (0, 1, 3):
                yield Case(
                    label=f"{form}, {tokens} tokens",
                    make=self.make(format=form, tokens=tokens),
                    tokens=True,
                    quick=form == FP8_TOKEN and tokens in ROWS[:3],
                )
            for width in (16, 2064, 8208) if form == NVFP4 else WIDTHS:
                yield Case(label=f"{form}, {width} wide", make=self.make(format=form, width=width, tokens=3))
            yield Case(label=f"{form}, zeros, large values and NaN", make=self.special(form), quick=True)
        for form in ("fp8_token", "fp8_group"):
            for name, options in SCALES.items():
                yield Case(
                    label=f"{form}, {name}",
                    make=self.make(format=form, options=options),
                    without=self.make(format=form) if name == "ue8m0" else None,
                    feature=name if name == "ue8m0" else "",
                    quick=True,
                )

    def special(self, form: str | None) -> Make:
        """Rows of zeros, of large numbers, and with NaN."""

        def made(device: torch.device) -> Arguments:
            arguments = self.make(format=form, tokens=4)(device)
            x = arguments["x"]
            x[0] = 0.0
            x[1] = x[1] * (30.0 if x.dtype is torch.float16 else 1e12)
            x[2, 7] = torch.nan
            return arguments

        return made

    @abc.abstractmethod
    def row(self, arguments: Arguments) -> Tensor:
        """The row in float32, before it is rounded or quantised."""

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        want = self.expect(arguments)["want"]
        if arguments.get("format") == FP8_TENSOR or arguments.get("scale_layout") == "column":
            want = {name: tensor for name, tensor in want.items() if name != "out_scale"}  # given, or of own strides
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in want.items()}

    def returned_for(self, names: Any, returned: Any) -> dict[str, Tensor]:
        return {}  # `results` takes them from what was returned

    def results(self, returned: Any, destinations: Mapping[str, Tensor], arguments: Arguments) -> dict[str, Tensor]:
        several = returned if isinstance(returned, tuple) else (returned,)
        names = ["out"] + ["out_scale"] * (arguments.get("format") is not None)
        names += ["out_residual"] * (arguments.get("residual") is not None)
        return dict(zip(names, several, strict=True)) | dict(destinations)

    def expect(self, arguments: Arguments) -> Any:
        on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
        device = arguments["x"].device
        given = self.reference(**on_cpu)
        want = {name: tensor.to(device) for name, tensor in self.results(given, {}, arguments).items()}
        return {"want": want, "row": self.row(on_cpu).to(device)}

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want, y = expected["want"], expected["row"]
        figures = [shapes(results, want)]
        if figures[0][0] == 0.0:
            figures += judged(results, arguments, y)
            if "out_residual" in want:
                ratio, text = same_bits(*(_plain_nan(each["out_residual"]) for each in (results, want)))
                figures.append((ratio, f"out_residual: {text}" if text else ""))
        return Judgement(*joined(*figures), want)


class NormCases(FusedCases):
    """`rms_norm_quant`."""

    op = "rms_norm_quant"

    def make(self, *, width: int = 320, tokens: int = 5, options: Arguments | None = None, **inputs: Any) -> Make:
        return lambda device: (
            norm_inputs(width=width, tokens=tokens, device=device, **{"residual": False} | inputs) | (options or {})
        )

    def cases(self) -> Iterator[Case]:
        yield from super().cases()
        for form in ALL:
            yield Case(
                label=f"{form} with residual",
                make=self.make(format=form, residual=True),
                without=self.make(format=form),
                feature="residual",
                quick=True,
            )
        for dtype in DTYPES[1:]:
            yield Case(label=f"{str(dtype)[6:]} with residual", make=self.make(residual=True, dtype=dtype))
        yield Case(label="8200 wide with residual", make=self.make(residual=True, width=8200, format="fp8_token"))
        yield Case(label="a weight in float32", make=self.make(weight_dtype=torch.float32), quick=True)
        yield Case(
            label="1 + weight",
            make=self.make(options={"unit_offset": True}),
            without=self.make(),
            feature="unit_offset",
            quick=True,
        )
        yield Case(label="eps of 10", make=self.make(options={"eps": 10.0}), without=self.make(), feature="eps")
        for shape in ((2, 3, 160), (160,)):
            yield Case(
                label=f"rows of {' x '.join(map(str, shape))}", make=_shaped(self.make(width=160, tokens=6), shape)
            )

    def row(self, arguments: Arguments) -> Tensor:
        total = added(arguments["x"], arguments.get("residual"))
        offset = arguments.get("unit_offset", False)
        return normalised(total, arguments["weight"], arguments.get("eps", 1e-6), offset)


class ActivationCases(FusedCases):
    """`silu_and_mul_quant`."""

    op = "silu_and_mul_quant"

    def make(self, *, width: int = 320, tokens: int = 5, options: Arguments | None = None, **inputs: Any) -> Make:
        return lambda device: activation_inputs(width=width, tokens=tokens, device=device, **inputs) | (options or {})

    def cases(self) -> Iterator[Case]:
        yield from super().cases()
        for shape in ((2, 3, 320), (320,)):
            yield Case(
                label=f"rows of {' x '.join(map(str, shape))}", make=_shaped(self.make(width=160, tokens=6), shape)
            )

    def row(self, arguments: Arguments) -> Tensor:
        return activated(arguments["x"])


def _shaped(make: Make, shape: tuple[int, ...]) -> Make:
    """A call whose rows have other dimensions before them."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        count = torch.Size(shape).numel()
        return arguments | {"x": arguments["x"].flatten()[:count].view(shape)}

    return made


def shapes(results: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> tuple[float, str]:
    for name, other in want.items():
        got = results[name]
        if got.shape != other.shape or got.dtype is not other.dtype:
            return torch.inf, f"{name} is {got.dtype} {list(got.shape)}, not {other.dtype} {list(other.shape)}"
    return 0.0, ""


def _plain_nan(tensor: Tensor) -> Tensor:
    """Any NaN is as good as another."""
    return tensor.masked_fill(tensor.isnan(), 0.0)


def judged(results: Mapping[str, Tensor], arguments: Arguments, y: Tensor) -> list[tuple[float, str]]:
    """The result, and its scales, against the row in float32."""
    form, dtype = arguments.get("format"), arguments["x"].dtype
    if not y.numel():
        return [(0.0, "")]
    if form is None:
        rounded = y.to(dtype)
        want = torch.where(rounded.isinf(), rounded, y).double()  # else a tie that went the other way is off by two
        return [_within(results["out"], want, floats_allowed(y, dtype))]
    y = limited(y, dtype).reshape(-1, y.shape[-1])
    out, scale = results["out"], results["out_scale"]
    codes = out.reshape(-1, out.shape[-1])
    given = arguments.get("global_scale")
    if form == FP8_TENSOR:
        factor = scale.reshape(1, 1).expand(y.shape)
        figures = []
    else:
        rows = scale.reshape(-1, scale.shape[-1])
        figures = [_scales(rows, y, arguments)]
        columns = GROUPS.get(form, y.shape[-1])
        factor = spread(scale_values(rows)[None], y[None].shape, 1, columns)[0]
        if given is not None:
            factor = factor * given.reshape(())
    values = dequantize_rows(
        codes[None], torch.ones((), dtype=torch.float32, device=y.device), None, 1, 0, torch.float32
    )[0]
    fp4 = form == NVFP4
    nan = y.isnan()
    if fp4:  # the scale of a group carries it
        nan = nan.unflatten(1, (-1, 16)).any(-1, keepdim=True).expand(-1, -1, 16).flatten(1)
    want = y.masked_fill(nan, torch.nan).double()
    allowed = codes_allowed(y.nan_to_num(0.0), factor.nan_to_num(0.0), fp4)
    return [*figures, _within(values.double() * factor.double(), want, allowed)]


def _within(got: Tensor, want: Tensor, allowed: Tensor) -> tuple[float, str]:
    """The worst error; NaN must be where it is expected, and there alone."""
    got, nan = got.double(), want.isnan()
    if not torch.equal(got.isnan(), nan):
        return torch.inf, f"NaN in {int(got.isnan().sum())} places where {int(nan.sum())} are expected"
    error = (got - want).abs().masked_fill(nan, 0.0).masked_fill(got == want, 0.0)
    return worst(error, allowed.masked_fill(nan, 1.0))


def _scales(scale: Tensor, y: Tensor, arguments: Arguments) -> tuple[float, str]:
    """Scales are between those of slightly smaller and slightly larger rows."""
    form = arguments["format"]
    given = arguments.get("global_scale")
    ue8m0 = arguments.get("ue8m0", False) or arguments.get("scale_dtype") is E8M0
    bounds = []
    for by in (1.0 - COMPUTED, 1.0 + COMPUTED):
        _, made = quantised(y * by, form, given, ue8m0, scale.dtype)
        assert made is not None
        bounds.append(scale_values(made).double())
    got = scale_values(scale).double()
    wrong = ~((got >= bounds[0]) & (got <= bounds[1])) & ~(got.isnan() & bounds[0].isnan())
    count = int(wrong.sum())
    return (torch.inf, f"{count} of {got.numel()} scales are outside of their bounds") if count else (0.0, "")
