"""Order of the kernels of the sparse indexer."""

from kernelhub.dispatch.order import Line

MQA_LOGITS = (
    Line("cpu", "*", ("torch.logits", "triton.logits"), "Triton is only interpreted on a CPU"),
    # 64 and 1024 queries of 8192 keys: 0.018 and 0.143 ms, DeepGEMM's (tokenspeed-deepgemm 2.5.0) 0.044 and 0.146; only
    # 4096 of 16384 are its own, 0.984 against 1.03.
    Line("*", "*", ("triton.logits", "deep_gemm.logits", "torch.logits"), "measured on an H200, the only GPU so far"),
    Line(
        "blackwell",
        "*",
        ("deep_gemm.logits", "triton.logits", "torch.logits"),
        "DeepGEMM's for sm_100 are what vLLM and SGLang run for the indexer: "
        "https://github.com/deepseek-ai/DeepGEMM#v32-mqa-kernels-for-the-indexer",
        expected=True,
    ),
)

PAGED_MQA_LOGITS = (
    Line("cpu", "*", ("torch.logits", "triton.logits"), "Triton is only interpreted on a CPU"),
    # 16 sequences of 2048 tokens, 64 of 8192 and 8 of 65536: 0.008, 0.042 and 0.040 ms, DeepGEMM's (tokenspeed-deepgemm
    # 2.5.0) 0.033, 0.056 and 0.056.
    Line("*", "*", ("triton.logits", "deep_gemm.logits", "torch.logits"), "measured on an H200, the only GPU so far"),
    Line(
        "blackwell",
        "*",
        ("deep_gemm.logits", "triton.logits", "torch.logits"),
        "DeepGEMM's for sm_100 are what vLLM and SGLang run for the indexer: "
        "https://github.com/deepseek-ai/DeepGEMM#v32-mqa-kernels-for-the-indexer",
        expected=True,
    ),
)

TOPK_INDICES = (
    Line("cpu", "*", ("torch.topk", "triton.search", "triton.radix"), "Triton is only interpreted on a CPU"),
    # H200, search / radix / cuda.select in a graph, k 2048, us: 32 x 32768 35 / 78 / 26, 32 x 131072 89 / 230 / 86,
    # 64 x 65536 74 / 231 / 47, 256 x 32768 119 / 393 / 52, 1024 x 65536 841 / 2217 / 422. Fewer rows of many columns
    # leave multiprocessors idle where a row is a block's: 8 x 131072 54 / 80 / 86; others gain: 8 x 16384 27 / 45 / 16.
    Line(
        "hopper",
        "many",
        ("cuda.select", "triton.search", "triton.radix", "torch.topk"),
        "measured on an H200, torch 2.11.0, Triton 3.6.0, 2026-11-26 (benchmarks/results/topk_h200.json)",
    ),
    Line(
        "*",
        "*",
        ("triton.search", "triton.radix", "cuda.select", "torch.topk"),
        "H200, k 2048, search / radix / torch.topk alone, unsorted: 64 x 8192 0.024 / 0.053 / 0.069 ms, "
        "1 x 131072 0.053 / 0.053 / 0.071, 64 x 65536 0.078 / 0.239 / 0.119, 4096 x 32768 1.62 / 4.55 / 1.69; "
        "H100, search / cuda.select: 64 x 8192 0.021 / 0.018, 1024 x 8192 0.091 / 0.069, 64 x 65536 0.084 / 0.056, "
        "4096 x 32768 1.64 / 0.79, but 1 x 8192 0.014 / 0.016 and 1 x 131072 0.050 / 0.094, since a block has a row "
        "(benchmarks/results/cuda_h100.json)",
    ),
)

ORDER = {
    "mqa_logits": MQA_LOGITS,
    "paged_mqa_logits": PAGED_MQA_LOGITS,
    "topk_indices": TOPK_INDICES,
}
