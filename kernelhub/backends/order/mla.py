"""Order of the kernels of latent attention."""

from kernelhub.dispatch.order import Line, first

_H200 = "H200, FlashMLA of June 2026 against Triton 3.6, November 2026"
_NOT_RUN = ("flashinfer.mla_trtllm", "flashinfer.mla_trtllm_listed", "flashinfer.mla_xqa", "flashinfer.mla_cutlass")
_FLASHINFER = ("flashinfer.mla_fa3", "flashinfer.mla_fa2")
_ELSEWHERE = (
    "triton.split_kv",
    "triton.split_kv_fixed",
    "flash_mla.sparse",
    "flash_mla.sparse_padded",
    "flash_mla.dense",
    *_FLASHINFER,
    *_NOT_RUN,
    "torch.gathered",
)
_VLLM = "https://docs.vllm.ai/en/latest/design/attention_backends/"
_BLACKWELL = (
    "vLLM tries trtllm-gen, then CUTLASS, then Triton; for lists and over 16 heads FlashMLA, whose authors measured "
    "1450 TFLOP/s of prefill on a B200 (https://github.com/deepseek-ai/FlashMLA#performance), then trtllm-gen "
    f"({_VLLM})"
)
_DENSE = ("flashinfer.mla_trtllm", "flashinfer.mla_cutlass")
_LISTED = ("flash_mla.sparse", "flashinfer.mla_trtllm_listed")

_HOPPER_DECODE = (
    "flash_mla.dense",
    "flash_mla.sparse",
    "cuda.decode",
    "gluon.decode",
    "gluon.decode_fp8",
    "gluon.decode_listed",
    "gluon.decode_listed_fp8",
    "triton.split_kv",
    "flash_mla.sparse_padded",
    "triton.split_kv_fixed",
    *_FLASHINFER,
    *_NOT_RUN,
    "torch.gathered",
)
# Of 16 heads gluon.decode_listed_fp8 leaves most of a tile empty.
_BEFORE_LISTED_FP8 = (
    "flash_mla.dense",
    "flash_mla.sparse",
    "cuda.decode",
    "gluon.decode",
    "gluon.decode_fp8",
    "gluon.decode_listed",
    "triton.split_kv",
)

