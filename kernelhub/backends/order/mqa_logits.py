"""Order of the kernels of `mqa_logits`."""

from kernelhub.dispatch.order import Line

LINES = (
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
