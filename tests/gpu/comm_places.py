"""Runs of a collective into given tensors, other ones each time; scenes of `comm_conformance.py`.

The launcher's extension makes a run that comes again, and sees no more than its tensors. So each kind of place comes
again, in no order, and on each rank another one: apart, at an odd address, strided, in place. Results are compared with
those of runs without places, bit by bit, on the device, and so is all memory beside them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.errors import InvalidArgument

Run = Callable[..., Any]
Kind = str | Mapping[str, int]  # one of these, or for results in place of operands which operand
BESIDE = ("apart", "odd", "strided")
IN_PLACE: dict[str, tuple[Kind, ...]] = {
    "all_reduce": ({"out": 0},),
    "all_reduce_rms_norm": (
        *({"out": 0}, {"out": 1}, {"residual_out": 0}, {"residual_out": 1}),
        *({"out": 0, "residual_out": 1}, {"out": 1, "residual_out": 0}),
    ),
    "all_reduce_rms_norm, quantised": ({"residual_out": 0}, {"residual_out": 1}),
}
_GARBAGE = 0x7F  # of bytes: NaN in float8, large in other dtypes
_MARGIN = 64  # bytes on both sides
_REFUSED_EACH = 100  # turns between runs that overlap an operand


def kinds_of(op: str, quantised: bool) -> tuple[Kind, ...]:
    return *BESIDE, *IN_PLACE.get(f"{op}, quantised" if quantised else op, ())


class Placed:
    """Operands and places of one run.

    Args:
        kind: where the results are.
        operands: of the run.
        results: of these operands without places, by the names of their places.
    """

    def __init__(self, kind: Kind, operands: Sequence[Any], results: Mapping[str, Tensor]) -> None:
        self.operands = [one.clone() if isinstance(one, Tensor) else one for one in operands]
        self._before, self._wanted = operands, results
        self._around: list[Tensor] = []
        inside = {} if isinstance(kind, str) else kind
        self.places = {
            name: self.operands[inside[name]] if name in inside else self._beside(kind, name, like)
            for name, like in results.items()
        }

    def wrong(self, found: Any) -> Tensor:
        """Whether a result is wrong or elsewhere, or anything beside it has changed."""
        taken = self.places.values()
        wrong = [different(self.places[name], want) for name, want in self._wanted.items()]
        wrong += [around.ne(_GARBAGE).any() for around in self._around]
        for one, before in zip(self.operands, self._before, strict=True):
            if isinstance(one, Tensor) and not any(one is place for place in taken):
                wrong.append(different(one, before))
        returned = {one.data_ptr() for one in (found if isinstance(found, tuple) else (found,))}
        return torch.stack(wrong).any() | (not {place.data_ptr() for place in taken} <= returned)

    def _beside(self, kind: Kind, name: str, like: Tensor) -> Tensor:
        count, size = like.nbytes, like.element_size()
        if kind == "strided" and name != "out_scale":
            wide = self._garbage(2 * count, like).view(like.dtype).view(*like.shape, 2)
            self._around.append(wide[..., 1:].view(torch.uint8))
            return wide[..., 0]
        raw, begin = self._garbage(count + 2 * _MARGIN, like), _MARGIN - (size if kind == "odd" else 0)
        self._around += [raw[:begin], raw[begin + count :]]
        return raw[begin : begin + count].view(like.dtype).view(like.shape)

    @staticmethod
    def _garbage(num_bytes: int, like: Tensor) -> Tensor:
        return torch.full((num_bytes,), _GARBAGE, dtype=torch.uint8, device=like.device)


def different(one: Tensor, other: Tensor) -> Tensor:
    """Whether two tensors have other bits."""
    bits = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.ne(*bits).any()


def eager(
    run: Run, kinds: Sequence[Kind], cases: Sequence[tuple[list[Any], dict[str, Tensor]]], calls: int, rank: int
) -> list[str]:
    """Runs of the cases in turn, each into places of a kind that this rank chooses.

    Args:
        run: the run of a plan.
        kinds: of places.
        cases: operands, and results by the names of their places.
        calls: how many.
        rank: this rank.
    """
    chosen, wrong = random.Random(rank), []
    errors = torch.zeros(len(kinds), dtype=torch.int64, device=cases[0][0][0].device)
    for turn in range(calls):
        operands, results = cases[turn % len(cases)]
        at = chosen.randrange(len(kinds))
        placed = Placed(kinds[at], operands, results)
        errors[at] += placed.wrong(run(*placed.operands, **placed.places))
        if turn % _REFUSED_EACH == _REFUSED_EACH - 1 and not refuses(run, operands, results):
            wrong.append(f"call {turn}: a place that overlaps x was taken")
    return wrong + [f"{kind}: {count} calls" for kind, count in zip(kinds, errors.tolist(), strict=True) if count]


def refuses(run: Run, operands: Sequence[Any], results: Mapping[str, Tensor]) -> bool:
    """Whether a run is refused before its launch whose last result begins one element behind x, in the same memory."""
    x, name = operands[0], list(results)[-1]
    size = max(x.numel(), results[name].numel())
    memory = torch.zeros(size + 1, dtype=x.dtype, device=x.device)
    own = memory[: x.numel()].view(x.shape)
    place = memory[1 : 1 + results[name].numel()].view(results[name].shape)
    try:
        run(own, *operands[1:], **{name: place})
    except InvalidArgument:
        return True
    return False


def in_graphs(
    run: Run,
    kinds: Sequence[Kind],
    case: tuple[list[Any], dict[str, Tensor]],
    changed: Sequence[tuple[list[Any], dict[str, Tensor]]],
    capture: Callable[[Callable[[], None]], torch.cuda.CUDAGraph],
) -> list[str]:
    """Replays of a graph of runs of all kinds with changed operands, and eager runs of the same kinds between them.

    Runs of all kinds come before the capture, which cannot load code.
    """
    operands, results = case
    placed: list[Placed] = []
    wrong = []
    for kind in kinds:
        before = Placed(kind, operands, results)
        if bool(before.wrong(run(*before.operands, **before.places))):
            wrong.append(f"before the graph: {kind}")
    sources = [one.clone() if isinstance(one, Tensor) else one for one in operands]

    def runs() -> None:
        for kind in kinds:
            one = Placed(kind, sources, results)  # its copies of the sources are made anew in each replay
            run(*one.operands, **one.places)
            placed.append(one)

    graph = capture(runs)
    for turn, (new, wanted) in enumerate(changed):
        for source, value in zip(sources, new, strict=True):
            if isinstance(source, Tensor):
                source.copy_(value)
        graph.replay()
        for kind, one in zip(kinds, placed, strict=True):
            if any(bool(different(one.places[name], want)) for name, want in wanted.items()):
                wrong.append(f"replay {turn}: {kind}")
            between = Placed(kind, new, wanted)
            if bool(between.wrong(run(*between.operands, **between.places))):
                wrong.append(f"after replay {turn}: {kind}")
    return wrong
