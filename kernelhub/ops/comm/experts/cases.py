"""Cases of the collectives of experts: on this process alone. Tests of ranks compare true exchanges."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, joined, same_bits
from kernelhub.ops.comm.experts.inputs import combine_inputs, dispatch_inputs
from kernelhub.ops.comm.experts.problem import FORMATS, TOKENS
from kernelhub.ops.comm.experts.received import Dispatched
from kernelhub.ops.formats import E4M3

_IDS = ((0, 1, 2), (3, -1, 3), (5, 5, 5), (-1, -1, 99), (7, 0, -7))
_USUAL: Arguments = {"tokens": 5, "hidden_size": 256, "num_experts": 8, "top_k": 3, "max_tokens": 8}
_KINDS: tuple[tuple[str, Arguments], ...] = tuple(
    (f"{format}{', exact' if exact else ''}", {"format": format} | ({"max_tokens": None} if exact else {}))
    for format in FORMATS
    for exact in (False, True)
)


class _ExpertCases(OpCases):
    exact = True

    @abc.abstractmethod
    def made(self, **inputs: Any) -> Make:
        """A call with these inputs in place of the usual ones."""

    def cases(self) -> Iterator[Case]:
        for label, kind in _KINDS:
            yield Case(label=label, make=self.made(**kind), quick=True, repeats=True)
            yield Case(label=f"{label}, ids of none and twice", make=self.made(**kind, ids=_IDS), quick=True)
            yield Case(label=f"{label}, all to one", make=self.made(**kind, ids=((2, 2, -1),) * 5))
        for dtype in (torch.float16, torch.float32):
            yield Case(label=str(dtype)[6:], make=self.made(dtype=dtype), quick=True)
        for tokens in (0, 1, 2, 7, 8):
            yield Case(label=f"{tokens} tokens", make=self.made(tokens=tokens), tokens=True, quick=tokens < 2)
        yield Case(label="33 tokens", make=self.made(tokens=33, max_tokens=300), tokens=True, quick=True)
        for top_k in (1, 8):
            yield Case(label=f"top {top_k}", make=self.made(top_k=top_k))
        for width in (1, 7, 1000):
            yield Case(label=f"width {width}", make=self.made(hidden_size=width, format=FORMATS[1]))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {}


class DispatchCases(_ExpertCases):
    """Every bit of every row arrives at its expert, in the order of the tokens."""

    op = "moe_dispatch"

    def made(self, **inputs: Any) -> Make:
        return lambda device: dispatch_inputs(**_USUAL | inputs, device=device)

    def cases(self) -> Iterator[Case]:
        yield from super().cases()
        for label, kind in _KINDS:
            yield Case(label=f"{label}, float8", make=self.made(**kind, dtype=E4M3), quick=True)

    def results(self, returned: Any, destinations: Mapping[str, Tensor], arguments: Arguments) -> dict[str, Tensor]:
        return by_expert(self.reference(**arguments) if returned is None else returned)

    def returned_for(self, names: Any, returned: Any) -> dict[str, Tensor]:
        return {}

    def expect(self, arguments: Arguments) -> dict[str, Tensor]:
        return by_expert(self.reference(**arguments))

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        ratio, figures = joined(*(same_bits(results[name], want) for name, want in expected.items()))
        return Judgement(ratio, figures, expected)


class CombineCases(_ExpertCases):
    """Sums of small integers are exact."""

    op = "moe_combine"

    def made(self, **inputs: Any) -> Make:
        return lambda device: combine_inputs(**_USUAL | inputs, device=device)

    def cases(self) -> Iterator[Case]:
        yield from super().cases()
        for format in FORMATS:
            given: Arguments = {"format": format, "max_tokens": None, "all_tokens": True}
            yield Case(label=f"{format}, all tokens", make=self.made(**given), quick=True, repeats=True)

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        y, handle = arguments["y"], arguments["handle"]
        return {"out": ((handle[1].shape[0], y.shape[-1]), y.dtype)}

    def later(self, arguments: Arguments) -> Arguments:
        return arguments | {"y": arguments["y"].flip(0)}

    def expect(self, arguments: Arguments) -> Tensor:
        want: Tensor = self.reference(**arguments).to(arguments["y"].dtype)
        return want

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        # -0 and 0 are both right.
        ratio, figures = same_bits(results["out"] + 0.0, expected + 0.0)
        return Judgement(ratio, figures, {"out": expected})


def by_expert(sent: Dispatched) -> dict[str, Tensor]:
    """What each expert gets, in one form for all formats: rows by expert, then by token, with weights and scales."""
    if sent.format == TOKENS:
        assert sent.topk_ids is not None
        assert sent.topk_weights is not None
        token, choice = (sent.topk_ids >= 0).nonzero(as_tuple=True)
        order = sent.topk_ids[token, choice].argsort(stable=True)
        rows, weights = token[order], sent.topk_weights[token, choice][order]
    else:
        slots, weight = sent.handle[2], sent.handle[3]
        named = slots >= 0
        rows, order = slots[named].long().sort()
        weights = weight[named][order]
    made = {"rows": _rows(sent.x, rows), "weights": weights, "counts": sent.counts}
    return made if sent.scales is None else made | {"scales": _rows(sent.scales, rows)}


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat.view(torch.uint8)[rows].view(tensor.dtype)
