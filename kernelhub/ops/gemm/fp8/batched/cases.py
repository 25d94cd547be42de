"""Cases of `bmm_fp8`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.cases import FEW_TOKENS, FP16, FP32, TOKENS, compared
from kernelhub.ops.gemm.fp8.tolerance import Expected, expected_of
from kernelhub.ops.gemm.variants import scaled, zeroed


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
                    make=scaled(_bmm(**form | real), parameter, 2),
                    without=_bmm(**form | real),
                    feature=parameter,
                    quick=True,
                )
                yield Case(label=f"scaled {label}, tiny {parameter}", make=scaled(_bmm(**form), parameter, -40))
                yield Case(label=f"scaled {label}, {parameter} of zero", make=zeroed(_bmm(**form), parameter))
        for operand in ("a", "b"):
            yield Case(label=f"{operand} in e5m2", make=_bmm(e5m2=operand, **each), quick=True)
            yield Case(label=f"{operand} in e5m2, 70 tokens", make=_bmm(e5m2=operand, tokens=70, **each))
        for dtype in (FP16, FP32):
            yield Case(label=str(dtype)[6:], make=_bmm(out_dtype=dtype, **each), quick=True)
        for batch in (0, 1, 2, 9):
            yield Case(label=f"batch of {batch}", make=_bmm(batch=batch, **each))
        yield Case(label="batch of 9 to float32", make=_bmm(batch=9, out_dtype=FP32, **each))
        for tokens in TOKENS:
            for name, shape in (("", {}), (", 512 x 128", real)):
                make = _bmm(tokens=tokens, **shape)
                yield Case(label=f"{tokens} tokens{name}", make=make, tokens=True, quick=tokens in FEW_TOKENS)
            make = _bmm(tokens=tokens, out_dtype=FP32, **each)
            yield Case(label=f"{tokens} tokens to float32", make=make, tokens=True)
        for n, k in ((1, 1), (63, 16), (65, 33), (129, 127), (64, 129), (128, 512)):
            yield Case(label=f"N {n}, K {k}", make=_bmm(n=n, k=k, out_dtype=FP32, **each))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": ((*arguments["a"].shape[:2], arguments["b"].shape[1]), arguments["out_dtype"])}

    def expect(self, arguments: Arguments) -> Expected:
        return expected_of(self.reference, arguments)

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        return compared(self.reference, results["out"], arguments, expected)


def _bmm(**inputs: Any) -> Make:
    return lambda device: bmm_fp8_inputs(**{"batch": 3, "tokens": 12, "n": 96, "k": 160} | inputs, device=device)
