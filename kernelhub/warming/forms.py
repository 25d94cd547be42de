"""The forms in which engines ask for what a model needs: each is a problem class, or a layout, of its own.

===========================  =======================================================================================
what may differ              forms that are made ready
===========================  =======================================================================================
rows of a product            few and many, whatever the phase: a batch of 512 is decoded with many
a ragged batch's longest     not said, 1, 2 to 16 (with 2, 4, 8 and 16, of which tiles are chosen), and more
scales of a block-scaled a   row by row, and column by column; `quantize_fp8` in groups writes both
the indexer's cache          scales beside the pages, and within them
columns of top-k             4096, 8192, ... 131072 keys of all sequences together, as few rows and as many as 2**24
                             elements allow
weights that a kernel packs  as in the checkpoint, and packed
===========================  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kernelhub.ops.attention.problem import ANY, FEW, MANY, ONE
from kernelhub.ops.models.calls import need_of
from kernelhub.ops.models.problems import Need

_FEW_QUERIES = (2, 4, 8, 16)
COLUMNS = (4096, 8192, 16384, 32768, 65536, 131072)
_ROWS = (FEW, MANY)

Sizes = tuple[tuple[str, int], ...]


def forms_of(needs: Iterable[Need]) -> list[Need]:
    """The needs in every form, each problem class once, with the sizes of all that ask for it."""
    found: dict[tuple[str, tuple[tuple[str, object], ...]], Need] = {}
    for need in needs:
        for form in _forms(whole(need)):
            key = form.op, form.facets
            known = found.get(key)
            if known is not None:
                form = replace(
                    known,
                    phases=tuple(dict.fromkeys((*known.phases, *form.phases))),
                    layers=tuple(dict.fromkeys((*known.layers, *form.layers))),
                    sizes=tuple(dict.fromkeys((*known.sizes, *form.sizes))),
                )
            found[key] = form
    return list(found.values())


def whole(need: Need) -> Need:
    """The need with every facet written out."""
    said = need_of(need.op, need.problem("cpu"))
    return replace(need, facets=said.facets)


def _forms(need: Need) -> Iterator[Need]:
    facets = dict(need.facets)
    if need.op in ("fp8_gemm", "grouped_gemm"):
        both = (False, True) if need.op == "fp8_gemm" and facets.get("scaling") == "block" else (False,)
        for rows in _ROWS:
            yield _changed(need, rows=rows) if both == (False,) else _sized(_changed(need, rows=rows), "column")
    elif "attention" in need.op and facets.get("ragged") and "q_len" in facets and need.op != "linear_attention":
        yield _changed(need, q_len=ANY)
        yield _changed(need, q_len=ONE)
        few = _changed(need, q_len=FEW)
        yield replace(few, sizes=tuple((*sizes, ("queries", n)) for sizes in need.sizes or ((),) for n in _FEW_QUERIES))
        yield _changed(need, q_len=MANY)
    elif need.op == "quantize_fp8" and facets.get("granularity") == "group":
        yield need
        yield _changed(need, column=True)
    elif need.op == "topk_indices":
        wide = tuple((*sizes, ("columns", number)) for sizes in need.sizes or ((),) for number in COLUMNS)
        yield replace(need, sizes=wide)
    elif need.op == "paged_mqa_logits":
        yield _sized(need, "fused")
    else:
        yield need


def _changed(need: Need, **facets: object) -> Need:
    return replace(need, facets=tuple(sorted((dict(need.facets) | facets).items())))


def _sized(need: Need, name: str) -> Need:
    """With and without what a size asks for."""
    return replace(need, sizes=tuple(form for sizes in need.sizes or ((),) for form in (sizes, (*sizes, (name, 1)))))
