"""Cases of `fp8_gemm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, Packing
from kernelhub.ops.formats import from_e8m0, to_e8m0_up
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.tolerance import Expected, compare, expected_of
from kernelhub.ops.gemm.variants import omitting, scaled, transposed, zeroed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOKENS = (0, 1, 2, 3, 4, 5, 16, 17, 33, 64, 65, 129, 260)
FEW_TOKENS = (0, 1, 2, 17)
# Shapes at the edges of tiles, and shapes of whole tiles, for kernels that take no others.
RAGGED = ((1, 128), (7, 16), (63, 129), (129, 31), (130, 1), (200, 300), (64, 272))
WHOLE = ((16, 16), (1296, 32), (128, 128), (192, 256), (384, 640), (512, 2304))

SCALINGS: dict[str, Arguments] = {
    "tensor": {"scaling": "tensor"},
    "token x channel": {"scaling": "row"},
    "block": {"scaling": "block"},
    "block in e8m0": {"scaling": "block", "e8m0": (True, True)},
    "weights in e8m0": {"scaling": "block", "e8m0": (False, True)},
    "row block": {"scaling": "row_block"},
    "row block in e8m0": {"scaling": "row_block", "e8m0": (True, True)},
    "mx": {"scaling": "mx"},
    "weights by channel": {"scaling": "row", "weight_only": BF16},
    "weights by block": {"scaling": "block", "weight_only": BF16},
    "weights by block in e8m0": {"scaling": "block", "weight_only": BF16, "e8m0": (False, True)},
}
# The scalings whose every size is a case; others differ from one of them in the format of an operand or of a scale.
THOROUGH = ("tensor", "token x channel", "block", "row block", "mx", "weights by channel", "weights by block")
VARIANTS: dict[str, Arguments] = {
    "token x tensor": {"scaling": "row", "per_row": (True, False)},
    "tensor x channel": {"scaling": "row", "per_row": (False, True)},
    "activations in e8m0": {"scaling": "block", "e8m0": (True, False)},
    "row block, weights in e8m0": {"scaling": "row_block", "e8m0": (False, True)},
    "e5m2 by tensor": {"scaling": "tensor", "e5m2": True},
    "e5m2 by row": {"scaling": "row", "e5m2": True},
    "e5m2 by block": {"scaling": "block", "e5m2": True},
    "e5m2 by row block, weights in e8m0": {"scaling": "row_block", "e5m2": True, "e8m0": (False, True)},
    "e5m2 by mx": {"scaling": "mx", "e5m2": True},
    "weights by tensor": {"scaling": "tensor", "weight_only": BF16},
    "weights by row block": {"scaling": "row_block", "weight_only": BF16},
    "weights by tensor, float16 by": {"scaling": "tensor", "weight_only": FP16},
    "weights by channel, float16 by": {"scaling": "row", "weight_only": FP16},
    "weights by block, float16 by": {"scaling": "block", "weight_only": FP16},
    "weights by block in e8m0, float16 by": {"scaling": "block", "weight_only": FP16, "e8m0": (False, True)},
    "weights by row block, float16 by": {"scaling": "row_block", "weight_only": FP16},
}


class Fp8GemmCases(OpCases):
    """Every scaling, at a shape of whole blocks and at awkward ones."""

    op = "fp8_gemm"
    formats = ("scaling", "a_scale_dtype", "b_scale_dtype", "weight_only", "e5m2")
    read = (*formats, "out_dtype", "bias")

    def concerns(self, of_case: Any, served: Any) -> bool:
        """Whether a case has the formats and scales that are served, and no bias that is not."""
        same = all(getattr(of_case, name) == getattr(served, name) for name in self.formats)
        return same and of_case.out_dtype in ("bfloat16", served.out_dtype) and of_case.bias <= served.bias

    def cases(self) -> Iterator[Case]:
        for name, scaling in SCALINGS.items():
            yield from _of_dtypes(name, scaling)
            yield from _of_scales(name, scaling)
            yield from _of_sizes(name, scaling)
            for tokens in (3, 70):
                for operand in _may_be_nan(scaling):
                    make = _with_nan(_fp8(tokens=tokens, **scaling), operand)
                    yield Case(label=f"{name}, NaN in {operand}, {tokens} rows", make=make, quick=tokens == 3)
            yield Case(label=f"{name}, other strides", make=transposed(_fp8(**scaling)), quick=True)
        for name, scaling in VARIANTS.items():
            yield from _of_dtypes(name, scaling)
            yield Case(label=f"{name}, 65 tokens", make=_fp8(tokens=65, **scaling), tokens=True)
            yield Case(label=f"{name}, N 200, K 300", make=_fp8(n=200, k=300, bias=True, out_dtype=FP32, **scaling))
        for form in ("tensor", "row", "block"):
            for dtype in (BF16, FP16):
                yield from _of_short_scales(form, dtype)

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": ((*arguments["a"].shape[:-1], arguments["b"].shape[0]), arguments["out_dtype"])}

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
    return lambda device: fp8_gemm_inputs(**{"tokens": 20, "n": 128, "k": 256} | inputs, device=device)


def _of_dtypes(name: str, scaling: Arguments) -> Iterator[Case]:
    """Every dtype of the result, with and without a bias."""
    for dtype in (BF16, FP16, FP32):
        quick, label = dtype is BF16, f"{name}, {str(dtype)[6:]}"
        repeats = quick or (dtype is FP32 and name in THOROUGH)
        yield Case(label=label, make=_fp8(out_dtype=dtype, **scaling), quick=quick, repeats=repeats)
        biased = _fp8(out_dtype=dtype, bias=True, **scaling)
        without = omitting(biased, "bias") if quick else None
        yield Case(label=f"{label}, bias", make=biased, without=without, feature="bias", quick=quick)


def _of_scales(name: str, scaling: Arguments) -> Iterator[Case]:
    """Scales that are larger, tiny, zero, far apart, and one that is larger than the others."""
    plain = _fp8(**scaling)
    whole = scaling["scaling"] == "tensor"
    for parameter in ("b_scale",) if "weight_only" in scaling else ("a_scale", "b_scale"):
        larger = scaled(plain, parameter, 2)
        label = f"{name}, {parameter} four times as large"
        yield Case(label=label, make=larger, without=plain, feature=parameter, quick=True)
        yield Case(label=f"{name}, tiny {parameter}", make=scaled(plain, parameter, -40), quick=True)
        if scaling["scaling"] != "mx" and not scaling.get("e8m0"):
            yield Case(label=f"{name}, {parameter} of zero", make=zeroed(plain, parameter))
        for tokens in () if whole or name not in THOROUGH else (5, 70):
            make = _last_doubled(_fp8(tokens=tokens, n=200, k=300, out_dtype=FP32, **scaling), parameter)
            yield Case(label=f"{name}, the last {parameter} twice as large, {tokens} rows", make=make)
    if name in ("block in e8m0", "row block in e8m0", "mx"):
        for tokens in (4, 70):
            make = scaled(scaled(_fp8(tokens=tokens, out_dtype=FP32, **scaling), "a_scale", 60), "b_scale", -60)
            yield Case(label=f"{name}, scales 2^120 apart, {tokens} rows", make=make)


def _of_sizes(name: str, scaling: Arguments) -> Iterator[Case]:
    """Numbers of tokens, shapes, and sums that are split; results in float32 show the most."""
    thorough = name in THOROUGH
    for tokens in TOKENS if thorough else (*FEW_TOKENS, 65):
        make = _fp8(tokens=tokens, **scaling)
        yield Case(label=f"{name}, {tokens} tokens", make=make, tokens=True, quick=tokens in FEW_TOKENS)
    for tokens in (3, 17, 130) if thorough else ():
        make = _fp8(tokens=tokens, n=192, out_dtype=FP32, **scaling)
        yield Case(label=f"{name}, {tokens} tokens to float32", make=make, tokens=True)
    for n, k in RAGGED if thorough else ((129, 31), (200, 300)):
        make = _fp8(n=n, k=k, out_dtype=FP32, **scaling)
        yield Case(label=f"{name}, N {n}, K {k}", make=make, quick=n in (129, 64))
    for n, k in WHOLE if thorough else ((192, 256), (512, 2304)):
        yield Case(label=f"{name}, N {n}, K {k}", make=_fp8(n=n, k=k, **scaling))
    for tokens, k in ((3, 2304), (20, 1152), (130, 640)) if thorough else ():
        make = _fp8(tokens=tokens, n=40, k=k, bias=True, **scaling)
        yield Case(label=f"{name}, {tokens} rows of a long K", make=make, repeats=name == "block")


def _of_short_scales(form: str, dtype: torch.dtype) -> Iterator[Case]:
    """Weights whose scales have few bits, as packed formats hold them: of activations' dtype, or powers of two."""
    label = f"weights by {form}, {str(dtype)[6:]} by, scales of few bits"

    def make(**inputs: Any) -> Make:
        return _short(_fp8(scaling=form, weight_only=dtype, out_dtype=dtype, **inputs), form == "block")

    yield Case(label=label, make=make(), repeats=True, packs=True)
    for tokens in (1, 16, 17):
        yield Case(label=f"{label}, {tokens} tokens", make=make(tokens=tokens), tokens=True)
    shapes = ((1, 128), (64, 384), (65, 128), (130, 384))
    for n, k in shapes if form == "block" else (*shapes, (192, 64), (100, 192)):
        yield Case(label=f"{label}, N {n}, K {k}", make=make(n=n, k=k), packs=n == 65)


def _may_be_nan(scaling: Arguments) -> tuple[str, ...]:
    """Operands of which one may have NaN for the rest of the result to be judged."""
    if "weight_only" in scaling:
        return () if scaling["scaling"] == "block" else ("b",)
    return ("a",) if scaling["scaling"] == "block" else ("a", "b")


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


def _last_doubled(make: Make, parameter: str) -> Make:
    """The scale of the last block is twice as large."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        scale = arguments[parameter]
        if scale.dtype is FP32:
            scale[-1, -1] *= 2
        else:
            scale.view(torch.uint8)[-1, -1] += 1
        return arguments

    return made


def _short(make: Make, blocks: bool) -> Make:
    """Scales of blocks rounded up to powers of two, others to the dtype of the activations."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        scale = arguments["b_scale"]
        short = from_e8m0(to_e8m0_up(scale)) if blocks else scale.to(arguments["a"].dtype).float()
        return arguments | {"b_scale": short}

    return made
