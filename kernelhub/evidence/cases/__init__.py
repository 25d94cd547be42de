"""The calls that kernels are held against, one table for all ops."""

from __future__ import annotations

from kernelhub.evidence.cases.attention import AttentionCases, PagedAttentionCases
from kernelhub.evidence.cases.case import OpCases
from kernelhub.evidence.cases.fp4 import Fp4GemmCases
from kernelhub.evidence.cases.fp8 import BmmFp8Cases, Fp8GemmCases
from kernelhub.evidence.cases.grouped import GroupedGemmCases
from kernelhub.evidence.cases.indexer import LogitsCases, PagedLogitsCases, TopKCases
from kernelhub.evidence.cases.linear_attention import LinearAttentionCases
from kernelhub.evidence.cases.merge import MergeCases
from kernelhub.evidence.cases.mla import ConcatCases, MlaAttentionCases, MlaCacheCases
from kernelhub.evidence.cases.moe import ExpertsCases, RoutingCases
from kernelhub.evidence.cases.quant import DequantizeCases, QuantizeCases

CASES: dict[str, OpCases] = {
    cases.op: cases
    for cases in (
        AttentionCases(),
        PagedAttentionCases(),
        MergeCases(),
        MlaAttentionCases(),
        MlaCacheCases(),
        ConcatCases(),
        LogitsCases(),
        PagedLogitsCases(),
        TopKCases(),
        LinearAttentionCases(),
        *(kind(format) for format in ("fp8", "mxfp4", "mxfp8", "nvfp4") for kind in (QuantizeCases, DequantizeCases)),
        Fp4GemmCases(),
        BmmFp8Cases(),
        Fp8GemmCases(),
        GroupedGemmCases(),
        ExpertsCases(),
        RoutingCases(),
    )
}
