"""The items of a warm-up, from models, needs, selections, plans, lines of `NotWarmed` and callables."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.plan import Plan
from kernelhub.dispatch.problem import CHECKPOINT, WEIGHT_LAYOUT
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import ConfigurationError
from kernelhub.ops.models.batches import counts_of, need_of
from kernelhub.ops.models.description import Description
from kernelhub.ops.models.problems import Need, problems_of
from kernelhub.warming.forms import counts_for, forms_of, whole

Task = Callable[[], object]
Piece = str | Path | Description | Need | Selection[Any] | Plan | Task
What = Piece | Iterable[Piece]

_MOST_LAYERS = 3  # that a label names
_COUNTS = tuple(1 << power for power in range(20))
_REQUESTED = ("kwarg", "context")  # sources of a selection that the call itself requested
_SHAPE = re.compile(r"\w+\[([\d, ]+)\]")


@dataclass(frozen=True)
class Item:
    """Calls to prepare together: those of one problem class and one kind of sizes, or a function of the user.

    Attributes:
        need: the problem class, with one kind of sizes; None for a function.
        tokens: token counts of its calls.
        backend: the kernel that was requested by name; None for an automatic selection.
        task: the user's function, or a line.
        name: name of the function, or the line.
        packing: whether the plan's `pack` packs the weights before the selected kernel runs.
    """

    need: Need | None
    tokens: tuple[int, ...] = ()
    backend: str | None = None
    task: Task | None = None
    name: str = ""
    packing: bool = False

    @property
    def op(self) -> str:
        return self.need.op if self.need is not None else self.name

    @property
    def label(self) -> str:
        """Layers and sizes, as text."""
        if self.need is None:
            return self.name
        sizes = [f"{name} {value}" for kind in self.need.sizes for name, value in kind]
        facets = dict(self.need.facets)
        forms = [f"{name} {facets[name]}" for name in ("q_len", "length", "rows") if name in facets]
        forms += [name for name in ("ragged", "column") if facets.get(name)]
        layers = self.need.layers or ("as requested",)
        if len(layers) > _MOST_LAYERS:
            layers = (*layers[: _MOST_LAYERS - 1], f"{len(layers) - _MOST_LAYERS + 1} more")
        return ", ".join([*layers, *forms, *sizes])

    @property
    def key(self) -> str:
        """Equal for equal items in every process; empty for a function, which has no stable identity."""
        if self.need is None:
            return ""
        packing = (self.packing,) if self.packing else ()
        text = repr((self.need.op, self.need.facets, self.need.sizes, self.tokens, self.backend, *packing))
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def selection(self, device: Any, machine: Machine | None = None) -> Selection[Any]:
        """The selection for the calls of the need."""
        assert self.need is not None
        return HUB.select_as_called(self.op, self.need.problem(device), self.backend, machine, packing=self.packing)


def items_of(
    what: What, tokens: Sequence[int], setting: Mapping[str, Any], *, on_gpu: bool, packing: bool = False
) -> list[Item]:
    """All items, without duplicates.

    Args:
        what: as of `kernelhub.warmup`.
        tokens: token counts.
        setting: keyword arguments of `problems_of`, for models.
        on_gpu: whether they will be called on a GPU.
        packing: whether weights are packed, if possible, before the selected kernel runs.

    Raises:
        ConfigurationError: an unknown model, an invalid line or an unsupported object.
    """
    pieces = [what] if _is_piece(what) or not isinstance(what, Iterable) else list(what)
    of_models: list[Need] = []
    needs: list[Need] = []
    packed: list[Need] = []
    chosen: list[tuple[Need, str]] = []
    tasks: list[Item] = []
    for piece in pieces:
        if isinstance(piece, Need):
            needs.append(piece)
        elif isinstance(piece, (Selection, Plan)):
            selection = piece.selection if isinstance(piece, Plan) else piece
            need = _need_of(selection, piece.bound if isinstance(piece, Plan) else None)
            if selection.source in _REQUESTED and selection.kernel is not None:
                chosen.append((need, selection.kernel.name))
            elif _is_packed(selection):
                packed.append(need)
            else:
                needs.append(need)
        elif isinstance(piece, str) and _looks_like_a_line(piece):
            from kernelhub.warming.lines import (
                line,
            )  # here, since it imports torch, which `warmup --list` does not need

            tasks.append(Item(None, task=line(piece).run, name=piece.strip()))
        elif isinstance(piece, (str, Path, Description)):
            of_models += problems_of(piece, **setting)
        elif callable(piece):
            tasks.append(Item(None, task=piece, name=getattr(piece, "__name__", repr(piece))))
        else:
            raise ConfigurationError(
                f"warmup: {piece!r} cannot be prepared; give a model's name or config.json, plans, "
                "selections of explain(), needs of problems_of(), lines of NotWarmed, or functions"
            )
    found = [item for need in forms_of([*of_models, *needs]) for item in _items(need, tokens, None, on_gpu)]
    found += [replace(item, packing=True) for need in forms_of(packed) for item in _items(need, tokens, None, on_gpu)]
    for need in map(whole, [*needs, *packed]):  # requested itself, so that it has a call for any token counts
        if not counts_of(need, tokens):
            alone = _items(need, [n for n in _COUNTS if counts_of(need, [n])][:1], None, on_gpu)
            found += [replace(item, packing=need in packed) for item in alone]
    found += [item for need, kernel in chosen for item in _items(need, tokens, kernel, on_gpu)]
    if packing:
        found = [replace(item, packing=_takes_packed(item)) for item in found]
    return [*dict.fromkeys(found), *tasks]


def _is_packed(selection: Selection[Any]) -> bool:
    """Whether a selection concerns weights in a kernel's own layout."""
    return getattr(selection.problem, WEIGHT_LAYOUT, CHECKPOINT) != CHECKPOINT


