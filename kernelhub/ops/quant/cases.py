"""Cases of the quantisers and of their ways back: all of them are exact, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, joined, same_bits
from kernelhub.ops.formats import E8M0
from kernelhub.ops.quant.inputs import activations

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECIAL = (0.0, -0.0, 1e-23, 1e-38, 1e-40, 1e-45, 3e38, -3e38, 65504.0, 1.0, -448.0, 6.0, torch.inf, -torch.inf)
ROWS = (0, 1, 2, 3, 15, 16, 17, 33, 128, 129)
WIDTHS = {"fp8": (1, 127, 129, 2049), "nvfp4": (16, 2032), "mxfp4": (32, 2016), "mxfp8": (1, 31, 33, 2080)}

FP8_OPTIONS: dict[str, Arguments] = {
    **{name: {"granularity": name} for name in ("tensor", "token", "group", "block")},
    **{f"{name} ue8m0": {"granularity": name, "ue8m0": True} for name in ("tensor", "token", "group", "block")},
    **{f"{name} as e8m0": {"granularity": name, "scale_dtype": E8M0} for name in ("tensor", "token", "group", "block")},
    **{f"group of {size}": {"granularity": "group", "group_size": size} for size in (1, 24, 64, 1024)},
    **{
        f"{name}, column by column": {"granularity": name, "scale_layout": "column"}
        for name in ("token", "group", "block")
    },
    "group as e8m0, column by column": {"granularity": "group", "scale_layout": "column", "scale_dtype": E8M0},
}
# Shapes at the edges of what kernels read at once, and of other numbers of dimensions, by format and option.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "fp8 tensor": ((1, 1), (2, 3, 7), (160,)),
    "fp8 token": ((3, 2047), (3, 2048), (2, 3, 160), (160,)),
    "fp8 group": ((3, 128), (3, 2047), (3, 2048), (3, 2176), (2, 3, 160), (160,)),
    "fp8 block": ((1, 1), (127, 129), (129, 127), (2, 130, 257)),
    "fp8 token, column by column": ((2, 5, 300),),
    "fp8 group, column by column": ((2, 5, 300),),
    "fp8 block, column by column": ((2, 130, 257),),
    "fp8 group as e8m0, column by column": ((7, 300),),
    "nvfp4 floor": ((1, 16), (2, 3, 2064), (48,)),
    "mxfp4 floor": ((1, 32), (2, 3, 2080), (64,)),
    "mxfp8 floor": ((1, 1), (2, 3, 2080), (65,)),
}
OPTIONS: dict[str, dict[str, Arguments]] = {
    "fp8": FP8_OPTIONS,
    "nvfp4": {"floor": {}},
    "mxfp4": {"floor": {}, "up": {"scale_rounding": "up"}},
    "mxfp8": {"floor": {}, "up": {"scale_rounding": "up"}},
}
# What an option is compared with: the result must differ.
PLAIN: dict[str, Arguments] = {
    "up": {},
    **{f"{name} ue8m0": {"granularity": name} for name in ("token", "group", "block")},
}


class QuantizeCases(OpCases):
    """One quantiser: every option, extreme values, given scales."""

    exact = True

    def __init__(self, format: str) -> None:
        self.format = format
        self.op = f"quantize_{format}"

    def cases(self) -> Iterator[Case]:
        for name, options in OPTIONS[self.format].items():
            plain = PLAIN.get(name)
            for dtype in DTYPES:
                yield Case(
                    label=f"{name}, {str(dtype)[6:]}",
                    make=_x((5, 320), options, dtype),
                    without=None if plain is None else _x((5, 320), plain, dtype),
                    feature="" if plain is None else name,
                    quick=True,
                    repeats=True,
                )
            yield Case(label=f"{name}, zeros, tiny and huge values", make=_special(options), quick=True)
            for rows in ROWS if name in ("token", "group", "floor") else (0, 1, 3):
                make = _x((rows, 320), options)
                yield Case(label=f"{name}, {rows} tokens", make=make, tokens=True, quick=rows in (0, 1, 2, 17))
            for width in WIDTHS[self.format]:
                yield Case(label=f"{name}, {width} wide", make=_x((3, width), options))
            for shape in SHAPES.get(f"{self.format} {name}", ()):
                yield Case(label=f"{name}, {' x '.join(map(str, shape))}", make=_x(shape, options))
        for given in ("tensor", "token") if self.format == "fp8" else ("tensor",) if self.format == "nvfp4" else ():
            parameter = "scale" if self.format == "fp8" else "global_scale"
            for value in (0.05, 3.0, 2.0**-60):
                yield Case(
                    label=f"given {given} scale of {value:g}",
                    make=self._given(given, parameter, value),
                    without=_x((5, 320), {"granularity": given} if self.format == "fp8" else {}),
                    feature=parameter,
                    quick=value == 0.05,
                )

    def _given(self, granularity: str, parameter: str, value: float) -> Make:
        options: Arguments = {"granularity": granularity} if self.format == "fp8" else {}

        def made(device: torch.device) -> Arguments:
            arguments = _x((5, 320), options)(device)
            shape = (1,) if granularity == "tensor" else (5, 1)
            return arguments | {parameter: torch.full(shape, value, device=device, dtype=torch.float32)}

        return made

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        want = self._reference(arguments)
        given = "scale" in arguments or "global_scale" in arguments
        named = dict(zip(("out", "out_scale", "out_global_scale"), want, strict=False))
        if given:  # what is given is returned, and not written
            named.pop("out_scale" if self.format == "fp8" else "out_global_scale")
        if arguments.get("scale_layout") == "column":  # that has strides of its own
            named.pop("out_scale")
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}

    def returned_for(self, names: Sequence[str], returned: Any) -> dict[str, Tensor]:
        return {}  # `results` takes them from what was returned

    def results(self, returned: Any, destinations: Mapping[str, Tensor], arguments: Arguments) -> dict[str, Tensor]:
        named = dict(zip(("out", "out_scale", "out_global_scale"), returned, strict=False))
        return named | dict(destinations)

    def expect(self, arguments: Arguments) -> dict[str, Tensor]:
        return dict(zip(("out", "out_scale", "out_global_scale"), self._reference(arguments), strict=False))

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want = expected
        figures = [
            (ratio, f"{name}: {text}" if text else "") for name, (ratio, text) in _compared(results, want).items()
        ]
        return Judgement(*joined(*figures), want)

    def _reference(self, arguments: Arguments) -> tuple[Tensor, ...]:
        on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
        device = arguments["x"].device
        made = self.reference(**on_cpu)
        return tuple(tensor.to(device) for tensor in made)


class DequantizeCases(OpCases):
    """One way back: every code of the format, with scales of all sizes."""

    exact = True

    def __init__(self, format: str) -> None:
        self.format = format
        self.op = f"dequantize_{format}"

    def cases(self) -> Iterator[Case]:
        for dtype in DTYPES:
            for name, options in OPTIONS[self.format].items():
                if "column" not in name:
                    make = self._codes((5, 320), options, dtype)
                    label = f"{name}, {str(dtype)[6:]}"
                    yield Case(label=label, make=make, quick=name in ("token", "floor"), repeats=True)
            yield Case(label=f"every code, {str(dtype)[6:]}", make=self._every_code(dtype), quick=True)
        for power in (2, -40):
            scaled = self._codes((5, 320), {}, torch.float32, power)
            yield Case(
                label=f"scales times 2^{power}",
                make=scaled,
                without=self._codes((5, 320), {}, torch.float32),
                feature="scale",
                quick=True,
            )
        for rows in ROWS:
            make = self._codes((rows, 320), {}, torch.bfloat16)
            yield Case(label=f"{rows} tokens", make=make, tokens=True, quick=rows in (0, 1, 2, 17))
        for width in WIDTHS[self.format]:
            yield Case(label=f"{width} wide", make=self._codes((3, width), {}, torch.bfloat16))
        for name, options in OPTIONS[self.format].items():
            for shape in SHAPES.get(f"{self.format} {name}", ()):
                make = self._codes(shape, options, torch.bfloat16)
                yield Case(label=f"{name}, {' x '.join(map(str, shape))}", make=make)

    def _codes(self, shape: tuple[int, ...], options: Arguments, dtype: torch.dtype, power: int = 0) -> Make:
        def made(device: torch.device) -> Arguments:
            quantized = HUB.function(f"quantize_{self.format}").reference(activations(*shape), **options)
            names = ("x", "scale", "global_scale")
            arguments = {name: tensor.to(device) for name, tensor in zip(names, quantized, strict=False)}
            scale = arguments["scale"]
            if power and scale.dtype is E8M0:
                arguments["scale"] = (scale.view(torch.uint8).int() + power).clamp(1, 254).to(torch.uint8).view(E8M0)
            elif power:
                name = "global_scale" if self.format == "nvfp4" else "scale"
                arguments[name] = arguments[name] * 2.0**power
            size = {"group_size": options["group_size"]} if "group_size" in options else {}
            return arguments | {"out_dtype": dtype} | size

        return made

    def _every_code(self, dtype: torch.dtype) -> Make:
        """All bytes as codes, beside scales of every kind that the format has."""

        def made(device: torch.device) -> Arguments:
            every = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8)
            codes = every.repeat(256, 1)
            columns = {"fp8": 0, "mxfp8": 8, "mxfp4": 16, "nvfp4": 32}[self.format]
            scale = every[:, None].expand(-1, max(columns, 1)).contiguous()
            more: Arguments = {}
            if self.format == "fp8":
                scale = torch.linspace(0.0, 3.0, 256, dtype=torch.float32, device="cpu")[:, None]
            elif self.format == "nvfp4":
                scale = scale.view(torch.float8_e4m3fn)
                more["global_scale"] = torch.tensor(0.3, dtype=torch.float32, device="cpu").to(device)
            else:
                scale = scale.view(E8M0)
            x = codes if self.format.endswith("fp4") else codes.view(torch.float8_e4m3fn)
            return {"x": x.to(device), "scale": scale.to(device), **more, "out_dtype": dtype}

        return made

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        x = arguments["x"]
        width = x.shape[-1] * (2 if self.format.endswith("fp4") else 1)
        return {"out": ((*x.shape[:-1], width), arguments["out_dtype"])}

    def expect(self, arguments: Arguments) -> Tensor:
        on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
        want: Tensor = self.reference(**on_cpu).to(arguments["x"].device)
        return want

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        return Judgement(*_compared(results, {"out": expected})["out"], {"out": expected})


def _compared(results: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, tuple[float, str]]:
    """Equal bits, but that any NaN of a float result is as good as another."""
    figures = {}
    for name, other in want.items():
        got = results[name]
        if other.itemsize > 1 and got.shape == other.shape and got.dtype is other.dtype:
            both = got.isnan() & other.isnan()
            got, other = got.masked_fill(both, 0.0), other.masked_fill(both, 0.0)
        figures[name] = same_bits(got, other)
    return figures


def _x(shape: tuple[int, ...], options: Arguments, dtype: torch.dtype = torch.bfloat16) -> Make:
    return lambda device: {"x": activations(*shape, dtype=dtype, device=device), **options}


def _special(options: Arguments) -> Make:
    """Rows of one awkward value, rows of it among ordinary ones, and rows with NaN."""

    def made(device: torch.device) -> Arguments:
        values = torch.tensor(SPECIAL, dtype=torch.float64, device="cpu").float()
        plain = activations(len(SPECIAL), 192, dtype=torch.float32)
        among = plain.clone()
        among[:, 5] = values
        with_nan = among.clone()
        with_nan[:, 40] = torch.nan
        only_nan = torch.full_like(plain[:1], torch.nan)
        rows = torch.cat([values[:, None].expand(-1, 192), among, with_nan, only_nan])
        return {"x": rows.to(device), **options}

    return made
