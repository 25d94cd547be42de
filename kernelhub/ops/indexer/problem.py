"""Facets and constraints of the indexer's ops."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import bucket, facet, feature
from kernelhub.probes.device import DeviceFacts

FP8 = "float8_e4m3fn"
DTYPES = (FP8, "bfloat16", "float16", "float32")
FEW, MANY = "few", "many"
MOST_FEW = 31


@dataclass(frozen=True)
class LogitsProblem:
    """One configuration of `mqa_logits`; what `paged_mqa_logits` has in common with it."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of q and k", values=DTYPES, default=FP8)
    num_heads: int = facet("heads of the indexer", default=64)
    head_dim: int = facet("width of a head", default=128)
    k_scale: bool = feature("a scale per key", False)


@dataclass(frozen=True)
class PagedLogitsProblem(LogitsProblem):
    """One configuration of `paged_mqa_logits`."""

    page_size: int = facet("tokens per page of the cache", default=64)


@dataclass(frozen=True)
class TopKProblem:
    """One configuration of `topk_indices`."""

    device: DeviceFacts = facet("where the tensors are")
    k: int = facet("indices per row", default=2048)
    rows: str = bucket(f"rows of logits: few (up to {MOST_FEW}), many", values=(FEW, MANY), default=FEW)
    row_starts: bool = feature("rows do not start at column 0", False)
    row_ends: bool = feature("rows do not end at the last column", False)


def regime(problem: TopKProblem) -> str:
    """Order lines distinguish few rows, which kernels divide, from many."""
    return problem.rows


MQA_LOGITS = OpRecord(
    name="mqa_logits",
    summary="scores of keys by the indexer of sparse attention, each query's own range of them",
    problem=LogitsProblem,
)
PAGED_MQA_LOGITS = OpRecord(
    name="paged_mqa_logits",
    summary="scores of a paged cache's keys by the indexer of sparse attention, causally",
    problem=PagedLogitsProblem,
)
TOPK_INDICES = OpRecord(
    name="topk_indices",
    summary="indices of the highest logits of each row, for sparse attention",
    problem=TopKProblem,
    regimes=(FEW, MANY),
    regime=regime,
)
