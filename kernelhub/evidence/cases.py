"""The cases of every op, by the op's name; each op states its own in its `cases.py`."""

from __future__ import annotations

from kernelhub.ops.attention.cases import AttentionCases, PagedAttentionCases
from kernelhub.ops.case import OpCases
from kernelhub.ops.comm.cases import AllGatherCases, AllReduceCases, AllReduceRmsNormCases, ReduceScatterCases
from kernelhub.ops.comm.experts.cases import CombineCases, DispatchCases
from kernelhub.ops.fused_quant.cases import ActivationCases, NormCases
from kernelhub.ops.gemm.fp4.cases import Fp4GemmCases
from kernelhub.ops.gemm.fp8.batched.cases import BmmFp8Cases
from kernelhub.ops.gemm.fp8.cases import Fp8GemmCases
from kernelhub.ops.gemm.grouped.cases import GroupedGemmCases
from kernelhub.ops.indexer.cases import LogitsCases, PagedLogitsCases, TopKCases
from kernelhub.ops.kv_cache.cases import KvCacheCases
from kernelhub.ops.linear_attention.cases import LinearAttentionCases
from kernelhub.ops.merge.cases import MergeCases
from kernelhub.ops.mla.attention.cases import MlaAttentionCases
from kernelhub.ops.mla.cache.cases import MlaCacheCases
from kernelhub.ops.mla.concat.cases import ConcatCases
from kernelhub.ops.moe.experts.cases import ExpertsCases
from kernelhub.ops.moe.parallel.cases import ParallelCases
from kernelhub.ops.moe.routing.cases import RoutingCases
from kernelhub.ops.quant.cases import DequantizeCases, QuantizeCases

CASES: dict[str, OpCases] = {
    cases.op: cases
    for cases in (
        AttentionCases(),
        PagedAttentionCases(),
        MergeCases(),
        KvCacheCases(),
        MlaAttentionCases(),
        MlaCacheCases(),
        ConcatCases(),
        LogitsCases(),
        PagedLogitsCases(),
        TopKCases(),
        LinearAttentionCases(),
        AllReduceCases(),
        AllReduceRmsNormCases(),
        DispatchCases(),
        CombineCases(),
        ReduceScatterCases(),
        AllGatherCases(),
        *(kind(format) for format in ("fp8", "mxfp4", "mxfp8", "nvfp4") for kind in (QuantizeCases, DequantizeCases)),
        NormCases(),
        ActivationCases(),
        Fp4GemmCases(),
        BmmFp8Cases(),
        Fp8GemmCases(),
        GroupedGemmCases(),
        ExpertsCases(),
        ParallelCases(),
        RoutingCases(),
    )
}
