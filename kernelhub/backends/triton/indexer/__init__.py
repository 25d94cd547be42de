"""Records of the Triton kernels of the indexer."""

from __future__ import annotations

from kernelhub.backends.triton import standings
from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import Between, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.indexer.problem import DTYPES, LogitsProblem


def _float32_is_small(problem: LogitsProblem) -> str | None:
    """A query of 64 heads of 256 in float32 takes 64 of the 99 KB that every GPU has."""
    if problem.dtype == "float32" and problem.num_heads > 64 and problem.head_dim > 128:
        return f"{problem.num_heads} heads of {problem.head_dim} in float32 do not fit into shared memory"
    return None


_TILES = (
    Between("num_heads", 1, 128, why="a program holds the scores of all heads"),
    Between("head_dim", 1, 256, why="a program holds whole heads"),
    Rule(("dtype", "num_heads", "head_dim"), _float32_is_small, remedy="give q and k in bfloat16"),
)

KERNELS = (
    Kernel(
        op="mqa_logits",
        name="triton.logits",
        target="kernelhub.backends.triton.indexer.logits_adapter:Logits",
        summary="a tile of keys by a block of queries, heads summed in registers",
        band=Band.PORTABLE,
        constraints=(*MACHINE, dtype_in("dtype", *DTYPES), *_TILES),
        features=frozenset({"k_scale"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="paged_mqa_logits",
        name="triton.logits",
        target="kernelhub.backends.triton.indexer.logits_adapter:PagedLogits",
        summary="a tile of a sequence's keys by its last tokens, heads summed in registers",
        band=Band.PORTABLE,
        constraints=(*MACHINE, dtype_in("dtype", *DTYPES), *_TILES, anything("page_size")),
        features=frozenset({"k_scale"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="topk_indices",
        name="triton.search",
        target="kernelhub.backends.triton.indexer.topk_search_adapter:Search",
        summary="a row in registers, or parts of it first: its k-th element is found by counting",
        band=Band.PORTABLE,
        constraints=(*MACHINE, Between("k", 1, 8192, why="of a part of 16384 elements at most half are left")),
        features=frozenset({"row_starts", "row_ends"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="topk_indices",
        name="triton.radix",
        target="kernelhub.backends.triton.indexer.topk_adapter:TopK",
        summary="radix selection by histograms of four digits, rows split to occupy every multiprocessor",
        band=Band.PORTABLE,
        constraints=(*MACHINE, anything("k")),
        features=frozenset({"row_starts", "row_ends"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings.STANDINGS,
    ),
)