MLA_ATTENTION = (
    # 4 x 1024 keys, over torch.gathered: bfloat16 with 16 and 128 heads 8.7 and 12.7 times as fast, float32 with 16
    # heads 1.9, an fp8 cache with 16 heads 15.8. Lists of 2048, 1 and 8 x 4096 tokens: bfloat16 with 16 heads 9.3 and
    # 11.6, with 128 13.4 and 16.4; float32 with 16 heads 1.8 and 3.4, with 128 1.2 and 1.4 (2026-11-26).
    Line(
        "cpu",
        "*",
        ("cpp.split_kv", "torch.gathered", "triton.split_kv", "triton.split_kv_fixed"),
        "measured on an EPYC of Zen 3, one thread, torch 2.13, 2026-11-25; Triton is only interpreted on a CPU",
    ),
    # cpp.amx, cpp.split_kv and torch.gathered, one thread of a Xeon, 16 and 128 heads, ms: 4 x 1024 keys 0.83, 1.61 and
    # 6.21, 1.97, 9.19 and 10.9, of an fp8 cache 0.71, 2.34 and 8.31, 1.89, 13.6 and 13.1; lists of 2048 of 2 x 4096
    # keys 1.29, 2.12 and 5.01, 2.95, 10.5 and 12.0; two queries 0.90, 2.69 and 6.90, 3.50, 17.9 and 18.4.
    Line(
        "cpu/amx",
        "*",
        ("cpp.amx", "cpp.split_kv", "torch.gathered", "triton.split_kv", "triton.split_kv_fixed"),
        "measured on a Xeon with AMX, torch 2.13, 2026-11-26 (benchmarks/results/mla_amx_xeon.json)",
    ),
    # The time of torch's fastest calls over dense latents over those of cpp.avx512_bf16 and cpp.split_kv, one thread
    # of a Zen 4: 128 heads, 1 x 4096 keys 1.17 and 0.53, 64 heads, 4 x 2048 1.3 and 0.62, 32 heads 1.5 and 0.75, 16
    # heads, 8 x 2048 2.0 and 1.1; of an fp8 cache, 4 x 1024, 128 and 16 heads 1.2 and 0.48, 1.9 and 0.73; lists 5.3
    # and 2.9.
    Line(
        "cpu/avx512_bf16",
        "*",
        ("cpp.avx512_bf16", "cpp.split_kv", "torch.gathered", "triton.split_kv", "triton.split_kv_fixed"),
        "measured on an EPYC of Zen 4 (AVX-512 BF16, no AMX), torch 2.13, 2026-11-27 "
        "(benchmarks/results/mla_avx512_epyc.json)",
    ),
    # Two layers of a step, GPU time, split_kv and flash_mla.dense: with 128 heads 8 x 8192 tokens take 0.205 and
    # 0.114 ms, 32 x 8192 0.695 and 0.275, 128 x 2048 0.680 and 0.291; with 16 heads 0.110 and 0.101, 0.313 and 0.212,
    # 0.318 and 0.217. One sequence: 0.074 and 0.074 with 128 heads, 0.054 and 0.081 with 16.
    # Lists of 2048 tokens, one call, split_kv and flash_mla.sparse: with 128 heads 1 query takes 0.029 and 0.066 ms,
    # 8 0.048 and 0.069, 32 0.136 and 0.077, 128 0.444 and 0.156; with 64 heads 8 0.035 and 0.069, 32 0.080 and 0.077,
    # 128 0.232 and 0.104. One multiprocessor walks a whole list, so few queries leave the others idle. With 16 heads,
    # padded: 32 queries 0.062 and 0.080, 64 0.104 and 0.084.
    # FlashInfer 0.6.18, one call, split_kv, mla_fa2 and mla_fa3: 32 x 8192 tokens with 128 heads 0.348, 0.288 and
    # 0.141 ms (flash_mla.dense 0.150 in another run), with 16 heads 0.160, 0.151 and 0.091; 1 x 32768 with 128 heads
    # 0.074, 0.063 and 0.044; four queries of 16 x 4096 with 16 heads 0.068, 0.055 and 0.042. Its plans on the host are
    # not in these, and no graph can capture it, which decode needs: prefer it where none is captured.
    # On an H100 in CUDA graphs (attention_gluon_h100.json), gluon.decode, flash_mla.dense and split_kv: 128 heads, 32
    # x 8192 0.183, 0.160 and 0.354 ms, 128 x 8192 0.668, 0.589 and 1.33, 32 x 1024 0.048, 0.056 and 0.068, 1 x 8192
    # 0.023, 0.040 and 0.034; 16 heads, 32 x 8192 0.129, 0.139 and 0.161, 1 x 1024 0.015, 0.036 and 0.015. Outside of
    # graphs the host's share of a small call is larger than Triton's.
    # On an H200 in graphs (gluon_more_h200.json), gluon.decode_listed and split_kv, lists of 2048: 128 heads, 1, 8,
    # 32 and 128 queries 0.019, 0.026, 0.062 and 0.187 ms, and 0.026, 0.043, 0.133 and 0.437; 64 heads 0.019, 0.021,
    # 0.047 and 0.117, and 0.026, 0.031, 0.077 and 0.226; 16 heads, 1 and 8 0.018 and 0.019, and 0.020 and 0.021.
    # Lists of 2048 in e4m3 (gluon_experts_h200.json), gluon.decode_listed_fp8 and split_kv: 128 heads, 1, 8, 32 and 128
    # queries 0.025, 0.036, 0.088 and 0.271 ms, and 0.029, 0.057, 0.171 and 0.587; 64 heads, 32 0.063 and 0.101; 16
    # heads, 8, 32 and 128 0.025, 0.051 and 0.132, and 0.019, 0.044 and 0.141.
    # A float8 cache larger than L2, on an H200 in graphs (gluon_mla_h200.json), gluon.decode_fp8 and split_kv: 128
    # heads, 32 x 8192 0.201 and 0.401 ms, 128 x 2048 0.228 and 0.400, 8 x 8192 0.068 and 0.116, 32 x 1024 0.051 and
    # 0.074, 1 x 8192 0.031 and 0.038, 1 x 1024 0.023 and 0.023, 4 x 1024 0.027 and 0.024; 16 heads, 32 x 8192 0.076
    # and 0.118, 8 x 8192 0.032 and 0.041, 32 x 1024 0.024 and 0.024, 1 x 1024 0.016 and 0.015. Nothing that is known
    # beforehand tells few keys from many. bfloat16 caches larger than L2, gluon.decode and split_kv: 128 heads, 1 x
    # 256 0.018 and 0.018, 1 x 1024 0.018 and 0.021, 4 x 1024 0.020 and 0.022; 16 heads, 1 x 256 0.015 and 0.015, 1 x
    # 1024 0.016 and 0.017, 4 x 1024 0.018 and 0.019.
    # In one run, not in graphs (mla_with_flash_mla_h200.json), gluon.decode and flash_mla.dense: 128 heads, 1 x 8192
    # 0.030 and 0.063 ms, 8 x 8192 0.062 and 0.075, 32 x 1024 0.048 and 0.066, 32 x 8192 0.167 and 0.152, 64 x 4096
    # 0.174 and 0.150, 128 x 8192 0.569 and 0.508; 16 heads, 8 x 8192 0.047 and 0.071, 32 x 8192 0.111 and 0.132, 128 x
    # 8192 0.371 and 0.358.
    # There each call of FlashMLA made its schedule. The layers of a step share one, and in graphs of 8 calls that do
    # (gluon_goals_h200.json), gluon.decode and flash_mla.dense take: 16 heads, 64 x 4096 0.103 and 0.088 ms, 32 x 8192
    # 0.104 and 0.086, 128 x 2048 0.099 and 0.085, 128 x 8192 0.384 and 0.298; 128 heads, 64 x 4096 0.166 and 0.126, 32
    # x 1024 0.0419 and 0.0393, 8 x 8192 0.0551 and 0.0497. A call alone, 16 heads, 64 x 4096: 0.103 and 0.117.
    # One run (cuda_mla_h200.json), cuda.decode, gluon.decode and flash_mla.dense with one schedule: 128 heads, 64 x
    # 4096 0.146, 0.184 and 0.135 ms, 32 x 1024 0.0359, 0.0417 and 0.0393, 1 x 8192 0.0224, 0.0250 and 0.0274; 16
    # heads, 64 x 4096 0.094, 0.110 and 0.091, 4 x 1024 0.0146, 0.0178 and 0.0147.
    Line("hopper", "decode", _HOPPER_DECODE, _H200),
    Line(
        "hopper",
        "narrow_decode",
        first(_BEFORE_LISTED_FP8, _HOPPER_DECODE),
        "measured on an H200, 16 heads, 2026-11-28 (benchmarks/results/gluon_goals_h200.json)",
    ),
    # 2048 queries with 2048 listed tokens each: 128 heads 6.31 and 1.97 ms, 64 3.18 and 0.99, 16 padded 2.18 and 1.11.
    # 512 of 4096 tokens of 2 sequences, 16 heads, split_kv, mla_fa2 and mla_fa3: 0.625, 0.522 and 0.231 ms.
    # 128 heads, lists of 2048, gluon.decode_listed and split_kv (gluon_more_h200.json): 2048 queries of 8192 tokens
    # 2.56 and 6.25 ms; 100, 1, 300 and 7 queries of 4 x 4096 tokens 0.480 and 1.40.
    Line(
        "hopper",
        "*",
        (
            "flash_mla.dense",
            "flash_mla.sparse",
            "flash_mla.sparse_padded",
            *_FLASHINFER,
            "gluon.decode_listed",
            "triton.split_kv",
            "triton.split_kv_fixed",
            *_NOT_RUN,
            "torch.gathered",
        ),
        _H200,
    ),
    # Few heads, padded to 64, are Triton's in decode, as on an H200.
    *(
        Line("blackwell", decode, first((*_DENSE, *_LISTED), _ELSEWHERE), _BLACKWELL, expected=True)
        for decode in ("decode", "narrow_decode")
    ),
    Line(
        "blackwell",
        "*",
        first((*_DENSE, *_LISTED, "flash_mla.sparse_padded"), _ELSEWHERE),
        _BLACKWELL,
        expected=True,
    ),
    Line(
        "blackwell_rtx",
        "*",
        first(("flashinfer.mla_xqa",), _ELSEWHERE),
        "XQA is what FlashInfer's latent decode runs on sm_120 (https://docs.flashinfer.ai/api/attention.html), of "
        f"128 heads; else vLLM runs Triton ({_VLLM})",
        expected=True,
    ),
    # On an H200 mla_fa2 takes 0.84 of the time of split_kv with many queries too, and plans on the host.
    *(
        Line(
            family,
            regime,
            first(("flashinfer.mla_fa2",), _ELSEWHERE),
            "on an H200 512 of 4096 tokens of 2 sequences with 16 heads take FlashInfer's 0.522 ms and Triton's 0.625; "
            "neither uses what sm_80 lacks",
            expected=True,
        )
        for family in ("ampere", "ada")
        for regime in ("prefill", "mixed")
    ),
    # 32 sequences of 8192 tokens, 128 heads: 0.348, 0.423 and 12.7 ms. torch.gathered copies the rows of each sequence
    # before it reads them, and waits for the lengths.
    Line(
        "*",
        "*",
        _ELSEWHERE,
        "measured on an H200, the only GPU so far (benchmarks/results/mla_h200.json)",
    ),
)

