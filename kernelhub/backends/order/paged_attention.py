"""Order of the kernels of `paged_attention`."""

from kernelhub.dispatch.order import Line

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)"
_NO_PEER = "torch has no kernel that reads lengths on the device"
# trtllm_* and fa2 have not run on a GPU here. vLLM's FlashAttention-2 and FlashAttention-4 are right on an H200 and
# were not timed over pages: the driver compiles the one, CuTe DSL the other, at the first call of a class.
_LAST = (
    "flashinfer.trtllm_gen",
    "flashinfer.trtllm_context",
    "flash_attn.fa2",
    "flash_attn.vllm_fa2",
    "flash_attn.fa4",
)
# On an H200, 64 x 4096 tokens, 32 heads to 8: cudnn_decode 0.325 ms, split_kv 0.261; each class of sizes costs a graph.
# The others are wrong with NaN in a page's unused end, and so only forced: 1.19 and 1.25 there; prefill of 4 x 4096
# 1.17 and 1.42, triton.prefill 1.93.
_CUDNN = ("flashinfer.cudnn_decode", "cudnn.sdpa_paged", "flashinfer.cudnn_prefill")
# FlashInfer 0.6.18 on an H200, 64 heads to 8 of 128, pages of 64 tokens; what its plans cost the host is not in it.
# 64 x 4096: split_kv 0.264 ms, fa2_decode_tc and fa2_prefill 0.262, xqa 0.299; 256 x 1024 0.275, 0.277, 0.302;
# 1 x 131072 0.147, 0.145, 0.155; 32 heads to 32, 32 x 4096: 0.503, fa2_prefill 0.500, fa2_decode 0.538. So
# what stands in a full graph and plans nothing goes first.
_FLASHINFER_DECODE = (
    "flashinfer.fa2_decode_tc",
    "flashinfer.fa2_prefill",
    "flashinfer.xqa",
    "flashinfer.fa2_decode",
)

_SINKS = ("flashinfer.fa3_sinks", "flashinfer.fa2_sinks")  # right on an H200, and not timed there
_FA3 = ("flash_attn.fa3", "flash_attn.vllm_fa3")
_DECODE = (
    "triton.split_kv",
    "triton.split_kv_fixed",
    *_FA3,
    *_FLASHINFER_DECODE,
    "triton.prefill",
    "triton.mixed",
    "flashinfer.fa3_prefill",
    *_SINKS,
    *_LAST,
    *_CUDNN,
    "torch.blocked",
)
_ONE_RUN = "one run on an H200, 64 heads to 8, pages of 64: tokenspeed-fa3, vLLM 0.33.0, FlashInfer 0.6.18"

LINES = (
    Line(
        "cpu",
        "*",
        (
            "torch.packed",
            "torch.blocked",
            "triton.split_kv",
            "triton.split_kv_fixed",
            "triton.mixed",
            "triton.prefill",
        ),
        "measured on an EPYC (benchmarks/results/attention_cpu.json)",
    ),
    # 64 x 4096 tokens: split_kv reaches 0.93 of the memory roof, split_kv_fixed 0.78; 1 x 131072: 0.145 and 0.209 ms.
    # flash_attn.fa3: 16 x 4096 0.083 ms against 0.085, 64 x 4096 0.270 against 0.261, 256 x 2048 0.536 against 0.507.
    # vLLM's own build of it: 64 x 4096 0.260 against 0.262, 256 x 1024 0.271 and 0.271, 1 x 131072 0.148 and 0.147.
    Line("*", "decode", _DECODE, _H200),
    Line("*", "speculative", _DECODE, _H200),
    Line(
        "blackwell",
        "decode",
        (*_DECODE[:2], "flashinfer.trtllm_gen", *(name for name in _DECODE[2:] if name != "flashinfer.trtllm_gen")),
        "FlashInfer's own choice among its kernels; no Blackwell was at hand",
    ),
    # Four queries each, 64 x 4096: split_kv 0.358 ms, flash_attn.fa3 0.271, its build in vLLM 0.268, fa2_prefill 0.281.
    Line("hopper", "speculative", (*_FA3, *(name for name in _DECODE if name not in _FA3)), _ONE_RUN),
    # On an H200 fa2_prefill takes 0.89 of triton.prefill's time. It plans on the host and is compiled for minutes.
    Line(
        "*",
        "prefill",
        (
            "triton.prefill",
            "triton.mixed",
            "flashinfer.fa2_prefill",
            "flashinfer.fa3_prefill",
            *_SINKS,
            *_LAST,
            *_CUDNN,
            "torch.blocked",
        ),
        _NO_PEER,
    ),
    Line(
        "*",
        "mixed",
        (
            "triton.mixed",
            "triton.prefill",
            "flashinfer.fa2_prefill",
            "flashinfer.fa3_prefill",
            *_SINKS,
            *_LAST,
            *_CUDNN,
            "torch.blocked",
        ),
        _NO_PEER,
    ),
    # 2 x 4096: triton.prefill 1.94 ms, fa2_prefill 1.72, flashinfer.fa3_prefill 1.02, flash_attn.fa3 0.941, its build
    # in vLLM 0.923; 512 of 8192 tokens of 4 sequences 1.84, 1.63, 0.917, 0.849 and 0.831.
    Line(
        "hopper",
        "prefill",
        (
            *_FA3,
            "flashinfer.fa3_prefill",
            "flashinfer.fa2_prefill",
            "triton.prefill",
            "triton.mixed",
            *_SINKS,
            *_LAST,
            *_CUDNN,
            "torch.blocked",
        ),
        _ONE_RUN,
    ),
    # 64 sequences of one query and 2 of 2048: flash_attn.fa3 and vLLM's build of it 0.411 ms, triton.mixed 0.665,
    # fa2_prefill 0.688, triton.prefill 0.792, fa3_prefill 1.38.
    Line(
        "hopper",
        "mixed",
        (
            *_FA3,
            "triton.mixed",
            "flashinfer.fa2_prefill",
            "triton.prefill",
            "flashinfer.fa3_prefill",
            *_SINKS,
            *_LAST,
            *_CUDNN,
            "torch.blocked",
        ),
        _ONE_RUN,
    ),
)