def _takes_packed(item: Item) -> bool:
    """Whether an item has weights that can be packed."""
    return item.need is not None and WEIGHT_LAYOUT in dict(item.need.facets)


def _looks_like_a_line(text: str) -> bool:
    """Whether a text is a line of `NotWarmed` rather than a model's name."""
    return "kernelhub.warm(" in text


def _is_piece(what: object) -> bool:
    kinds = (str, Path, Description, Need, Selection, Plan)
    return isinstance(what, kinds) or (callable(what) and not isinstance(what, Iterable))


def _items(need: Need, tokens: Sequence[int], backend: str | None, on_gpu: bool) -> list[Item]:
    found = []
    for sizes in need.sizes or ((),):
        one = replace(need, sizes=(sizes,))
        counts = counts_of(one, counts_for(one, tokens, on_gpu))
        if counts:
            found.append(Item(one, counts, backend))
    return found


def _need_of(selection: Selection[Any], bound: Any) -> Need:
    """The need of a selection, in the checkpoint's layout, with the sizes that its plan was prepared with."""
    need = need_of(selection.op, selection.problem)
    facets = dict(need.facets)
    if WEIGHT_LAYOUT in facets:
        need = replace(need, facets=tuple(sorted((facets | {WEIGHT_LAYOUT: CHECKPOINT}).items())))
    forms = {} if bound is None else HUB.function(selection.op).op.forms_of(None, bound)
    sizes = tuple(_sizes_in(selection.op, forms))
    return replace(need, sizes=(sizes,)) if sizes else need


def _sizes_in(op: str, forms: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    """Sizes of the operands that are not facets."""
    if "quantize" in op and (found := _SHAPE.match(str(forms.get("x", "")))):
        width = int(found[1].split(",")[-1])
        yield "width", width * (2 if op in ("dequantize_nvfp4", "dequantize_mxfp4") else 1)
    if op == "bmm_fp8" and (found := _SHAPE.match(str(forms.get("b", "")))):
        yield "batch", int(found[1].split(",")[0])
    if op == "mla_attention" and (found := _SHAPE.match(str(forms.get("topk_indices", "")))):
        yield "topk", int(found[1].split(",")[-1])
    if isinstance(window := forms.get("window"), (int, tuple)):
        yield "window", window if isinstance(window, int) else max(window)
