"""Cases of `fp4_gemm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, Packing, worst
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp4.problem import A_FORMATS, B_FORMATS
from kernelhub.ops.gemm.fp4.tolerance import error_allowed
from kernelhub.ops.gemm.variants import omitting, scaled, zeroed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOKENS = (0, 1, 2, 3, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 260)
FEW_TOKENS = (0, 1, 2, 17)
# Pairs of formats that kernels of their own take.
SWEPT = (("bfloat16", "nvfp4"), ("bfloat16", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"))


class Fp4GemmCases(OpCases):
    """Every pair of formats; each weight is packed too by kernels that pack."""

    op = "fp4_gemm"
    formats = ("a_format", "b_format")
    read = (*formats, "out_dtype", "bias")

    def concerns(self, of_case: Any, served: Any) -> bool:
        """Whether a case has the formats that are served, and no bias that is not."""
        same = all(getattr(of_case, name) == getattr(served, name) for name in self.formats)
        return same and of_case.out_dtype in ("bfloat16", served.out_dtype) and of_case.bias <= served.bias

    def cases(self) -> Iterator[Case]:
        for a in A_FORMATS:
            for b in B_FORMATS:
                for n, k in ((72, 256), (128, 512)):
                    label, form = f"{a} x {b}, N {n}, K {k}", {"a_format": a, "b_format": b, "n": n, "k": k}
                    quick = n == 128 and a != "float16"
                    yield Case(label=label, make=_fp4(**form), quick=quick, repeats=True, packs=True)
                    yield Case(
                        label=f"{label}, bias",
                        make=_fp4(bias=True, **form),
                        without=omitting(_fp4(bias=True, **form), "bias"),
                        feature="bias",
                        quick=quick,
                    )
                    scales = ["b_scale", *(f"{name}_global_scale" for name, f in (("a", a), ("b", b)) if f == "nvfp4")]
                    scales += ["a_scale"] if not a.endswith("float16") else []
                    for parameter in scales:
                        yield Case(
                            label=f"{label}, {parameter} four times as large",
                            make=scaled(_fp4(**form), parameter, 2),
                            without=_fp4(**form),
                            feature=parameter,
                            quick=quick,
                        )
                make = _fp4(tokens=40, a_format=a, b_format=b, bias=True)
                yield Case(label=f"{a} x {b}, 40 tokens, bias", make=make)
                for tokens in TOKENS if (a, b) in SWEPT else ():
                    make = _fp4(tokens=tokens, a_format=a, b_format=b, n=128)
                    label = f"{a} x {b}, {tokens} tokens"
                    yield Case(label=label, make=make, tokens=True, quick=tokens in FEW_TOKENS, packs=tokens == 17)
        # Packed formats give results of the activations' dtype.
        for a, b, dtype in (("bfloat16", "nvfp4", BF16), ("float16", "nvfp4", FP16), ("bfloat16", "mxfp4", BF16)):
            for n, k in ((1, 64), (63, 128), (64, 192), (65, 192), (129, 64)):
                make = _fp4(a_format=a, b_format=b, n=n, k=k, out_dtype=dtype)
                yield Case(label=f"{a} x {b} to {str(dtype)[6:]}, N {n}, K {k}", make=make, packs=n in (1, 65))
        for tokens in (1, 9, 17, 65):
            make = _fp4(a_format="float16", out_dtype=FP16, tokens=tokens)
            yield Case(label=f"float16 x nvfp4 to float16, {tokens} tokens", make=make, tokens=True)
        for both in B_FORMATS:
            for n, k in ((32, 64), (160, 128), (128, 128), (256, 384), (384, 1024)):
                make = _fp4(a_format=both, b_format=both, n=n, k=k)
                yield Case(label=f"{both} x {both}, N {n}, K {k}", make=make, packs=n == 160)
            make = _fp4(a_format=both, b_format=both, n=128, out_dtype=FP16)
            yield Case(label=f"{both} x {both} to float16", make=make, packs=True)
        for tokens in (3, 40):
            make = _with_nan_scale(_fp4(b_format="mxfp4", tokens=tokens, n=128, k=512))
            yield Case(label=f"NaN in one of the scales, {tokens} tokens", make=make, quick=True)
        for name in ("a_global_scale", "b_global_scale"):
            make = _fp4(a_format="nvfp4", n=128, k=512)
            yield Case(label=f"tiny {name}", make=scaled(make, name, -40), quick=True)
            yield Case(label=f"{name} of zero", make=zeroed(make, name))
        for tokens in (2, 34):
            for n in (1, 63, 65, 129):
                yield Case(label=f"N {n}, {tokens} tokens", make=_fp4(n=n, tokens=tokens), packs=tokens == 2)
            for k in (16, 48, 128, 144, 272):
                yield Case(label=f"K {k}, {tokens} tokens", make=_fp4(k=k, tokens=tokens), packs=tokens == 2)
        for k in (32, 96, 160):
            make = _fp4(k=k, a_format="mxfp4", b_format="mxfp4", tokens=16)
            yield Case(label=f"mxfp4 x mxfp4, K {k}", make=make)
        for dtype in (FP16, FP32):
            yield Case(label=f"to {str(dtype)[6:]}", make=_fp4(out_dtype=dtype, n=128, k=512), packs=True)
            yield Case(label=f"to {str(dtype)[6:]}, bias", make=_fp4(out_dtype=dtype, bias=True, tokens=16))
        for tokens in (5, 35):
            make = _fp4(a_format="fp8", per_row=False, n=128, tokens=tokens)
            yield Case(label=f"one scale for fp8, {tokens} tokens", make=make)
        make = _fp4(k=1040, n=40, tokens=17, bias=True, out_dtype=FP32)
        yield Case(label="a K that is split, to float32", make=make, repeats=True, packs=True)
        yield Case(label="a K that is split", make=_fp4(k=2064, n=40, a_format="nvfp4"), packs=True)
        make = _fp4(k=1024, n=40, a_format="fp8", bias=True)
        yield Case(label="a K that is split, fp8", make=make, packs=True)
        yield Case(label="70 tokens, a long K", make=_fp4(k=1024, tokens=70), repeats=True)

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": ((*arguments["a"].shape[:-1], arguments["b"].shape[0]), arguments["out_dtype"])}

    def expect(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        want = self.reference(**arguments, dtype=torch.float64)
        size = _sizes(self.reference, arguments)
        if arguments.get("bias") is not None:
            size = size + arguments["bias"].double().abs()
        return want, size

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want, size = expected
        out = results["out"]
        allowed = error_allowed(want, size, 2 * arguments["b"].shape[1], out.dtype)
        numbers = ~(want.isnan() & out.isnan())
        return Judgement(*worst((out.double() - want).abs()[numbers], allowed[numbers]), {"out": want})

    def pack(self, plan: Any, arguments: Arguments) -> tuple[Arguments, tuple[Packing, ...]]:
        weight = {name: arguments.get(name) for name in ("b", "b_scale", "b_global_scale")}
        packed = plan.pack(**weight)
        rest = {name: value for name, value in arguments.items() if not name.startswith("b_")}
        return rest | {"b": packed}, (Packing(packed, tuple(weight.values())),)


def _sizes(reference: Any, arguments: Arguments) -> Tensor:
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
    size: Tensor = reference(**plain, dtype=torch.float64)
    return size


def _fp4(**inputs: Any) -> Make:
    return lambda device: fp4_gemm_inputs(**{"tokens": 5, "n": 72, "k": 256} | inputs, device=device)


def _with_nan_scale(make: Make) -> Make:
    """One scale of one row of b is NaN, so that a column of the result is."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        arguments["b_scale"].view(torch.uint8)[5, 3] = 0xFF
        return arguments

    return made
