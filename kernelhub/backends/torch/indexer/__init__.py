"""Records of the torch kernels of the indexer."""

from __future__ import annotations

from kernelhub.backends.torch import standings
from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.indexer.problem import DTYPES

KERNELS = (
    Kernel(
        op="mqa_logits",
        name="torch.logits",
        target="kernelhub.backends.torch.indexer.logits:Logits",
        summary="products in float32, a block of queries and keys at a time",
        band=Band.REFERENCE,
        constraints=(ANYWHERE, dtype_in("dtype", *DTYPES), anything("num_heads", "head_dim")),
        features=frozenset({"k_scale"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        standings=standings.EVERYWHERE,
    ),
    Kernel(
        op="paged_mqa_logits",
        name="torch.logits",
        target="kernelhub.backends.torch.indexer.logits:PagedLogits",
        summary="pages gathered, products in float32, a block of keys at a time",
        band=Band.REFERENCE,
        constraints=(ANYWHERE, dtype_in("dtype", *DTYPES), anything("num_heads", "head_dim", "page_size")),
        features=frozenset({"k_scale"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        standings=standings.EVERYWHERE,
    ),
    Kernel(
        op="topk_indices",
        name="torch.topk",
        target="kernelhub.backends.torch.indexer.topk:TopK",
        summary="the k-th value by torch.topk, then all values above it and the first equal ones",
        band=Band.REFERENCE,
        constraints=(ANYWHERE, anything("k")),
        features=frozenset({"row_starts", "row_ends"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings.EVERYWHERE,
    ),
)