CONCAT_MLA_K = (
    Line("cpu", "*", ("torch.concat", "triton.concat"), "Triton is only interpreted on a CPU"),
    # In a graph, us, triton.concat / cuda.concat, 128 heads, 8, 128, 1024 and 2048 tokens: 2.00 / 1.46, 4.56 / 4.32,
    # 24.0 / 23.7, 45.2 / 43.5.
    Line(
        "hopper",
        "*",
        ("cuda.concat", "triton.concat", "flashinfer.concat", "torch.concat"),
        "measured on an H200, torch 2.11.0, Triton 3.6.0, 2026-11-27 (benchmarks/results/small_ops_forms_h200.json)",
    ),
    # 8192 tokens, 128 heads: 0.170 ms, 0.89 of the roof. Beside FlashInfer 0.6.18: 0.169 and 0.179; 64 tokens 0.006 and
    # 0.009.
    Line(
        "*",
        "*",
        ("triton.concat", "flashinfer.concat", "torch.concat"),
        "measured on an H200, the only GPU so far (benchmarks/results/attention_h200.json)",
    ),
)

_CACHE_H200 = "measured on an H200, the only GPU so far (benchmarks/results/mla_h200.json)"

WRITE_MLA_CACHE = (
    Line("cpu", "*", ("torch.scatter", "triton.write"), "Triton is only interpreted on a CPU"),
    # 8192 tokens: 0.010 and 0.145 ms.
    Line("*", "*", ("triton.write", "torch.scatter"), _CACHE_H200),
)

ORDER = {
    "mla_attention": MLA_ATTENTION,
    "concat_mla_k": CONCAT_MLA_K,
    "write_mla_cache": WRITE_MLA_CACHE,
}
