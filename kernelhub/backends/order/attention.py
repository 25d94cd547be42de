"""Order of the kernels of attention, merging of states, linear attention."""

from kernelhub.dispatch.order import Line, first

_H200 = "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)"
# On an H200 FlashAttention-4 is compiled for seconds at the first call of a class, so it is opt-in
# for it: Llama 3.1 8B, 16 x 1024, 4 x 4096 and 1 x 16384 tokens 0.392, 0.982 and 3.32 ms, triton.prefill 0.441, 1.38
# and 5.18; gpt-oss 2 x 4096 0.179 and 0.125. vLLM's FlashAttention-2 is compiled by the driver. xformers takes 2 and 4
# times what torch.sdpa does. flashinfer.cudnn_ragged runs what cudnn.sdpa does, with copies: 4 x 2048 0.427 and 0.301.
_LAST = (
    "flash_attn.fa4",
    "flash_attn.fa2",
    "flash_attn.vllm_fa2",
    "flashinfer.trtllm_ragged",
    "flashinfer.cutlass_ragged",
    "flashinfer.cudnn_ragged",
    "xformers.flash",
    "xformers.cutlass",
)
_FA3 = ("flash_attn.fa3", "flash_attn.vllm_fa3")
# Tiles of 128 queries, so few queries leave most of one empty.
_GLUON = (
    "gluon.prefill_pipelined",
    "gluon.prefill_fp8",
    "gluon.prefill_pipelined_any",
    "gluon.prefill_fp8_any",
)
_VARLEN = "torch.varlen_attn"  # FlashAttention-2: on an H200 1.4 to 1.6 times the time of triton.prefill
_FLASHINFER = ("flashinfer.fa3_ragged", "flashinfer.fa2_ragged")
# torch takes 0.64 to 0.71 of the time of triton.prefill. flashinfer.fa2_ragged takes 1.08 to 1.22 of it.
_PREFILL = ("torch.sdpa", "triton.prefill", *_FLASHINFER, _VARLEN, *_LAST, "torch.blocked")
# Long sequences have a line of their own where that is measured.
_PREFILLS = ("prefill", "long_prefill")
_HOPPER = (
    *_FA3,
    "gluon.prefill_pipelined",
    "torch.sdpa",
    "flashinfer.fa3_ragged",
    "cudnn.sdpa",
    "gluon.prefill_fp8",
    "triton.prefill",
    "gluon.prefill_pipelined_any",
    "gluon.prefill_fp8_any",
    "flashinfer.fa2_ragged",
    _VARLEN,
    *_LAST,
    "torch.blocked",
)
_VLLM = "https://docs.vllm.ai/en/latest/design/attention_backends/"
_CPU_DECODE = ("cpp.split_kv", "torch.packed", "torch.sdpa", "torch.blocked", "triton.split_kv", "triton.prefill")
_XEON = "measured on a Xeon with AMX, torch 2.13, 2026-11-26 (benchmarks/results/attention_amx_xeon.json)"
_ZEN4 = (
    "measured on an EPYC of Zen 4 (AVX-512 BF16, no AMX), one thread, torch 2.13, 2026-11-27 "
    "(benchmarks/results/attention_avx512_epyc.json, `prefill`)"
)
_AVX512_PREFILL = first(("cpp.avx512_bf16", "cpp.split_kv", "torch.packed", "torch.sdpa"), _CPU_DECODE)

