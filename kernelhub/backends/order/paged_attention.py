"""Order of the kernels of attention over pages."""

from kernelhub.dispatch.order import Line, first

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)"
_NO_PEER = "torch has no kernel that reads lengths on the device"
# On an H200 vLLM's FlashAttention-2 and FlashAttention-4 were not timed over pages: the driver compiles the one, CuTe
# DSL the other, at the first call of a class.
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
# kernels that a full graph can capture and that plan nothing rank first.
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
    "gluon.prefill_pipelined",  # tiles of 128 queries, so few queries leave most of one empty
    "gluon.prefill_pipelined_any",
    "gluon.prefill_fp8_any",
    "gluon.prefill_fp8",
    "flashinfer.fa3_prefill",
    *_SINKS,
    *_LAST,
    *_CUDNN,
    "torch.blocked",
)
_HOPPER_OTHER_DECODE = first(("triton.split_kv", "triton.split_kv_fixed", "cuda.paged_decode"), _DECODE)
_ONE_QUERY = ("decode", "other_decode")
_FEW_QUERIES = (*_ONE_QUERY, "speculative")
_CUDA_RUN = "one run on an H200, pages of 16 (benchmarks/results/cuda_paged_h200.json): tokenspeed-fa3"
_PREFILL = (
    "triton.prefill",
    "triton.mixed",
    "flashinfer.fa2_prefill",
    "flashinfer.fa3_prefill",
    *_SINKS,
    *_LAST,
    *_CUDNN,
    "torch.blocked",
)
_MIXED = first(("triton.mixed",), _PREFILL)
_VLLM = "https://docs.vllm.ai/en/latest/design/attention_backends/"
_ONE_RUN = "one run on an H200, 64 heads to 8, pages of 64: tokenspeed-fa3, vLLM 0.33.0, FlashInfer 0.6.18"

_CPP_FIRST = (
    "cpp.split_kv",
    "torch.packed",
    "torch.blocked",
    "triton.split_kv",
    "triton.split_kv_fixed",
    "triton.mixed",
    "triton.prefill",
)
_CPU_PREFILL = (
    "torch.packed",
    "cpp.split_kv",
    "torch.blocked",
    "triton.split_kv",
    "triton.split_kv_fixed",
    "triton.mixed",
    "triton.prefill",
)
_XEON = "measured on a Xeon with AMX, one thread, torch 2.13, 2026-11-26"
_ZEN4 = (
    "measured on an EPYC of Zen 4 (AVX-512 BF16, no AMX), one thread, torch 2.13, 2026-11-27 "
    "(benchmarks/results/attention_avx512_epyc.json, `prefill`)"
)

