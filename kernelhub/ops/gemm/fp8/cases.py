"""Cases of `fp8_gemm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, Packing
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import Expected, compare, expected_of
from kernelhub.ops.gemm.variants import lacking, scaled, transposed, zeroed

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
    "row block": {"scaling": "row_block"},
    "row block in e8m0": {"scaling": "row_block", "e8m0": (True, True)},
    "mx": {"scaling": "mx"},
    "e5m2 by tensor": {"scaling": "tensor", "e5m2": True},
    "e5m2 by row": {"scaling": "row", "e5m2": True},
    "e5m2 by block": {"scaling": "block", "e5m2": True},
    "weights by tensor": {"scaling": "tensor", "weight_only": BF16},
    "weights by channel": {"scaling": "row", "weight_only": BF16},
    "weights by channel, float16 by": {"scaling": "row", "weight_only": FP16},
    "weights by block": {"scaling": "block", "weight_only": BF16},
    "weights by block in e8m0": {"scaling": "block", "weight_only": BF16, "e8m0": (False, True)},
    "weights by row block": {"scaling": "row_block", "weight_only": BF16},
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
                    without=lacking(_fp8(out_dtype=dtype, bias=True, **scaling), "bias"),
                    feature="bias",
                    quick=dtype is BF16,
                )
            alone = "weight_only" in scaling
            for parameter in ("b_scale",) if alone else ("a_scale", "b_scale"):
                yield Case(
                    label=f"{name}, {parameter} four times as large",
                    make=scaled(_fp8(**scaling), parameter, 2),
                    without=_fp8(**scaling),
                    feature=parameter,
                    quick=True,
                )
                yield Case(label=f"{name}, tiny {parameter}", make=scaled(_fp8(**scaling), parameter, -40), quick=True)
                if scaling["scaling"] not in ("mx",) and not scaling.get("e8m0"):
                    yield Case(label=f"{name}, {parameter} of zero", make=zeroed(_fp8(**scaling), parameter))
            for tokens in TOKENS:
                make = _fp8(tokens=tokens, **scaling)
                yield Case(label=f"{name}, {tokens} tokens", make=make, tokens=True, quick=tokens in FEW_TOKENS)
            for n, k in ((7, 16), (63, 129), (129, 31), (200, 300), (64, 272)):
                make = _fp8(n=n, k=k, out_dtype=FP32, **scaling)
                yield Case(label=f"{name}, N {n}, K {k}", make=make, quick=n in (129, 64))
            for tokens in (3, 70):
                block = scaling["scaling"] == "block"
                for operand in () if alone and block else ("b",) if alone else ("a",) if block else ("a", "b"):
                    make = _with_nan(_fp8(tokens=tokens, **scaling), operand)
                    yield Case(label=f"{name}, NaN in {operand}, {tokens} rows", make=make, quick=tokens == 3)
            yield Case(label=f"{name}, other strides", make=transposed(_fp8(**scaling)), quick=True)
            for n, k in ((256, 512), (512, 2304)):
                yield Case(label=f"{name}, N {n}, K {k}", make=_fp8(n=n, k=k, **scaling))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": ((arguments["a"].shape[0], arguments["b"].shape[0]), arguments["out_dtype"])}

    def expect(self, arguments: Arguments) -> Expected:
        return expected_of(self.reference, arguments)

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        return compared(self.reference, results["out"], arguments, expected)

    def pack(self, plan: Any, arguments: Arguments) -> tuple[Arguments, tuple[Packing, ...]]:
        weight = {name: arguments[name] for name in ("b", "b_scale")}
        packed = plan.pack(**weight)
        rest = {name: value for name, value in arguments.items() if name not in weight}
        return rest | {"b": packed}, (Packing(packed, tuple(weight.values())),)


def compared(reference: Any, out: Tensor, arguments: Arguments, expected: Expected) -> Judgement:
    """Judge a product; rows and columns of NaN in the reference must be NaN, the rest is judged as a product."""
    want = expected.exact
    if not out.numel():
        return Judgement(0.0, "", {"out": want})
    if bool(want.isnan().any()):
        hidden = int((want.isnan() & ~out.isnan()).sum())
        if hidden:
            return Judgement(torch.inf, f"{hidden} elements that are NaN are numbers", {"out": want})
        rows, columns = ~want.isnan().all(1), ~want.isnan().all(0)
        part = _part_of(arguments, rows, columns)
        return compared(reference, out[rows][:, columns], part, expected_of(reference, part))
    agreement = compare(out, reference, arguments, matrix_instructions=out.is_cuda, expected=expected)
    ratio = max(agreement.largest, agreement.row, agreement.column)
    return Judgement(
        ratio,
        f"off by {float((out.double() - want).abs().max()):.2g}, {ratio:.3g} times what is allowed",
        {"out": want},
    )


def _fp8(**inputs: Any) -> Make:
    return lambda device: fp8_gemm_inputs(**{"tokens": 20, "n": 192, "k": 256} | inputs, device=device)


def _part_of(arguments: Arguments, rows: Tensor, columns: Tensor) -> Arguments:
    """The call for some rows of a and of b."""
    picked = dict(arguments)
    for name, kept in (("a", rows), ("a_scale", rows), ("b", columns), ("b_scale", columns)):
        tensor = arguments[name]
        if tensor is not None and tensor.ndim == 2 and tensor.shape[0] == len(kept):
            raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            picked[name] = raw[kept].view(tensor.dtype)
    return picked


def _with_nan(make: Make, operand: str) -> Make:
    """One element of two rows of an operand is NaN, of either sign, so that rows or columns of the result are."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        raw = arguments[operand].view(torch.uint8)
        raw[1, 37], raw[2, 5] = 0xFF, 0x7F
        return arguments

    return made
