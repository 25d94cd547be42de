"""Cases of the collectives: on this process alone, where the sum is the operand. Tests of ranks compare true sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, joined, same_bits, worst
from kernelhub.ops.comm.inputs import (
    all_gather_inputs,
    all_reduce_inputs,
    all_reduce_rms_norm_inputs,
    reduce_scatter_inputs,
)
from kernelhub.ops.comm.problem import FLOATS, MOVED
from kernelhub.ops.comm.tolerance import normalised_error_allowed, sum_error_allowed
from kernelhub.ops.fused_quant.cases import SCALES, judged, shapes
from kernelhub.ops.fused_quant.formats import GROUPS, out_form, scale_kind, scale_shape
from kernelhub.ops.fused_quant.problem import FORMATS, FP8_GROUP, FP8_TOKEN, NONE, NVFP4
from kernelhub.ops.fused_quant.reference import normalised


class AllReduceCases(OpCases):
    """Every bit is kept by a group of one rank."""

    op = "all_reduce"
    exact = True

    def cases(self) -> Iterator[Case]:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield Case(label=str(dtype)[6:], make=_make(dtype=dtype), quick=True, repeats=True)
        for tokens in (0, 1, 2, 31, 33, 129):
            yield Case(label=f"{tokens} tokens", make=_make(tokens=tokens), tokens=True, quick=tokens in (0, 1, 33))
        for width in (1, 7, 4096):
            yield Case(label=f"width {width}", make=_make(hidden_size=width))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        x = arguments["x"]
        return {"out": (tuple(x.shape), x.dtype)}

    def in_place(self, given: Arguments) -> tuple[Arguments, dict[str, Tensor]]:
        return given, {"out": given["x"]}

    def expect(self, arguments: Arguments) -> Tensor:
        want: Tensor = self.reference(**arguments).to(arguments["x"].dtype)
        return want

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        ratio, figures = same_bits(results["out"] + 0.0, expected + 0.0)  # a sum from 0 on makes -0 a 0
        return Judgement(ratio, figures, {"out": expected})


class AllReduceRmsNormCases(OpCases):
    """The sum of one rank is its operand: what is compared is the addition of the residual and the norm."""

    op = "all_reduce_rms_norm"

    def cases(self) -> Iterator[Case]:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield Case(label=str(dtype)[6:], make=_norm(dtype=dtype), quick=True, repeats=True)
        yield Case(label="float32 weight", make=_norm(weight_dtype=torch.float32), quick=True, repeats=True)
        yield Case(label="float16, float32 weight", make=_norm(dtype=torch.float16, weight_dtype=torch.float32))
        yield Case(label="eps 0", make=_norm(eps=0.0))
        yield Case(label="eps 1", make=_norm(eps=1.0), without=_norm(), feature="eps")
        for tokens in (0, 1, 2, 31, 33, 129):
            yield Case(label=f"{tokens} tokens", make=_norm(tokens=tokens), tokens=True, quick=tokens in (0, 1, 33))
        for width in (1, 7, 72, 4096):
            yield Case(label=f"width {width}", make=_norm(hidden_size=width))
        yield from self._quantised()

    def _quantised(self) -> Iterator[Case]:
        for form in FORMATS[1:]:
            yield Case(label=form, make=_norm(format=form, hidden_size=320), quick=True, repeats=True)
            for width in (16, 2064) if form == NVFP4 else (1, 129):
                yield Case(label=f"{form}, width {width}", make=_norm(format=form, hidden_size=width, tokens=3))
        for dtype in (torch.float16, torch.float32):
            yield Case(label=f"fp8_token, {str(dtype)[6:]}", make=_norm(format=FP8_TOKEN, dtype=dtype))
        for tokens in (0, 1):
            yield Case(label=f"fp8_group, {tokens} tokens", make=_norm(format=FP8_GROUP, tokens=tokens), tokens=True)
        for name, options in SCALES.items():
            changed = _norm(options=options, format=FP8_GROUP, hidden_size=320)
            yield Case(
                label=f"fp8_group, {name}",
                make=changed,
                without=_norm(format=FP8_GROUP, hidden_size=320) if name == "ue8m0" else None,
                feature=name if name == "ue8m0" else "",
            )

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        x, form = arguments["x"], arguments.get("format") or NONE
        places = {"out": out_form(x.shape, form, x.dtype), "residual_out": (tuple(x.shape), x.dtype)}
        if form in (FP8_TOKEN, *GROUPS) and arguments.get("scale_layout") != "column":  # that has strides of its own
            kind = scale_kind(form, arguments.get("scale_dtype", torch.float32))
            places["out_scale"] = (scale_shape(tuple(x.shape), form), kind)
        return places

    def returned_for(self, names: Any, returned: Any) -> dict[str, Tensor]:
        return {}  # `results` takes them from what was returned

    def results(self, returned: Any, destinations: Mapping[str, Tensor], arguments: Arguments) -> dict[str, Tensor]:
        scales = ("out_scale",) if arguments.get("format") else ()
        return dict(zip(("out", *scales, "residual_out"), returned, strict=True)) | dict(destinations)

    def in_place(self, given: Arguments) -> tuple[Arguments, dict[str, Tensor]]:
        added = {"residual_out": given["residual"]}
        return given, added if given.get("format") else {"out": given["x"], **added}

    def expect(self, arguments: Arguments) -> tuple[Tensor, ...]:
        want: tuple[Tensor, ...] = self.reference(**arguments, dtype=torch.float64)
        return want

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want, *scale, total = expected
        x, weight = arguments["x"], arguments["weight"]
        allowed = sum_error_allowed([x.double(), arguments["residual"].double()], x.dtype)
        figures = [worst((results["residual_out"].double() - total.double()).abs(), allowed)]
        if scale:  # codes are those of the sum that the kernel gave
            named = {"out": want, "out_scale": scale[0], "residual_out": total}
            figures.append(shapes(results, named))
            if figures[-1][0] == 0.0:
                figures += judged(results, arguments, _row(results["residual_out"], weight, arguments["eps"]))
            return Judgement(*joined(*figures), named)
        allowed = normalised_error_allowed(want, total, weight.double(), arguments["eps"], allowed, x.dtype)
        figures.append(worst((results["out"].double() - want).abs(), allowed))
        return Judgement(*joined(*figures), {"out": want, "residual_out": total})


class ReduceScatterCases(OpCases):
    """Every bit is kept by a group of one rank."""

    op = "reduce_scatter"
    exact = True

    def cases(self) -> Iterator[Case]:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield Case(label=str(dtype)[6:], make=_moved(reduce_scatter_inputs, dtype=dtype), quick=True, repeats=True)
        for tokens in (0, 1, 2, 31, 33, 129):
            make = _moved(reduce_scatter_inputs, tokens=tokens)
            yield Case(label=f"{tokens} tokens", make=make, tokens=True, quick=tokens in (0, 1, 33))
        for width in (1, 7):
            yield Case(label=f"width {width}", make=_moved(reduce_scatter_inputs, hidden_size=width))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        x = arguments["x"]
        return {"out": (tuple(x.shape), x.dtype)}

    def expect(self, arguments: Arguments) -> Tensor:
        want: Tensor = self.reference(**arguments).to(arguments["x"].dtype)
        return want

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        ratio, figures = same_bits(results["out"] + 0.0, expected + 0.0)  # a sum from 0 on makes -0 a 0
        return Judgement(ratio, figures, {"out": expected})


class AllGatherCases(ReduceScatterCases):
    """Every bit is kept."""

    op = "all_gather"

    def cases(self) -> Iterator[Case]:
        for name in MOVED:
            make = _moved(all_gather_inputs, dtype=getattr(torch, name))
            yield Case(label=name, make=make, quick=True, repeats=name in FLOATS)
        yield Case(label="rows given", make=_moved(all_gather_inputs, unequal=True), quick=True, feature="rows")
        for tokens in (0, 1, 2, 31, 33, 129):
            make = _moved(all_gather_inputs, tokens=tokens)
            yield Case(label=f"{tokens} tokens", make=make, tokens=True, quick=tokens in (0, 1, 33))
        for width in (1, 7):
            yield Case(label=f"width {width}", make=_moved(all_gather_inputs, hidden_size=width))

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        ratio, figures = same_bits(results["out"], expected)
        return Judgement(ratio, figures, {"out": expected})


def _row(total: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm in float32, computed on a CPU as the reference is."""
    return normalised(total.cpu(), weight.cpu(), eps, False).to(total.device)


def _moved(inputs: Callable[..., Arguments], **sizes: object) -> Make:
    def made(device: torch.device) -> Arguments:
        usual: Arguments = {"tokens": 20, "hidden_size": 64}
        return inputs(**usual | sizes, device=device)

    return made


def _norm(options: Arguments | None = None, **inputs: object) -> Make:
    def made(device: torch.device) -> Arguments:
        usual: Arguments = {"tokens": 20, "hidden_size": 64}
        return all_reduce_rms_norm_inputs(**usual | inputs, device=device) | (options or {})

    return made


def _make(**inputs: object) -> Make:
    def made(device: torch.device) -> Arguments:
        usual: Arguments = {"tokens": 20, "hidden_size": 64}
        return all_reduce_inputs(**usual | inputs, device=device)

    return made