ATTENTION = (
    # 8 x 2048 keys in bfloat16, 32 heads to 8, over torch.packed: 3.3 times as fast on an EPYC of Zen 3 (AVX2).
    Line("cpu", "decode", _CPU_DECODE, "measured on an EPYC of Zen 3, one thread, torch 2.13, 2026-11-25"),
    # cpp.amx, cpp.split_kv and torch.packed: 8 x 2048 keys of 64 heads to 8, a window of 128, 0.50, 0.60 and 1.5 ms.
    Line("cpu/amx", "decode", first(("cpp.amx",), _CPU_DECODE), _XEON),
    Line("cpu/avx512_bf16", "decode", first(("cpp.avx512_bf16",), _CPU_DECODE), _ZEN4),
    # torch multiplies bfloat16 by instructions of its own where there are some; cpp.split_kv multiplies float32.
    # The time of torch.packed over that of cpp.split_kv, one thread of a Zen 3 (AVX2), 2026-11-25: causal, 128,
    # 512, 1024 and 2048 tokens of Llama 3.1 8B 1.6, 1.3, 1.1 and 0.9 to 1.2, gpt-oss 2.4; but not causal 2 x 512 tokens
    # of 16 heads of 64 0.8, in float32 0.7.
    Line(
        "cpu",
        "*",
        ("torch.packed", "cpp.split_kv", "torch.sdpa", "torch.blocked", "triton.prefill", "triton.split_kv"),
        "measured on an EPYC (benchmarks/results/attention_cpu.json)",
    ),
    # cpp.amx, torch.sdpa and torch.packed, one thread of a Xeon, causal, Llama 3.1 8B, ms: 32 tokens 0.195, 0.248 and
    # 0.513, 128 0.818, 1.05 and 1.66, 512 5.41, 9.40 and 11.9, 4 x 128 2.73, 3.78 and 5.01; 512 not causal 7.95, 9.62
    # and 11.9. 1024 of gpt-oss, which sdpa does not support, 13.8 and, by packed, 35.9. Of other dtypes, by sdpa,
    # cpp.split_kv and packed: 1024 tokens in float16 129, 151 and 144, in float32 140, 194 and 143.
    *(
        Line(
            "cpu/amx",
            regime,
            (
                "cpp.amx",
                "torch.sdpa",
                "cpp.split_kv",
                "torch.packed",
                "torch.blocked",
                "triton.prefill",
                "triton.split_kv",
            ),
            _XEON,
        )
        for regime in _PREFILLS
    ),
    # The time of torch's faster kernel, torch.packed or torch.sdpa, over that of cpp.avx512_bf16, causal, bfloat16:
    # 32, 128, 512, 1024 and 2048 tokens of Llama 3.1 8B 2.1, 3.2, 2.9, 2.7 and 2.5, over fp8 KV 2.2 and more; 256 of
    # 4096 2.5; heads of 64 2.8 to 3.2, of 256 3.3 to 3.4; gpt-oss with its window and sinks 4.6; not causal 2.1. The
    # same of cpp.split_kv, in float16 and float32: 128 tokens 1.5 and 1.3, 512 1.2 and 1.1, 1024 1.06 and 0.97, 2048
    # 1.01 and 0.85; 256 of 4096 0.93 and 0.78; heads of 256 1.3 to 1.4; ragged 1.3 and 1.2; gpt-oss 2.0 and 1.9; not
    # causal 0.83 and 0.75.
    Line("cpu/avx512_bf16", "prefill", _AVX512_PREFILL, _ZEN4),
    Line(
        "cpu/avx512_bf16",
        "long_prefill",
        first(("cpp.avx512_bf16", "torch.packed", "torch.sdpa"), _AVX512_PREFILL),
        _ZEN4,
    ),
    # Without BF16 the vectors of cpp.split_kv are those of that Zen 4, where torch has BF16 and still takes 1.06 to 1.6
    # times as long in bfloat16.
    Line("cpu/avx512", "prefill", _AVX512_PREFILL, _ZEN4, expected=True),
    # 1 x 8192, 32 x 4096, 128 x 2048 tokens: torch 0.022, 0.133, 0.254 ms, split_kv 0.031, 0.135, 0.254.
    Line(
        "*",
        "decode",
        (
            "torch.sdpa",
            "triton.split_kv",
            *_FA3,
            "triton.prefill",
            *_GLUON,
            "cudnn.sdpa",
            *_FLASHINFER,
            _VARLEN,
            *_LAST,
            "torch.blocked",
        ),
        _H200,
    ),
    *(Line("*", prefill, _PREFILL, _H200) for prefill in _PREFILLS),
    # sm_120 has neither tcgen05 nor more than 99 KiB of shared memory: what there is, is FlashAttention-2.
    *(
        Line(
            family,
            prefill,
            first(
                ("torch.sdpa", "flash_attn.vllm_fa2", "flash_attn.fa2", _VARLEN, "flashinfer.fa2_ragged"),
                _PREFILL,
            ),
            "FlashAttention-2, which torch ships, is 1.3 to 2.5 times as fast as FlashAttention in Triton on an A100 "
            "(https://arxiv.org/abs/2307.08691, section 4.1)",
            expected=True,
        )
        for family in ("ampere", "ada", "blackwell_rtx")
        for prefill in _PREFILLS
    ),
    # FlashAttention-4 is compiled for seconds at the first call of a class, and has no kernel for few queries.
    *(
        Line(
            "blackwell",
            prefill,
            first(("flash_attn.fa4", "flashinfer.trtllm_ragged", "torch.sdpa", "flashinfer.cutlass_ragged"), _PREFILL),
            "FlashAttention-4 reaches up to 1.3 times cuDNN and 2.7 times Triton on a B200 "
            "(https://github.com/Dao-AILab/flash-attention/blob/main/assets/fa4_paper.pdf); vLLM tries it before "
            f"trtllm-gen and CUTLASS for DeepSeek's prefill ({_VLLM}); torch prefers cuDNN there "
            "(https://github.com/pytorch/pytorch/blob/v2.14.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)",
            expected=True,
        )
        for prefill in _PREFILLS
    ),
    # Llama 3.1 8B, 16 x 1024, 4 x 4096 and 1 x 16384 tokens, flash_attn.fa3, torch.sdpa, triton.prefill: 0.263, 0.294,
    # 0.442 ms; 0.794, 0.976, 1.35; 2.92, 3.59, 4.98. cudnn.sdpa, triton.prefill and torch.sdpa: 1 x 8192 tokens 1.00,
    # 1.31 and 0.95 ms; ragged, 8000 tokens of 4 sequences, 0.417 and 0.510; 128 heads of 192 and 128, 4096 tokens 1.35
    # and 1.79. FlashInfer 0.6.18, 64 heads to 8, fa3_ragged and triton.prefill: ragged 4 x 2048 0.487 and 0.737 ms,
    # 2 x 4096 of 128 heads of 192 and 128 2.18 and 3.84; 1 x 8192 1.65 and 2.55, and torch.sdpa 1.85. But torch, which
    # takes what is not ragged, plans nothing, and what each new shape costs the host is not in those. In one run,
    # flash_attn.fa3, vLLM's build of it and fa3_ragged: 1 x 8192 1.53, 1.60, 1.68; ragged 4 x 2048 0.504, 0.497, 0.480.
    # On an H200 over e4m3 (gluon_tiles_h200.json), gluon.prefill_fp8 and triton.prefill, Llama 3.1 8B: 1 x 16384 3.90
    # and 7.49 ms, 4 x 4096 1.09 and 2.01, ragged, 8000 tokens of 4 sequences 0.476 and 0.764; 32 heads of 96, 4 x 4096
    # 1.05 and 1.92. gluon.prefill_fp8_any and triton.prefill: gpt-oss with its window, 2 x 4096 0.171 and 0.146.
    # In one run on an H100 (prefill_forms_h100.json), gluon.prefill_pipelined, flash_attn.fa3, torch.sdpa and
    # triton.prefill: 16 x 1024 0.313, 0.281, 0.324 and 0.501 ms, 8 x 2048 0.515, 0.474, 0.580 and 0.836, 1 x 512
    # 0.0123, 0.0135, 0.0131 and 0.0145, ragged 4 x 2000 0.247, 0.289, - and 0.384; heads of 96, 16 x 1024 0.290, 0.277,
    # 0.316 and 0.496; keys of 192, 1 x 1024 0.101, -, 0.111 and 0.154, 2 x 8192 7.84, -, 9.31 and 14.0; windows of 128,
    # 1024 and 4096, 2 x 8192 0.183, 0.499 and 1.37 and Triton 0.339, 0.830 and 2.25. torch is ahead with 32 x 256,
    # 0.074 and 0.068, and 16 x 1024 of heads of 64, 0.432 and 0.406. gluon.prefill_pipelined_any and triton.prefill:
    # gpt-oss with its window, 2 x 4096 0.159 and 0.125.
    Line("hopper", "prefill", _HOPPER, _H200),
    # FlashAttention-3 takes 0.80 of the time of torch (attention_with_fa3_h200.json). In one run vLLM's build of it,
    # the form of Gluon's prefill before the pipelined one and torch.sdpa (attention_with_vllm_fa3_h200.json) took
    # 0.996, 0.904 and 0.959 ms for 4 x 4096, 1.72, 1.66 and 1.86 for 2 x 8192, 3.36, 3.35 and 3.66 for 1 x 16384.
    # Shorter ones, 16 x 1024 and 8 x 2048: 0.358, 0.336 and 0.297, 0.543, 0.516 and 0.508. But with heads of 192 for
    # 128 that build is the fastest: 2.15, torch 2.41.
    Line(
        "hopper",
        "long_prefill",
        first(("flash_attn.fa3", "gluon.prefill_pipelined", "flash_attn.vllm_fa3"), _HOPPER),
        "measured on an H100, Llama 3.1 8B, gluon.prefill_pipelined, flash_attn.fa3 and torch.sdpa, 4 x 4096, 2 x 8192 "
        "and 1 x 16384 tokens: 0.940, 0.852 and 1.07 ms, 1.70, 1.58 and 1.99, 3.29, 3.03 and 3.78; 2026-11-28 "
        "(benchmarks/results/prefill_forms_h100.json)",
    ),
)

