"""Cases of `concat_mla_k`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, same_bits
from kernelhub.ops.formats import E4M3
from kernelhub.ops.mla.concat.inputs import concat_inputs

DTYPES = (torch.bfloat16, torch.float16, torch.float32, E4M3)


class ConcatCases(OpCases):
    """Every bit is copied."""

    op = "concat_mla_k"
    exact = True

    def cases(self) -> Iterator[Case]:
        for heads in (5, 128):
            for dtype in DTYPES:
                label = f"{str(dtype)[6:]}, {heads} heads"
                yield Case(label=label, make=_concat(dtype=dtype, num_heads=heads), quick=True, repeats=True)
            for tokens in (0, 1, 2, 3, 31, 33, 129):
                make = _concat(tokens=tokens, num_heads=heads)
                yield Case(
                    label=f"{tokens} tokens, {heads} heads", make=make, tokens=True, quick=tokens in (0, 1, 2, 33)
                )
        for heads in (1, 3):
            yield Case(label=f"{heads} heads", make=_concat(num_heads=heads))
        for nope, rope in ((192, 64), (7, 3), (1, 1)):
            yield Case(label=f"{nope} + {rope}", make=_concat(nope_dim=nope, rope_dim=rope))
        yield Case(label="NaN and negative zero", make=_any_bits, quick=True)

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        k_nope, k_rope = arguments["k_nope"], arguments["k_rope"]
        return {"out": ((*k_nope.shape[:2], k_nope.shape[2] + k_rope.shape[-1]), k_nope.dtype)}

    def in_place(self, given: Arguments) -> tuple[Arguments, dict[str, Tensor]]:
        k_nope = given["k_nope"]
        shape, _ = self.destinations(given)["out"]
        out = k_nope.new_empty(shape)
        kept = out[..., : k_nope.shape[2]]
        kept.copy_(k_nope)
        return given | {"k_nope": kept}, {"out": out}

    def expect(self, arguments: Arguments) -> Any:
        return self.reference(**arguments)

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want = expected
        ratio, figures = same_bits(results["out"], want)
        return Judgement(ratio, figures, {"out": want})


def _concat(**inputs: Any) -> Make:
    return lambda device: concat_inputs(**{"tokens": 18, "num_heads": 5} | inputs, device=device)


def _any_bits(device: torch.device) -> Arguments:
    arguments = concat_inputs(tokens=18, num_heads=5, device=device)
    for seed, tensor in enumerate(arguments.values()):
        random = torch.Generator(device="cpu").manual_seed(seed)
        bits = torch.randint(-(1 << 15), 1 << 15, tensor.shape, generator=random, dtype=torch.int16, device="cpu")
        tensor.copy_(bits.view(torch.bfloat16).to(device))
    return arguments
