"""The forms of a model's problems in engines: each is a problem class or a layout of its own.

===========================  =======================================================================================
what may differ              forms that are prepared
===========================  =======================================================================================
rows of a product            few and many, whatever the phase: a batch of 512 is decoded with many; of `fp4_gemm` and
                             `fp8_gemm` few, some and many
tokens of experts            few and many; on a CPU one call has many, if the token counts are the default ones
a ragged batch's longest     unset, 1, 2 to 16 (with 2, 4, 8 and 16, which select tiles), and more
scales of a block-scaled a   row by row, and column by column; `quantize_fp8` in groups writes both
the indexer's cache          scales beside the pages, and within them
columns of top-k             4096, 8192, ... 131072 keys of all sequences together, as few rows and as many as 2**24
                             elements allow
weights that a kernel packs  as in the checkpoint, and packed
===========================  =======================================================================================

The token counts of a form are all counts at which a kernel may switch tiles, up to the largest served. Engines run
decode at the sizes of their CUDA graphs, and prefill at any size up to the most tokens of a step. Most kernels switch
tiles at powers of two. DeepGEMM's and CUTLASS' products switch with the number of tiles of 64 rows (candidates are
multiples of 64, and the best one depends on the number of waves), so on a GPU products and experts are also called at
every multiple of 64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kernelhub.errors import ConfigurationError
from kernelhub.ops.attention.problem import ANY, FEW, LENGTHS, MANY, ONE
from kernelhub.ops.gemm.fp4.problem import ROWS as _ROWS_OF_FP4
from kernelhub.ops.gemm.fp8.problem import ROWS as _ROWS_OF_FP8
from kernelhub.ops.models.batches import need_of
from kernelhub.ops.models.problems import GRAPH_SIZES, Need
from kernelhub.ops.moe.experts.problem import MOST_FEW
from kernelhub.warming.defaults import TOKEN_COUNTS, TOKEN_COUNTS_OF_CPU

_FEW_QUERIES = (2, 4, 8, 16)
COLUMNS = (4096, 8192, 16384, 32768, 65536, 131072)
_ROWS = (FEW, MANY)

Sizes = tuple[tuple[str, int], ...]


def forms_of(needs: Iterable[Need]) -> list[Need]:
    """The needs in every form, each problem class once, with the sizes of all needs of that class."""
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
    """The need with every facet explicit."""
    said = need_of(need.op, need.problem("cpu"))
    return replace(need, facets=said.facets)


def _forms(need: Need) -> Iterator[Need]:
    facets = dict(need.facets)
    if need.op in ("fp8_gemm", "grouped_gemm", "fused_moe"):
        both = (False, True) if need.op == "fp8_gemm" and facets.get("scaling") == "block" else (False,)
        for rows in _ROWS_OF_FP8 if need.op == "fp8_gemm" else _ROWS:
            yield _changed(need, rows=rows) if both == (False,) else _sized(_changed(need, rows=rows), "column")
    elif need.op == "fp4_gemm":
        for rows in _ROWS_OF_FP4:
            yield _changed(need, rows=rows)
    elif "attention" in need.op and facets.get("ragged") and "q_len" in facets and need.op != "linear_attention":
        yield _changed(need, q_len=ANY)
        yield _changed(need, q_len=ONE)
        few = _changed(need, q_len=FEW)
        yield replace(few, sizes=tuple((*sizes, ("queries", n)) for sizes in need.sizes or ((),) for n in _FEW_QUERIES))
        yield _changed(need, q_len=MANY)
    elif need.op == "attention" and facets.get("q_len") == MANY:
        for length in LENGTHS:
            yield _changed(need, length=length)
    elif need.op == "quantize_fp8" and facets.get("granularity") == "group":
        yield need
        yield _changed(need, column=True)
    elif need.op == "topk_indices":
        wide = tuple((*sizes, ("columns", number)) for sizes in need.sizes or ((),) for number in COLUMNS)
        for rows in _ROWS:
            yield replace(_changed(need, rows=rows), sizes=wide)
    elif need.op == "paged_mqa_logits":
        yield _sized(need, "fused")
    else:
        yield need


def _changed(need: Need, **facets: object) -> Need:
    return replace(need, facets=tuple(sorted((dict(need.facets) | facets).items())))


def _sized(need: Need, name: str) -> Need:
    """The needs with and without the forms that a size requires."""
    return replace(need, sizes=tuple(form for sizes in need.sizes or ((),) for form in (sizes, (*sizes, (name, 1)))))


_MOST_DECODED = max(GRAPH_SIZES)
_TILE_ROWS = 64
_MOST_ELEMENTS = 1 << 24
_FIRST_ROWS = (8, 16, 24, 32, 48)
_PRODUCTS = ("fp8_gemm", "fp4_gemm", "bmm_fp8", "grouped_gemm", "fused_moe")


def checked(token_counts: Sequence[int] | None, on_gpu: bool) -> tuple[int, ...]:
    """The token counts, in order, each once.

    Raises:
        ConfigurationError: a count is not a positive number, or there are none.
    """
    if token_counts is None:
        return TOKEN_COUNTS if on_gpu else TOKEN_COUNTS_OF_CPU
    if isinstance(token_counts, int):
        raise ConfigurationError(f"token_counts is {token_counts}; give a list of numbers, [{token_counts}]")
    counts = tuple(token_counts)
    for count in counts:
        if type(count) is not int or count < 1:
            raise ConfigurationError(f"token_counts: {count!r} is not a number of tokens, 1 or more")
    if not counts:
        raise ConfigurationError("token_counts is empty; give the token counts that will be served, e.g. (1, 8, 512)")
    return tuple(sorted(set(counts)))


def counts_for(need: Need, counts: Sequence[int], on_gpu: bool) -> tuple[int, ...]:
    """The token counts of an item: for decode, up to the largest graph; for products on a GPU, every tile too."""
    facets = dict(need.facets)
    columns = max((number for sizes in need.sizes for name, number in sizes if name == "columns"), default=0)
    if columns:
        counts = [count for count in counts if count * columns <= _MOST_ELEMENTS] or list(counts[:1])
    if need.op == "paged_mqa_logits" or (facets.get("q_len") == ONE and not facets.get("ragged")):
        few = tuple(count for count in counts if count <= _MOST_DECODED)
        return few or tuple(counts[:1])
    if need.op == "fused_moe" and facets.get("rows") == MANY and tuple(counts) == TOKEN_COUNTS_OF_CPU:
        return (MOST_FEW + 1,)  # one size is as good as another there, and nobody said that many never come
    if on_gpu and need.op in _PRODUCTS and counts:
        most = max(counts)
        tiles = {*_FIRST_ROWS, *range(_TILE_ROWS, most + 1, _TILE_ROWS)}
        return tuple(sorted({*counts, *(count for count in tiles if count <= most)}))
    return tuple(counts)