MERGE_ATTENTION_STATES = (
    Line("cpu", "*", ("torch.merge", "triton.merge"), "Triton is only interpreted on a CPU"),
    # In a graph, us, triton.merge / cuda.merge, 32 heads of 128, 8, 128, 1024 and 8192 tokens: 2.06 / 1.10, 3.98 /
    # 2.44, 9.81 / 7.82, 59.6 / 49.9.
    Line(
        "hopper",
        "*",
        ("cuda.merge", "triton.merge", "flashinfer.merge", "torch.merge"),
        "measured on an H200, torch 2.11.0, Triton 3.6.0, 2026-11-27 (benchmarks/results/small_ops_forms_h200.json)",
    ),
    # 2 tensors of 8192 tokens, 128 heads of 128: 0.221, 0.980 and 2.71 ms.
    Line(
        "*",
        "*",
        ("triton.merge", "flashinfer.merge", "torch.merge"),  # states are copied for FlashInfer's
        "measured on an H200 (benchmarks/results/timed_with_libraries_h200.json)",
    ),
)

LINEAR_ATTENTION = (
    Line(
        "cpu",
        "*",
        ("torch.chunked", "triton.chunked", "triton.recurrent"),
        "Triton is only interpreted on a CPU",
    ),
    Line(
        "*",
        "decode",
        ("triton.recurrent", "triton.chunked", "torch.chunked"),
        "H200, 64 sequences of 64 heads of 128: 0.089 ms, by chunks 0.155; one token gains nothing from chunks",
    ),
    Line(
        "*",
        "prefill",
        ("triton.chunked", "triton.recurrent", "torch.chunked"),
        "H200, 1 x 4096 tokens of 64 heads of 128: 0.18 ms by chunks, 5.6 by the recurrence, which waits at each token",
    ),
)

ORDER = {
    "attention": ATTENTION,
    "merge_attention_states": MERGE_ATTENTION_STATES,
    "linear_attention": LINEAR_ATTENTION,
}
