"""Order of the kernels of `paged_mqa_logits`."""

from kernelhub.dispatch.order import Line

LINES = (
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