PAGED_ATTENTION = (
    # 8 x 2048 keys, 32 heads to 8, over torch.packed, which gathers the pages: bfloat16 3.7 times as fast, float16 5.8,
    # float32 3.6, fp8 8.9; gpt-oss's heads with its window 1.7.
    *(
        Line("cpu", regime, _CPP_FIRST, "measured on an EPYC of Zen 3, one thread, torch 2.13, 2026-11-25")
        for regime in _FEW_QUERIES
    ),
    # The time of torch.packed over that of cpp.split_kv, on that EPYC: 512 tokens 1.1 to 1.2; 7 single tokens of 1024
    # and 256 tokens 1.9; 256 tokens of 2048, which see most keys, 0.8 to 0.9.
    Line("cpu", "*", _CPU_PREFILL, "measured on an EPYC (benchmarks/results/attention_cpu.json)"),
    # The same ratio with one thread of a Zen 3, bfloat16, float16, float32 and fp8 KV: steps of 7 to 64 single tokens
    # and a prompt of 256 or 512 1.6 to 3.6, the prompt with all its keys, 512 of them, 1 to 1.5; with gpt-oss's window
    # 1.6 to 3.2. With 256 tokens of 2048, no window, 0.6 to 1.1, beside 15 single tokens 0.9 to 1.5. AVX2 has no
    # products of bfloat16; other CPUs keep the order above until they are measured.
    Line(
        "cpu/avx2",
        "mixed",
        _CPP_FIRST,
        "measured on an EPYC of Zen 3, one thread, torch 2.13, 2026-11-26",
    ),
    # The time of cpp.split_kv over that of cpp.amx, one thread of a Xeon with AMX: 8 x 1024 keys, groups of 8 and 16
    # heads 1.1 and 1.9, of fp8 1.8 and 3. Four queries of each sequence 1.7.
    *(Line("cpu/amx", regime, first(("cpp.amx",), _CPP_FIRST), _XEON) for regime in _FEW_QUERIES),
    # There, the time of torch.packed over that of cpp.amx: 512 tokens 1.8, 256 of 2048 2.1, 64 of 1024 1.5; 15 single
    # tokens of 1024 and 256 tokens of 2048 1.9.
    Line("cpu/amx", "*", first(("cpp.amx",), _CPU_PREFILL), _XEON),
    # The time of torch.packed over those of cpp.avx512_bf16 and cpp.split_kv, bfloat16: prompts of 32, 128 and 512
    # tokens 3.5 and 1.8, 3.5 and 1.7, 3.2 and 1.3; 256 of 2048 and of 8192 2.4 and 1.0, 2.5 and 0.95; 15 single
    # tokens of 1024 and 256 of 2048 2.5 and 1.1, 63 of 512 and 64 4.1 and 3.3. Of fp8 KV, the last four: 2.6 and 1.0,
    # 2.6 and 1.0, 7.0 and 3.0, 5.5 and 5.3. Over that of cpp.split_kv in float16 and float32: prompts of 512 1.3 and
    # 1.1, 256 of 2048 0.98 and 0.85, 15 single tokens and 256 1.2 and 1.8, 63 and 64 3.9 and 2.2, gpt-oss with its
    # window 2.2 and 2.1.
    Line("cpu/avx512_bf16", "*", first(("cpp.avx512_bf16",), _CPP_FIRST), _ZEN4),
    # The vectors of cpp.split_kv are the same without BF16.
    *(Line("cpu/avx512", regime, _CPP_FIRST, _ZEN4, expected=True) for regime in ("prefill", "mixed")),
    # 64 x 4096 tokens: split_kv reaches 0.93 of the memory roof, split_kv_fixed 0.78; 1 x 131072: 0.145 and 0.209 ms.
    # flash_attn.fa3: 16 x 4096 0.083 ms against 0.085, 64 x 4096 0.270 against 0.261, 256 x 2048 0.536 against 0.507.
    # vLLM's own build of it: 64 x 4096 0.260 against 0.262, 256 x 1024 0.271 and 0.271, 1 x 131072 0.148 and 0.147.
    *(Line("*", regime, _DECODE, _H200) for regime in _FEW_QUERIES),
    # Memory bounds decode: on an H200 FlashInfer's own takes what split_kv takes, and plans on the host besides. So it
    # ranks behind it on sm_80 and sm_89 too, and elsewhere only kernels without planning rank first.
    *(
        Line(
            "blackwell",
            regime,
            first(("flashinfer.trtllm_gen", "flashinfer.xqa"), _DECODE),
            "trtllm-gen takes 0.7 of the time of FlashInfer's own decode with 64 x 1024 tokens "
            "(https://github.com/vllm-project/vllm/pull/19825); vLLM runs it up to 256 tokens a step and SGLang always "
            "(https://docs.sglang.io/advanced_features/attention_backend.html); otherwise FlashInfer uses XQA",
            expected=True,
        )
        for regime in _ONE_QUERY
    ),
    *(
        Line(
            "blackwell_rtx",
            regime,
            first(("flashinfer.xqa",), _DECODE),
            "there are no binaries of trtllm-gen for sm_120, and XQA is what FlashInfer's decode and vLLM run there "
            f"({_VLLM})",
            expected=True,
        )
        for regime in _ONE_QUERY
    ),
    # One run (cuda_paged_h200.json), 32 heads to 8 of 128, cuda.paged_decode, split_kv, and in bfloat16 fa3:
    # fp8 64 x 4096 0.132 and 0.196 ms, 64 of 256 to 8191 0.145 and 0.319, 16 x 4096 0.0403 and 0.0529, 1 x 1024 0.0079
    # and 0.0071; bfloat16 64 x 4096 0.242, 0.249 and 0.262, 64 of 256 to 8191 0.265, 0.359 and 0.280, 8 x 512 0.0109,
    # 0.0157 and 0.0145, 1 x 1024 0.0079, 0.0076 and 0.0130, 256 x 128 0.0478, 0.0447 and 0.0742, which one launch takes
    # in 0.0436. Ragged, of one query, cuda.paged_decode and split_kv (cuda_paged_steps_h200.json): bfloat16 64 x 4096
    # 0.248 and 0.253 ms, 64 of 256 to 8191 0.271 and 0.370, 256 x 512 0.135 and 0.138, 8 x 512 0.0109 and 0.0156; fp8
    # 0.138 and 0.195, 0.152 and 0.323, 0.079 and 0.105, 0.0097 and 0.0140. Of 12 small steps, not ragged ("few_early"
    # there), it is ahead in all: 1 x 1024 0.0064 and 0.0074, fp8 0.0064 and 0.0070; 1 x 16384 0.0238 and 0.0250, 0.0159
    # and 0.0217; 4 x 256 0.0067 and 0.0075, 0.0065 and 0.0069.
    Line("hopper", "decode", first(("cuda.paged_decode",), _DECODE), _CUDA_RUN),
    # There, 64 heads to 8 of 64: fp8 64 x 4096 0.078 and 0.156 ms, bfloat16 0.134 and 0.129, in a window of 128
    # 0.0073 and 0.0061. Groups of more than 16 heads, which are two tiles, and wide windows were not timed.
    Line("hopper", "other_decode", _HOPPER_OTHER_DECODE, _CUDA_RUN),
    # Four queries each, 64 x 4096: split_kv 0.358 ms, flash_attn.fa3 0.271, its build in vLLM 0.268, fa2_prefill 0.281.
    # With 32 heads to 8 (cuda_paged_h200.json), cuda.paged_decode, split_kv and flash_attn.fa3: 0.250, 0.249 and 0.265,
    # 16 x 4096 0.0736, 0.0741 and 0.0730; fp8 0.137 and 0.200, 0.0463 and 0.0549. With 64 heads, two tiles, cuda's was
    # not timed.
    Line("hopper", "speculative", first(_FA3, _HOPPER_OTHER_DECODE), _ONE_RUN),
    # On an H200 fa2_prefill takes 0.89 of triton.prefill's time. It plans on the host and is compiled for minutes.
    Line("*", "prefill", _PREFILL, _NO_PEER),
    Line("*", "mixed", _MIXED, _NO_PEER),
    # TensorRT-LLM multiplies what is in the unused end of a page, FlashAttention-4 in pages of 64 and more. It splits
    # no keys either, which the few queries of a mixed step need. FlashAttention-2 has no tcgen05.
    *(
        Line(
            "blackwell",
            regime,
            names,
            "vLLM tries FlashInfer, whose prefill is trtllm-gen there, then FlashAttention-4, then Triton "
            f"({_VLLM}); FlashAttention-2 reaches 300 to 380 TFLOP/s on a B200 "
            "(https://github.com/Dao-AILab/flash-attention/issues/1589), FlashAttention-4 2.7 times Triton "
            "(https://github.com/Dao-AILab/flash-attention/blob/main/assets/fa4_paper.pdf)",
            expected=True,
        )
        for regime, names in (
            ("prefill", first(("flashinfer.trtllm_context", "flash_attn.fa4"), _PREFILL)),
            ("mixed", first(("flashinfer.trtllm_context",), _MIXED)),
        )
    ),
    *(
        Line(
            family,
            "prefill",
            first(("flash_attn.vllm_fa2", "flash_attn.fa2", "flashinfer.fa2_prefill"), _PREFILL),
            f"vLLM tries FlashAttention-2, then FlashInfer, then Triton ({_VLLM})",
            expected=True,
        )
        for family in ("ampere", "ada", "blackwell_rtx")
    ),
    # 2 x 4096: triton.prefill 1.94 ms, fa2_prefill 1.72, flashinfer.fa3_prefill 1.02, flash_attn.fa3 0.941, its build
    # in vLLM 0.923; 512 of 8192 tokens of 4 sequences 1.84, 1.63, 0.917, 0.849 and 0.831.
    # On an H200 over e4m3 (gluon_more_h200.json), gluon.prefill_fp8 and triton.prefill: 2 x 4096 1.17 and 2.41 ms; 32
    # heads to 8, 1 x 16384 3.95 and 8.96. When keys became bfloat16 it took 1.65 and 5.99; 512 of 8192 tokens of 4
    # sequences 1.47 and Triton 2.26; 16 x 1024 in pages of 16 0.548 and 0.765; 64 heads to 8 of 64, 2 x 4096 0.998 and
    # 1.45.
    # On an H200 over e4m3 (gluon_tiles_h200.json), gluon.prefill_fp8_any and triton.prefill: 2 x 4096 of gpt-oss with
    # its window 0.180 and 0.151 ms, 16 x 1024 in pages of 16 0.369 and 0.300; with heads of 96 0.560 and 1.19, in pages
    # of 16 0.581 and 1.20; 2 x 8192 with a window of 1024 and heads of 128 0.618 and 1.29.
    # In one run on an H100 (prefill_forms_h100.json), gluon.prefill_pipelined, flash_attn.fa3 and triton.prefill: pages
    # of 64, 64 heads to 8, 2 x 4096 0.950, 1.07 and 2.19 ms; 32 heads to 8, windows of 128 and 1024 0.100, 0.131 and
    # 0.193, 0.248, 0.281 and 0.551; heads of 64 0.643, 0.648 and 0.842; pages of 16, 4 x 4096 1.00, 0.980 and 2.04, 16
    # x 512 0.130, 0.130 and 0.216; heads of 96, 2 x 4096 0.493, 0.463 and 0.991; pages of 256, 4 x 4096 0.865, 1.01 and
    # 2.18. vLLM's build was not in that run: its servers were measured with it, and it needs no compilation at a first
    # start.
    Line(
        "hopper",
        "prefill",
        (
            "flash_attn.vllm_fa3",
            "gluon.prefill_pipelined",
            "flash_attn.fa3",
            "flashinfer.fa3_prefill",
            "gluon.prefill_fp8",
            "flashinfer.fa2_prefill",
            "triton.prefill",
            "triton.mixed",
            "gluon.prefill_pipelined_any",
            "gluon.prefill_fp8_any",
            *_SINKS,
            *_LAST,
            *_CUDNN,
            "torch.blocked",
        ),
        _ONE_RUN,
    ),
    # 64 sequences of one query and 2 of 2048: flash_attn.fa3 and vLLM's build of it 0.411 ms, triton.mixed 0.665,
    # fa2_prefill 0.688, triton.prefill 0.792, fa3_prefill 1.38.
    # On an H100 the form of Gluon's prefill before the pipelined one, triton.prefill and triton.mixed: 1.12, 0.877 and
    # 0.731.
    Line(
        "hopper",
        "mixed",
        (
            *_FA3,
            "triton.mixed",
            "flashinfer.fa2_prefill",
            "triton.prefill",
            "gluon.prefill_pipelined",
            "gluon.prefill_pipelined_any",
            "gluon.prefill_fp8_any",
            "gluon.prefill_fp8",
            "flashinfer.fa3_prefill",
            *_SINKS,
            *_LAST,
            *_CUDNN,
            "torch.blocked",
        ),
        _ONE_RUN,
    ),
)

ORDER = {
    "paged_attention": PAGED_ATTENTION,
}
