"""Cases of `expert_parallel_moe`: on this process alone. Tests of ranks compare layers of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases
from kernelhub.ops.models.shapes import MoeModel
from kernelhub.ops.moe.experts.problem import ACTIVATIONS, FORMATS
from kernelhub.ops.moe.experts.tolerance import Expected, compare, expected_of
from kernelhub.ops.moe.parallel.inputs import parallel_inputs

_MODEL = MoeModel("8 experts", num_experts=8, top_k=2, hidden_size=128, intermediate_size=128)


class ParallelCases(OpCases):
    """Every format of weights, with and without a capacity."""

    op = "expert_parallel_moe"

    def cases(self) -> Iterator[Case]:
        for weights in FORMATS:
            plain = weights == "plain"
            yield Case(label=weights, make=_make(weights=weights), quick=plain, repeats=plain)
        for most in (None, 300):
            yield Case(label=f"room for {most}", make=_make(max_tokens=most), quick=most is None)
            blocks = _make(max_tokens=most, weights="fp8_block", activation_dtype="fp8_block")
            yield Case(label=f"blocks of float8, room for {most}", make=blocks, quick=most is None)
        for tokens in (0, 1, 2, 17):
            yield Case(label=f"{tokens} tokens", make=_make(tokens=tokens), tokens=True, quick=True)
        for dtype in (torch.float16, torch.float32):
            yield Case(label=str(dtype)[6:], make=_make(dtype=dtype))
        for activation in ACTIVATIONS[1:]:
            yield Case(
                label=activation,
                make=_make(bias=True, more={"activation": activation, "limit": 0.5}),
                without=_make(bias=True),
                feature="activation",
                quick=activation == ACTIVATIONS[3],
            )
        for name in ("w13_bias", "w2_bias"):
            kept, other = _make(bias=True), {name: None}
            yield Case(label=name, make=kept, without=_make(bias=True, more=other), feature=name, quick=True)

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": (tuple(arguments["x"].shape), arguments["x"].dtype)}

    def expect(self, arguments: Arguments) -> tuple[Expected, ...]:
        return expected_of(of_one_process(arguments))

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        agreement = compare(results["out"], of_one_process(arguments), expected=expected)
        figures = f"{agreement.worst:.2g} of what an element may be off, {agreement.overall:.2g} of all together"
        return Judgement(agreement.ratio if agreement.finite else torch.inf, figures, {"out": expected[0].want})


def of_one_process(arguments: Arguments) -> Arguments:
    """The arguments of `fused_moe` that mean the same in a group of one rank."""
    return {name: value for name, value in arguments.items() if name not in ("group", "max_tokens")}


def _make(*, more: Arguments | None = None, bias: bool = False, **inputs: Any) -> Make:
    def made(device: torch.device) -> Arguments:
        usual: Arguments = {"tokens": 5, "max_tokens": 20, "weights": "plain"}
        given = parallel_inputs(model=_MODEL, bias=bias, **usual | inputs, device=device) | (more or {})
        return {name: value for name, value in given.items() if value is not None or name == "max_tokens"}

    return made
