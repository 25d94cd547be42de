"""The cases in which each Triton kernel is launched at least once, those with the largest tiles."""

from __future__ import annotations

ONCE = frozenset(
    {
        "paged prefill 256/256",
        "decode, 64 heads of 256",
        "mixed",
        "fp4 gemm 64, mxfp4 packed",
        "fp4 gemm 256, nvfp4 packed",
        "fp4 gemm 512, mxfp4 packed",
        "bmm_fp8 512 x 192, 2048 rows",
        "fp8_gemm row, 64 rows",
        "fp8_gemm block, 4096 rows",
        "grouped bf16, many",
        "grouped nvfp4, many",
        "grouped mxfp8 by mxfp4, many",
        "logits of 128 heads of 256",
        "paged logits of 128 heads of 256",
        "topk of ranges",
        "topk search of many ranges",
        "linear prefill, bfloat16",
        "linear decode, 256 wide",
        "merge of two, float32",
        "merge of many, float32",
        "concat bfloat16",
        "one-shot sum of 8 ranks to 8MB, float32",
        "two-shot sum of 8 ranks to 8MB, float32",
        "sum of 8 ranks and norm, 8192 wide",
        "kv cache, fp8, 192 and 128",
        "mla cache, fp8",
        "mla 128 heads",
        "routing of deepseek-v3.2",
        "experts fp8 block, 4096 tokens",
        "experts nvfp4, 4096 tokens",
        "quantize nvfp4",
        "quantize fp8 tensor",
        "quantize fp8 token",
        "quantize fp8 block",
        "dequantize nvfp4",
    }
)
