"""Module of each op, public name and part of kernelhub. No other module of kernelhub names modules in strings."""

from __future__ import annotations

# Each op and the module of its public function. The module `problem` in the same folder has the op's record.
OPS: dict[str, str] = {
    "attention": "kernelhub.ops.attention.attention",
    "paged_attention": "kernelhub.ops.attention.paged_attention",
    "merge_attention_states": "kernelhub.ops.merge.op",
    "write_kv_cache": "kernelhub.ops.kv_cache.op",
    "mla_attention": "kernelhub.ops.mla.attention.op",
    "write_mla_cache": "kernelhub.ops.mla.cache.op",
    "concat_mla_k": "kernelhub.ops.mla.concat.op",
    "mqa_logits": "kernelhub.ops.indexer.mqa_logits",
    "paged_mqa_logits": "kernelhub.ops.indexer.paged_mqa_logits",
    "topk_indices": "kernelhub.ops.indexer.topk_indices",
    "linear_attention": "kernelhub.ops.linear_attention.op",
    "all_reduce": "kernelhub.ops.comm.all_reduce",
    "all_reduce_rms_norm": "kernelhub.ops.comm.all_reduce_rms_norm",
    "moe_dispatch": "kernelhub.ops.comm.experts.dispatch",
    "moe_combine": "kernelhub.ops.comm.experts.combine",
    "reduce_scatter": "kernelhub.ops.comm.reduce_scatter",
    "all_gather": "kernelhub.ops.comm.all_gather",
    "quantize_fp8": "kernelhub.ops.quant.fp8",
    "dequantize_fp8": "kernelhub.ops.quant.fp8",
    "quantize_mxfp4": "kernelhub.ops.quant.mx",
    "dequantize_mxfp4": "kernelhub.ops.quant.mx",
    "quantize_mxfp8": "kernelhub.ops.quant.mx",
    "dequantize_mxfp8": "kernelhub.ops.quant.mx",
    "quantize_nvfp4": "kernelhub.ops.quant.nvfp4",
    "dequantize_nvfp4": "kernelhub.ops.quant.nvfp4",
    "rms_norm_quant": "kernelhub.ops.fused_quant.norm",
    "silu_and_mul_quant": "kernelhub.ops.fused_quant.activation",
    "fp4_gemm": "kernelhub.ops.gemm.fp4.op",
    "bmm_fp8": "kernelhub.ops.gemm.fp8.batched.op",
    "fp8_gemm": "kernelhub.ops.gemm.fp8.op",
    "grouped_gemm": "kernelhub.ops.gemm.grouped.op",
    "fused_moe": "kernelhub.ops.moe.experts.op",
    "expert_parallel_moe": "kernelhub.ops.moe.parallel.op",
    "route_experts": "kernelhub.ops.moe.routing.op",
}
# Objects of other rooms that the hub uses, by role. The hub imports each at its first use.
PARTS: dict[str, str] = {
    "functions": "kernelhub.ops:functions",
    "records": "kernelhub.ops.records:OPS",
    "backends": "kernelhub.backends:builtin",
    "order": "kernelhub.backends.order:ORDER",
    "evidence": "kernelhub.evidence.known:KNOWN",
    "audit": "kernelhub.evidence.audit.watching:watch",
    "engine_variables": "kernelhub.compat.env:said",
}
# Public modules.
MODULES: tuple[str, ...] = ("errors", "testing")
# Every public name and its module.
HOMES: dict[str, str] = {
    **OPS,
    "explain": "kernelhub.dispatch.explain",
    "report": "kernelhub.dispatch.api",
    "use": "kernelhub.dispatch.api",
    "strict": "kernelhub.dispatch.api",
    "configure": "kernelhub.dispatch.api",
    "reload": "kernelhub.dispatch.api",
    "register_backend": "kernelhub.dispatch.api",
    "verify": "kernelhub.evidence.verify",
    "tune": "kernelhub.evidence.tuning.tune",
    "PackedWeight": "kernelhub.ops.packed",
    "Selection": "kernelhub.dispatch.selection",
    "DeviceFacts": "kernelhub.probes.device",
    "SimulatedMachine": "kernelhub.dispatch.machine",
    "cache_notices": "kernelhub.runtime.caches.notices",
    "set_cache_variables": "kernelhub.runtime.caches.variables",
    "health": "kernelhub.runtime.health",
    "seal": "kernelhub.runtime.seal",
    "unseal": "kernelhub.runtime.seal",
    "warm": "kernelhub.runtime.warm",
    "warmup": "kernelhub.warming.warmup",
    "problems_of": "kernelhub.ops.models.problems",
    "agree": "kernelhub.runtime.ranks.agree",
}
