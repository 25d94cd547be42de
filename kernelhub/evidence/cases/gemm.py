"""Cases of `fp8_gemm`, `bmm_fp8` and `fp4_gemm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import kernelhub
from kernelhub.evidence.cases.case import Arguments, Case, Judgement, Make, OpCases, worst
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp4.problem import A_FORMATS, B_FORMATS
from kernelhub.ops.gemm.fp4.tolerance import error_allowed
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import compare

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOKENS = (0, 1, 2, 3, 5, 15, 16, 17, 33, 63, 64, 65, 128, 129)
FEW_TOKENS = (0, 1, 2, 17)

SCALINGS: dict[str, Arguments] = {
    "tensor": {"scaling": "tensor"},
    "token x channel": {"scaling": "row"},
    "token x tensor": {"scaling": "row", "per_row": (True, False)},
    "tensor x channel": {"scaling": "row", "per_row": (False, True)},
    "block": {"scaling": "block"},
    "block in e8m0": {"scaling": "block", "e8m0": (True, True)},
    "weights in e8m0": {"scaling": "block", "e8m0": (False, True)},
    "mx": {"scaling": "mx"},
}


class Fp8GemmCases(OpCases):
    """Every scaling, at a shape of whole blocks and at awkward ones."""

    op = "fp8_gemm"

    def cases(self) -> Iterator[Case]:
        for name, scaling in SCALINGS.items():
            for dtype in (BF16, FP16, FP32):
                label = f"{name}, {str(dtype)[6:]}"
                yield Case(label=label, make=_fp8(out_dtype=dtype, **scaling), quick=dtype is BF16, repeats=True)
                yield Case(
                    label=f"{label}, bias",
                    make=_fp8(out_dtype=dtype, bias=True, **scaling),
                    without=_no_bias(_fp8(out_dtype=dtype, bias=True, **scaling)),
                    feature="bias",
                    quick=dtype is BF16,
                )
            for parameter in ("a_scale", "b_scale"):
                yield Case(
                    label=f"{name}, {parameter} four times as large",
                    make=_scaled(_fp8(**scaling), parameter, 2),
                    without=_fp8(**scaling),
                    feature=parameter,
                    quick=True,
                )
                yield Case(label=f"{name}, tiny {parameter}", make=_scaled(_fp8(**scaling), parameter, -40), quick=True)
                if scaling["scaling"] not in ("mx",) and not scaling.get("e8m0"):
                    yield Case(label=f"{name}, {parameter} of zero", make=_zeroed(_fp8(**scaling), parameter))
            for tokens in TOKENS:
                make = _fp8(tokens=tokens, **scaling)
                yield Case(label=f"{name}, {tokens} tokens", make=make, tokens=True, quick=tokens in FEW_TOKENS)
            for n, k in ((7, 16), (63, 129), (129, 31), (200, 300), (64, 272)):
                yield Case(label=f"{name}, N {n}, K {k}", make=_fp8(n=n, k=k, out_dtype=FP32, **scaling))
            for n, k in ((256, 512), (512, 2304)):
                yield Case(label=f"{name}, N {n}, K {k}", make=_fp8(n=n, k=k, **scaling))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": ((arguments["a"].shape[0], arguments["b"].shape[0]), arguments["out_dtype"])}

    def judge(self, results: Mapping[str, Tensor], arguments: Arguments) -> Judgement:
        return _judge_fp8(kernelhub.fp8_gemm.reference, results["out"], arguments)


class BmmFp8Cases(OpCases):
    """Scales of the whole and of each matrix."""

    op = "bmm_fp8"

    def cases(self) -> Iterator[Case]:
        each: Arguments = {"a_scaling": "batch", "b_scaling": "batch"}
        real: Arguments = {"batch": 4, "n": 512, "k": 128}
        forms = {"as a whole": {}, "each": each, "a each": {"a_scaling": "batch"}, "b each": {"b_scaling": "batch"}}
        for label, form in forms.items():
            yield Case(label=f"scaled {label}", make=_bmm(**form), quick=True, repeats=True)
            yield Case(label=f"scaled {label}, 512 x 128", make=_bmm(**form | real), quick=True)
            for parameter in ("a_scale", "b_scale"):
                yield Case(
                    label=f"scaled {label}, {parameter} four times as large",
                    make=_scaled(_bmm(**form | real), parameter, 2),
                    without=_bmm(**form | real),
                    feature=parameter,
                    quick=True,
                )
                yield Case(label=f"scaled {label}, tiny {parameter}", make=_scaled(_bmm(**form), parameter, -40))
                yield Case(label=f"scaled {label}, {parameter} of zero", make=_zeroed(_bmm(**form), parameter))
        for dtype in (FP16, FP32):
            yield Case(label=str(dtype)[6:], make=_bmm(out_dtype=dtype, **each), quick=True)
        for batch in (0, 1, 2, 9):
            yield Case(label=f"batch of {batch}", make=_bmm(batch=batch, **each))
        for tokens in TOKENS:
            for name, shape in (("", {}), (", 512 x 128", real)):
                make = _bmm(tokens=tokens, **shape)
                yield Case(label=f"{tokens} tokens{name}", make=make, tokens=True, quick=tokens in FEW_TOKENS)
        for n, k in ((1, 1), (63, 16), (65, 33), (129, 127), (128, 512)):
            yield Case(label=f"N {n}, K {k}", make=_bmm(n=n, k=k, out_dtype=FP32, **each))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": ((*arguments["a"].shape[:2], arguments["b"].shape[1]), arguments["out_dtype"])}

    def judge(self, results: Mapping[str, Tensor], arguments: Arguments) -> Judgement:
        return _judge_fp8(kernelhub.bmm_fp8.reference, results["out"], arguments)


class Fp4GemmCases(OpCases):
    """Every pair of formats; each weight is packed too by kernels that pack."""

    op = "fp4_gemm"

    def cases(self) -> Iterator[Case]:
        for a in A_FORMATS:
            for b in B_FORMATS:
                for n, k in ((72, 256), (128, 512)):
                    label, form = f"{a} x {b}, N {n}, K {k}", {"a_format": a, "b_format": b, "n": n, "k": k}
                    quick = n == 128 and "float16" not in a.removeprefix("b")
                    yield Case(label=label, make=_fp4(**form), quick=quick, repeats=True, packs=True)
                    yield Case(
                        label=f"{label}, bias",
                        make=_fp4(bias=True, **form),
                        without=_no_bias(_fp4(bias=True, **form)),
                        feature="bias",
                        quick=quick,
                    )
                    scales = ["b_scale", *(f"{name}_global_scale" for name, f in (("a", a), ("b", b)) if f == "nvfp4")]
                    scales += ["a_scale"] if not a.endswith("float16") else []
                    for parameter in scales:
                        yield Case(
                            label=f"{label}, {parameter} four times as large",
                            make=_scaled(_fp4(**form), parameter, 2),
                            without=_fp4(**form),
                            feature=parameter,
                            quick=quick,
                        )
                for tokens in (
                    TOKENS if (a, b) in (("bfloat16", "nvfp4"), ("bfloat16", "mxfp4"), ("nvfp4", "nvfp4")) else ()
                ):
                    make = _fp4(tokens=tokens, a_format=a, b_format=b, n=128, k=512)
                    label = f"{a} x {b}, {tokens} tokens"
                    yield Case(label=label, make=make, tokens=True, quick=tokens in FEW_TOKENS, packs=tokens == 17)
        for name in ("a_global_scale", "b_global_scale"):
            make = _fp4(a_format="nvfp4", n=128, k=512)
            yield Case(label=f"tiny {name}", make=_scaled(make, name, -40), quick=True)
            yield Case(label=f"{name} of zero", make=_zeroed(make, name))
        for n in (1, 63, 65, 129):
            yield Case(label=f"N {n}", make=_fp4(n=n), packs=True)
        for k in (16, 48, 144, 272):
            yield Case(label=f"K {k}", make=_fp4(k=k), packs=True)
        for dtype in (FP16, FP32):
            yield Case(label=f"to {str(dtype)[6:]}", make=_fp4(out_dtype=dtype, n=128, k=512), packs=True)
        yield Case(label="a K that is split", make=_fp4(k=2064, n=40, a_format="nvfp4"), packs=True)
        yield Case(label="one scale for fp8", make=_fp4(a_format="fp8", per_row=False, n=128, k=512))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": ((arguments["a"].shape[0], arguments["b"].shape[0]), arguments["out_dtype"])}

    def judge(self, results: Mapping[str, Tensor], arguments: Arguments) -> Judgement:
        want = kernelhub.fp4_gemm.reference(**arguments, dtype=torch.float64)
        size = _sizes(arguments)
        if arguments.get("bias") is not None:
            size = size + arguments["bias"].double().abs()
        allowed = error_allowed(want, size, 2 * arguments["b"].shape[1], results["out"].dtype)
        return Judgement(*worst((results["out"].double() - want).abs(), allowed), {"out": want})

    def pack(self, plan: Any, arguments: Arguments) -> tuple[Arguments, tuple[Tensor | None, ...]] | None:
        weight = {name: arguments.get(name) for name in ("b", "b_scale", "b_global_scale")}
        packed = plan.pack(**weight)
        rest = {name: value for name, value in arguments.items() if not name.startswith("b_")}
        return rest | {"b": packed}, tuple(weight.values())


def _sizes(arguments: Arguments) -> Tensor:
    """The sums of the magnitudes of all products, float64."""
    plain = {name: value for name, value in arguments.items() if name != "bias"}
    for name in ("a", "b"):
        codes = plain[name]
        if codes.dtype is torch.uint8:
            plain[name] = codes & 0x77
        elif codes.itemsize == 1:
            plain[name] = (codes.view(torch.uint8) & 0x7F).view(codes.dtype)
        else:
            plain[name] = codes.abs()
    size: Tensor = kernelhub.fp4_gemm.reference(**plain, dtype=torch.float64)
    return size


def _judge_fp8(reference: Any, out: Tensor, arguments: Arguments) -> Judgement:
    want = reference(**arguments, dtype=torch.float64)
    if not out.numel():
        return Judgement(0.0, "", {"out": want})
    agreement = compare(out, reference, arguments, matrix_instructions=out.is_cuda)
    ratio = max(agreement.largest, agreement.row, agreement.column)
    return Judgement(
        ratio,
        f"off by {float((out.double() - want).abs().max()):.2g}, {ratio:.3g} times what is allowed",
        {"out": want},
    )


def _fp8(**inputs: Any) -> Make:
    return lambda device: fp8_gemm_inputs(**{"tokens": 20, "n": 192, "k": 256} | inputs, device=device)


def _bmm(**inputs: Any) -> Make:
    return lambda device: bmm_fp8_inputs(**{"batch": 3, "tokens": 12, "n": 96, "k": 160} | inputs, device=device)


def _fp4(**inputs: Any) -> Make:
    return lambda device: fp4_gemm_inputs(**{"tokens": 5, "n": 72, "k": 256} | inputs, device=device)


def _no_bias(make: Make) -> Make:
    def made(device: torch.device) -> Arguments:
        return {name: value for name, value in make(device).items() if name != "bias"}

    return made


def _scaled(make: Make, parameter: str, power: int) -> Make:
    """The scales of an operand times a power of two, within what their format holds."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        scale = arguments[parameter]
        if scale.dtype in (E8M0, torch.uint8):
            raw = scale.view(torch.uint8).int() + power
            scale = raw.clamp(1, 254).to(torch.uint8).view(scale.dtype)
        elif scale.dtype is E4M3:
            scale = (scale.float() * 2.0**power).clamp(max=448.0).to(E4M3)
        else:
            scale = scale * 2.0**power
        return arguments | {parameter: scale}

    return made


def _zeroed(make: Make, parameter: str) -> Make:
    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        return arguments | {parameter: torch.zeros_like(arguments[parameter])}

    return made
