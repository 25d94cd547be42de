"""Cases of the collectives: on this process alone, where the sum is the operand. Tests of ranks compare true sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, same_bits
from kernelhub.ops.comm.inputs import all_reduce_inputs


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
        ratio, figures = same_bits(results["out"], expected)
        return Judgement(ratio, figures, {"out": expected})


def _make(**inputs: object) -> Make:
    def made(device: torch.device) -> Arguments:
        usual: Arguments = {"tokens": 20, "hidden_size": 64}
        return all_reduce_inputs(**usual | inputs, device=device)

    return made
