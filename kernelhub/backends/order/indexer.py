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
    # H200, in a graph, us, search / cuda.select by clusters of blocks / torch.topk, unsorted: k 2048, 1 x 8192 10.7 /
    # 9.8 / 42, 1 x 32768 25 / 14 / 45, 1 x 131072 44 / 18 / 55, 8 x 131072 49 / 21 / 64, 31 x 8192 13.6 / 11.4 / 45,
    # 31 x 131072 85 / 43 / 92, 2 x 4096 8.0 / 7.7 / 22; k 512, 1 x 32768 23 / 12 / 44, 8 x 131072 40 / 20 / 64. Many
    # rows: 64 x 65536 73 / 30 / 97, 256 x 32768 123 / 49 / 173. 1024 x 65536, by a block for each row, 841 / 422
    # (topk_h200.json).
    *(
        Line(
            "hopper",
            rows,
            ("cuda.select", "triton.search", "triton.radix", "torch.topk"),
            "measured on an H200, torch 2.11.0, Triton 3.6.0, 2026-11-27 (benchmarks/results/topk_clusters_h200.json)",
        )
        for rows in ("few", "many")
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
