"""Which token counts an item is called with: all at which a kernel may take other tiles, up to the largest served.

Engines run decode at the sizes of their CUDA graphs, and prefill at any size up to the most tokens of a step. Tiles of
kernels change at powers of two; those of DeepGEMM and of CUTLASS' products change with the number of tiles of 64 rows
(the candidates are multiples of 64, and which is best depends on how many waves they make), so on a GPU products and
experts are called at every multiple of 64 too.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernelhub.errors import ConfigurationError
from kernelhub.ops.attention.problem import ONE
from kernelhub.ops.models.problems import GRAPH_SIZES, Need
from kernelhub.warming.defaults import TOKEN_COUNTS, TOKEN_COUNTS_OF_CPU

_MOST_DECODED = max(GRAPH_SIZES)
_ROWS = 64
_MOST_ELEMENTS = 1 << 24
_FIRST_ROWS = (8, 16, 24, 32, 48)
_PRODUCTS = ("fp8_gemm", "fp4_gemm", "bmm_fp8", "grouped_gemm", "fused_moe")


def checked(token_counts: Sequence[int] | None, on_gpu: bool) -> tuple[int, ...]:
    """The token counts, in order, each once.

    Raises:
        ConfigurationError: one is no positive number, or there are none.
    """
    if token_counts is None:
        return TOKEN_COUNTS if on_gpu else TOKEN_COUNTS_OF_CPU
    counts = tuple(token_counts)
    for count in counts:
        if type(count) is not int or count < 1:
            raise ConfigurationError(f"token_counts: {count!r} is not a number of tokens, 1 or more")
    if not counts:
        raise ConfigurationError("token_counts is empty; give the token counts that will be served, e.g. (1, 8, 512)")
    return tuple(sorted(set(counts)))


def counts_for(need: Need, counts: Sequence[int], on_gpu: bool) -> tuple[int, ...]:
    """Those of an item: of decode, up to the largest graph; of products on a GPU, every tile too."""
    facets = dict(need.facets)
    columns = max((number for sizes in need.sizes for name, number in sizes if name == "columns"), default=0)
    if columns:
        counts = [count for count in counts if count * columns <= _MOST_ELEMENTS] or list(counts[:1])
    if need.op == "paged_mqa_logits" or (facets.get("q_len") == ONE and not facets.get("ragged")):
        few = tuple(count for count in counts if count <= _MOST_DECODED)
        return few or tuple(counts[:1])
    if on_gpu and need.op in _PRODUCTS and counts:
        most = max(counts)
        tiles = {*_FIRST_ROWS, *range(_ROWS, most + 1, _ROWS)}
        return tuple(sorted({*counts, *(count for count in tiles if count <= most)}))
    return tuple(counts)
