"""Order of the kernels of the collectives, where NVLink connects the ranks.

Buckets of messages are those of `kernelhub.ops.comm.problem`. `benchmarks/comm.py` measures them.
"""

from kernelhub.dispatch.order import Line, first
from kernelhub.ops.comm.problem import BUCKETS, CLUSTERED_ROWS, NO_NVLINK, NVFP4_ROWS, WIDE_ROWS

_PUSH_ONE, _PUSH_TWO, _CUDA = "triton.one_shot", "triton.two_shot", "cuda.one_shot"
_ONE, _TWO, _NCCL = "torch.symm_mem_one_shot", "torch.symm_mem_two_shot", "torch.distributed"
_ALL = (_PUSH_ONE, _PUSH_TWO, _ONE, _TWO, _NCCL)
_FUSED = ("flashinfer.trtllm_one_shot", "flashinfer.trtllm_two_shot")
# They wait for a missing rank without limit: after those that do not. FlashInfer's two shots take 245 us for one row.
_LIBRARIES = ("custom_all_reduce.vllm", *_FUSED, "custom_all_reduce.sgl_kernel")
_REST = (*_ALL, *_LIBRARIES, _CUDA)  # the last has run on 2 and 4 ranks of Hopper only
_QUANT, _POLLED, _CLUSTERED = "triton.one_shot_quant", "triton.one_shot_polled", "triton.one_shot_clustered"
_TWO_QUANT, _PAIR = "triton.two_shot_quant", "comm_pairs.sum_then_quant"
_TWO_SMALL = (_QUANT, _PUSH_TWO, _PAIR, _TWO_QUANT, _NCCL, *_FUSED)  # of norms on 2 ranks up to 1 MB, after the first
_TWO_LARGE = (_PUSH_ONE, _PUSH_TWO, _POLLED, _CLUSTERED)  # of norms on 2 ranks above, before those that quantise
_VERSIONS = "torch 2.11.0+cu130, NCCL 2.28.9, bfloat16"
_H100 = (
    f"in CUDA graphs on 2 NVIDIA H100 80GB HBM3, 2026-11-25, {_VERSIONS}: Triton's one-shot takes 3.1 us for 32 KB, "
    "3.7 for 256 KB, 6.1 for 1 MB, 27.6 for 8 MB and 96 for 32 MB, its two-shot 4.7 for 256 KB, 6.5, 26.0 and 107, "
    "NCCL 12.6, 14.2, 19.0, 51.1 and 146 (benchmarks/results/nvlink_h100.json); with the copy to a workspace torch's "
    "one-shot takes 9.8, 11.9 and 16.5 up to 1 MB, its two-shot 43.7 and 152 from 8 MB on "
    "(benchmarks/results/comm_h100.json); on 2 H200, 2026-11-26, 8 KB, 256 KB, 1 MB and 8 MB: Triton's one-shot 2.6, "
    "3.5, 6.0 and 26.9, FlashInfer's 2.9, 3.7 and 6.2, vLLM's kernels 6.0, 6.8, 10.2 and 38.7 "
    "(benchmarks/results/comm_h200.json)"
)
_LARGE_OF_TWO = (
    "64 and 256 MB on 2 H200, 2026-11-29: Triton's one-shot 195 and 778, its two-shot 207 and 829, NCCL 285 and 1023 "
    "(benchmarks/results/comm_sums_2_ranks_h200.json)"
)
_H200 = (
    f"in CUDA graphs on 4 NVIDIA H200, 2026-11-26, {_VERSIONS}, 8 KB, 64 KB, 256 KB, 1 MB and 8 MB: Triton's one-shot "
    "takes 3.7, 4.3, 5.9, 13.6 and 84.2 us, its two-shot 6.2, 6.9, 7.4, 10.3 and 53.5, FlashInfer's one-shot 3.6, 4.2, "
    "6.0 and 13.2, torch's two-shot 10.4, 13.1, 14.0, 17.3 and 54.9, NCCL 14.3, 15.7, 16.0, 22.7 and 67.1 "
    "(benchmarks/results/comm_4_ranks_h200.json); 32 MB: Triton's two-shot 172, torch's 185, NCCL 195 "
    "(benchmarks/results/comm_parts_4_ranks_h200.json); since programs with one tile wait for all ranks at once, 8 KB "
    "to 1 MB: its one-shot 3.0, 3.5, 5.5 and 13.6, with the norm 4.7, 5.0, 6.9 and 15.4, its two-shot with the norm "
    "6.5, 6.8, 7.4 and 10.6 (benchmarks/results/comm_tiles_h200.json); since several programs send a row, 8, 64 and "
    "256 KB: its one-shot with the norm 4.1, 4.6 and 6.3 (benchmarks/results/comm_split_h200.json)"
)
_BY_CUDA = (
    f"in CUDA graphs on 2 NVIDIA H200, 2026-11-28, {_VERSIONS}, 1, 8, 32, 64, 128, 256, 512 KB and 1 MB: cuda.one_shot "
    "takes 2.20, 2.42, 2.66, 2.68, 2.80, 3.22, 4.12 and 5.54 us, triton.one_shot 2.47, 2.41, 2.80, 2.84, 3.08, 3.45, "
    "4.30 and 5.72, torch's one-shot 7.6, 7.7, 7.8, 8.1, 8.9, 9.5, 11.0 and 14.6 "
    "(benchmarks/results/comm_cuda_h200.json); float16 and float32 were not timed"
)
_FOUR_BY_CUDA = (
    f"in CUDA graphs on 4 NVIDIA H200, 2026-11-28, {_VERSIONS}, 1, 8, 32, 64, 128 and 256 KB: cuda.one_shot takes 2.8, "
    "2.9, 3.1, 3.5, 4.1 and 5.3 us, triton.one_shot 2.9, 3.1, 3.4, 3.6, 4.3 and 5.7, SGLang's kernel 5.4, 5.8, 6.1, "
    "6.4, 7.0 and 8.1, vLLM's 6.2, 6.5, 6.7, 7.1, 7.6 and 8.7, torch's one-shot 8.1, 8.6, 8.9, 9.6, 10.3 and 12.5, "
    "NCCL 13.8, 14.6, 15.7, 15.9, 12.8 and 16.3 (benchmarks/results/comm_sums_4_ranks_h200.json); float16 and float32 "
    "were not timed"
)
_QUANTISED = (
    f"in CUDA graphs on 2 NVIDIA H100, 2026-11-26, {_VERSIONS}, rows of 4096, 8 KB and 1 MB: triton.one_shot_quant "
    "takes 4.2 to 4.9 us and 7.2 to 7.9 in the forms fp8_group, fp8_token, fp8_tensor and nvfp4, Triton's one-shot "
    "without a form 3.7 and 6.6 (benchmarks/results/comm_quant_h100.json), NCCL with the norm, before torch quantises "
    "it, 30.2 and 50.7 on 2 H200 (benchmarks/results/comm_norm_h200.json)"
)
_QUANTISED_APART = (
    f"quantised, in CUDA graphs on 4 NVIDIA H200, 2026-11-28, {_VERSIONS}, 1, 32, 128 and 1024 rows of 4096: the "
    "selected sum, then rms_norm_quant takes 5.2, 8.0, 12.9 and 64.0 us in fp8_group and 11.0, 13.4, 18.7 and 76.8 in "
    "nvfp4, NCCL, then rms_norm_quant 16.9, 18.8, 26.1 and 79.0, and 22.7, 24.5, 31.5 and 91.9, torch.distributed 65, "
    "79, 100 and 297, and 130, 151, 192 and 545 (benchmarks/results/comm_quant_4_ranks_h200.json)"
)
_QUANTISED_PAIR = (
    f"quantised, in CUDA graphs on 2 NVIDIA H200, 2026-11-28, {_VERSIONS}, 256 and 1024 rows of 7168: "
    "comm_pairs.sum_then_quant takes 17.2 and 57.7 us in fp8_group and 25.3 and 80.7 in nvfp4, torch.distributed 182 "
    "and 489, and 325 and 908 (benchmarks/results/comm_quant_pair_h200.json)"
)
_QUANTISED_8MB = (
    f"quantised, in CUDA graphs on 2 NVIDIA H200, 2026-11-28, {_VERSIONS}, 256 rows of 7168 and 1024 of 4096: "
    "triton.one_shot_quant takes 18.8 and 31.3 us in fp8_group and 24.2 and 42.6 in nvfp4, triton.two_shot_quant 20.7 "
    "and 32.0, and 24.5 and 38.0, comm_pairs.sum_then_quant 17.2 and 33.8, and 25.3 and 46.8: 0.97 of the pair's time "
    "by either, in the geometric mean, and the first has the bits of smaller messages "
    "(benchmarks/results/comm_quant_pair_h200.json)"
)
_QUANTISED_MORE = (
    f"quantised, in CUDA graphs on 2 NVIDIA H200, 2026-11-28, {_VERSIONS}, 1024 and 4096 rows of 7168, and 1024 of "
    "5120 and of 8192: triton.two_shot_quant takes 54.0, 194, 46.1 and 56.6 us in fp8_group and 71.7, 264, 67.1 and "
    "74.2 in nvfp4, triton.one_shot_quant 55.0, 200, 44.4 and 58.6, and 75.5, 278, 68.7 and 77.7, "
    "comm_pairs.sum_then_quant 57.7, 304, 42.4 and 65.5, and 80.7, 380, 67.8 and 86.8 "
    "(benchmarks/results/comm_quant_pair_h200.json)"
)
_QUANTISED_BY_FOUR = (
    f"quantised, in CUDA graphs on 4 NVIDIA H200, 2026-11-28, {_VERSIONS}, 1, 64, 256 and 1024 rows of 7168: "
    "comm_pairs.sum_then_quant takes 5.8, 12.4, 28.3 and 96.9 us in fp8_group and 11.6, 18.7, 36.1 and 120 in nvfp4, "
    "triton.two_shot_quant 11.0, 14.2, 29.2 and 83.3, and 13.0, 15.8, 33.8 and 101, torch.distributed 66.6, 103, 186 "
    "and 509, and 132, 184, 330 and 927 (benchmarks/results/comm_quant_pair_4_ranks_h200.json)"
)
_QUANTISED_BY_FOUR_MORE = (
    f"quantised, in CUDA graphs on 4 NVIDIA H200, 2026-11-28, {_VERSIONS}, 256, 1024 and 4096 rows of 7168, and 1024 "
    "of 4096: triton.two_shot_quant takes 29.0, 83.2, 318 and 49.5 us in fp8_token, 33.3, 97.2, 371 and 64.7 in "
    "fp8_tensor and 28.3, 80.9, 309 and 47.8 in mxfp8, comm_pairs.sum_then_quant 28.4, 98.3, 370 and 62.4, 34.3, 109, "
    "404 and 69.0, and 29.1, 97.8, 371 and 61.7 (benchmarks/results/comm_quant_steps_4_ranks_h200.json); fp8_group and "
    "nvfp4: comm_quant_pair_4_ranks_h200.json, where 256 rows of 7168 in fp8_group lose 3 %; messages between 256 KB "
    "and 1 MB gain in some sizes and lose in others, so the pair has them"
)
_NVFP4_OF_FOUR = (
    f"in CUDA graphs on 4 NVIDIA H200, 2026-11-28, {_VERSIONS}, nvfp4, 1 row of 4096 and of 7168: "
    "triton.one_shot_quant takes 8.8 and 11.1 us, the sum, then the norm 11.0 and 12.0 "
    "(benchmarks/results/comm_quant_4_ranks_h200.json); 18 rows of 7168 lose, 23.2 and 14.4, so it ends at 32 KB"
)
_NORM_OF_TWO = (
    f"in CUDA graphs on 2 NVIDIA H200, 2026-11-28, {_VERSIONS}, rows of 7168: triton.one_shot takes 3.0 us for 1 row, "
    "3.5 for 8 and 3.9 for 18, triton.one_shot_polled 3.3, 3.7 and 4.1; of 1 row of 4096 2.8 and 3.0, of 8192 3.1 and "
    "3.3 (benchmarks/results/comm_norm_polled_h200.json)"
)
_WIDE = (
    f"in CUDA graphs on 2 NVIDIA H200, 2026-11-28, {_VERSIONS}, 36, 72 and 73 rows of 7168: triton.one_shot_polled "
    "takes 4.9, 6.6 and 6.7 us, triton.one_shot 5.5, 7.0 and 7.0; 64 and 128 rows of 4096 4.7 and 6.2, and 5.1 and "
    "6.6; 32 and 64 rows of 8192 4.9 and 6.6, and 5.4 and 6.8; with both results in place 0.88 to 0.97 of its time "
    "(benchmarks/results/comm_norm_polled_h200.json); narrower rows and float32 were not timed"
)
_FEW_CLUSTERED = (
    f"in CUDA graphs on 2 NVIDIA H200, 2026-11-28, {_VERSIONS}, 1 row of 7168 and of 8192: triton.one_shot_clustered "
    "takes 3.05 and 3.02 us, triton.one_shot 3.25 and 3.26, with a kernel of torch before each call 4.01 and 3.89, and "
    "4.23 and 4.11; 2 rows 3.25 and 3.28 by both; with both results in place 0.82 to 0.89 of its time "
    "(benchmarks/results/comm_norm_early_h200.json); rows of 5120 and 4096 gain nothing or lose"
)
_MORE_CLUSTERED = (
    f"in CUDA graphs on 2 NVIDIA H200, 2026-11-28, {_VERSIONS}, 32, 36, 64 and 73 rows of 7168: "
    "triton.one_shot_clustered takes 4.8, 5.0, 5.9 and 6.4 us, triton.one_shot_polled 4.9, 5.1, 6.2 and 6.9; of 5120 "
    "4.2, 4.2, 5.4 and 5.4, and 4.3, 4.5, 5.7 and 5.8; 32, 36 and 64 rows of 8192 4.9, 5.0 and 6.3, and 5.0, 5.5 and "
    "6.8; with both results in place 0.92 to 0.99 of its time; with a kernel of torch before each call 73 rows of 7168 "
    "and 5120 7.7 and 6.9, and 8.1 and 7.5 (benchmarks/results/comm_norm_early_h200.json); rows of 4096 lose; float32 "
    "was not timed"
)
# By number of ranks, the kernels that are first in each bucket, and the evidence. Other GPUs are expected as Hopper.
_ONE_FIRST, _TWO_FIRST = (_PUSH_ONE, _PUSH_TWO, _ONE, _TWO), (_PUSH_TWO, _PUSH_ONE, _TWO, _ONE)
# What ran on the number of ranks goes before what did not: Triton's kernels have run on 2 and 4.
_SMALL_RAN, _LARGE_RAN = (_ONE, _TWO, _NCCL), (_TWO, _ONE, _NCCL)
_LARGE = {"1MB": _LARGE_RAN, "8MB": _LARGE_RAN, "32MB": _LARGE_RAN, "more": (_NCCL,)}
_TWO_OF_FOUR = (_PUSH_TWO, _TWO, _PUSH_ONE, _ONE, _NCCL)
_FIRST = {
    2: (
        {
            "32KB": _ONE_FIRST,
            "256KB": _ONE_FIRST,
            "1MB": _ONE_FIRST,
            "8MB": _TWO_FIRST,
            "32MB": (_PUSH_ONE, _PUSH_TWO, _TWO),
            "more": (_PUSH_ONE, _PUSH_TWO, _NCCL),
        },
        f"{_H100}; {_LARGE_OF_TWO}",
    ),
    4: (
        {
            "32KB": _ONE_FIRST,
            "256KB": _ONE_FIRST,
            "1MB": _TWO_FIRST,
            "8MB": _TWO_OF_FOUR,
            "32MB": (_PUSH_TWO, _TWO, _NCCL),
            "more": (_NCCL,),
        },
        _H200,
    ),
    8: ({**_LARGE, "32KB": _SMALL_RAN, "256KB": _LARGE_RAN}, f"extrapolated from what was measured {_H200}"),
}

_PUSHED = (
    f"in CUDA graphs on 2 NVIDIA H200, 2026-11-26, {_VERSIONS}, DeepSeek-V3.2, dispatch and combine of 1, 64 and 512 "
    "tokens of a rank as tokens: triton.push 9.3, 13.9 and 58.6 us, torch.gather_fixed with torch.reduce_scatter_fixed "
    "61, 91 and 228, torch.all_to_all_fixed 74, 106 and 290 (benchmarks/results/expert_comm_h200.json)"
)
_PUSHED_EXACTLY = (
    f"eager on 2 NVIDIA H200, 2026-11-26, {_VERSIONS}, Qwen3-30B-A3B, dispatch and combine of 64 and 512 tokens of a "
    "rank as tokens, without a capacity: triton.push_exact 228 and 219 us, torch.all_to_all 1967 and 1918 "
    "(benchmarks/results/expert_comm_models_h200.json)"
)
_PUSHED_EXACTLY_BY_FOUR = (
    f"eager on 4 NVIDIA H200, 2026-11-27, {_VERSIONS}, DeepSeek-V3.2, dispatch and combine of 64 tokens of a rank as "
    "tokens, contiguous and masked, without a capacity: triton.push_exact 212, 268 and 263 us, torch.all_to_all 2013, "
    "3579 and 4258 (benchmarks/results/expert_comm_again_4_ranks_h200.json)"
)
_PUSHED_BY_FOUR = (
    f"in CUDA graphs on 4 NVIDIA H200, 2026-11-26, {_VERSIONS}, DeepSeek-V3.2, dispatch and combine of 1, 64 and 512 "
    "tokens of a rank as tokens: triton.push 17.9, 32.5 and 180 us, torch.gather_fixed with torch.reduce_scatter_fixed "
    "67, 140 and 380, torch.all_to_all_fixed 82, 146 and 492 (benchmarks/results/expert_comm_4_ranks_h200.json)"
)
_MORE = f"triton.push has not run on other numbers of ranks than 2 and 4; {_PUSHED}"
# Last: as fast as torch's in graphs (2 H200, 512 tokens: 225 us and 227, triton.push 59), and they end the process or
# wait without limit where a rank is missing.
_LAST = ("deep_ep.normal", "deep_ep.normal_fixed", "flashinfer.moe_a2a")
_EXPERTS = (
    "torch.gather_fixed",
    "torch.all_to_all",
    "torch.all_to_all_fixed",
    "torch.gather",
    "triton.push",
    "triton.push_exact",
    *_LAST,
)
_SUMS = (
    "torch.all_to_all",
    "torch.all_to_all_fixed",
    "torch.reduce_scatter",
    "torch.reduce_scatter_fixed",
    "triton.push",
    "triton.push_exact",
    *_LAST,
)
_PAIRS = tuple(f"moe_pairs.{format}" for format in ("tokens", "contiguous", "masked", "contiguous_fp8", "masked_fp8"))
_LAYERS = (
    "in CUDA graphs on 4 NVIDIA H200, 2026-11-27, torch 2.11.0+cu130, Triton 3.6.0, Qwen3-30B-A3B, 1, 64 and 512 "
    "tokens of a rank: moe_pairs.tokens takes 56.5, 115 and 206 us with weights in bfloat16 and 45.7, 89.5 and 188 in "
    "float8 blocks, moe_pairs.contiguous 61.1, 149 and 391, moe_pairs.masked 61.5, 218 and 922, "
    "moe_pairs.contiguous_fp8 55.3, 120 and 360, moe_pairs.masked_fp8 56.2, 200 and 924 "
    "(benchmarks/results/expert_pairs_4_ranks_h200.json)"
)
_OTHER = "kernels over peer memory have not run on 3, 5, 6 or 7 ranks"
_EVIDENCE = {"2 ranks": _PUSHED, "4 ranks": _PUSHED_BY_FOUR}

_PARTS = (
    f"in CUDA graphs on 2 NVIDIA H200, 2026-11-26, {_VERSIONS}, 8 KB, 64 KB, 256 KB, 1 MB and 8 MB of a rank: "
    "all_gather by triton.one_shot takes 2.6, 3.1, 3.6, 6.2 and 28.0 us, by NCCL 13.0, 13.1, 14.9, 22.8 and 61.8; "
    "reduce_scatter 2.5, 3.1, 3.2, 4.4 and 14.8, and 12.7, 13.5, 13.6, 16.5 and 37.0 "
    "(benchmarks/results/comm_parts_h200.json)"
)
_PARTS_OF_FOUR = (
    f"in CUDA graphs on 4 NVIDIA H200, 2026-11-26, {_VERSIONS}, 8 KB, 64 KB, 1 MB and 8 MB of a rank: all_gather by "
    "triton.one_shot takes 4.0, 4.5, 13.2 and 87 us, by NCCL 15.6, 15.8, 41.7 and 115; reduce_scatter 3.7, 3.8, 6.2 "
    "and 32.0, and 14.5, 15.1, 18.0 and 44.3, 32 MB 94 and 112 (benchmarks/results/comm_parts_4_ranks_h200.json)"
)
_OF_PARTS = (
    Line("*", "*", (_NCCL, _PUSH_ONE), f"triton.one_shot of these ops ran on 2 and 4 ranks of Hopper only; {_PARTS}"),
    *(Line("hopper", f"2 ranks, {bucket}", (_PUSH_ONE, _NCCL), _PARTS) for bucket in ("32KB", "256KB", "1MB", "8MB")),
    *(
        Line("hopper", f"4 ranks, {bucket}", (_PUSH_ONE, _NCCL), _PARTS_OF_FOUR)
        for bucket in ("32KB", "256KB", "1MB", "8MB", "32MB")
    ),
)
_NORM_OF_FOUR = (
    f"in CUDA graphs on 4 NVIDIA H200, 2026-11-26, {_VERSIONS}, 8 KB, 64 KB, 1 MB, 8 MB and 32 MB: Triton's one-shot "
    "5.3, 5.5, 16.2, 96 and 385 us, its two-shot 8.8, 10.7, 13.5, 57.6 and 179, NCCL with the norm 33.7, 39.9, 54.8, "
    "166 and 553 (benchmarks/results/comm_parts_4_ranks_h200.json); FlashInfer's one-shot took 14.6 for 1 MB "
    "(benchmarks/results/comm_4_ranks_h200.json)"
)
_NORM_APART = "norms over peer memory have run on 2 and 4 ranks only (benchmarks/results/comm_4_ranks_h200.json)"

ORDER = {
    "expert_parallel_moe": (Line("*", "*", _PAIRS, _LAYERS),),
    "all_gather": _OF_PARTS,
    "reduce_scatter": _OF_PARTS,
    "moe_dispatch": (
        Line("*", "*", _EXPERTS, _MORE),
        *(
            Line("hopper", f"{ranks}, {count}", first(("triton.push",), _EXPERTS), evidence)
            for ranks, evidence in _EVIDENCE.items()
            for count in ("few", "many")
        ),
        Line("hopper", "2 ranks, exact", first(("triton.push_exact",), _EXPERTS), _PUSHED_EXACTLY),
        Line("hopper", "4 ranks, exact", first(("triton.push_exact",), _EXPERTS), _PUSHED_EXACTLY_BY_FOUR),
    ),
    "moe_combine": (
        Line("*", "*", _SUMS, _MORE),
        *(
            Line("hopper", f"{ranks}, {count}", first(("triton.push", "torch.reduce_scatter_fixed"), _SUMS), evidence)
            for ranks, evidence in _EVIDENCE.items()
            for count in ("few", "many")
        ),
        Line("hopper", "2 ranks, exact", first(("triton.push_exact",), _SUMS), _PUSHED_EXACTLY),
        Line("hopper", "4 ranks, exact", first(("triton.push_exact",), _SUMS), _PUSHED_EXACTLY_BY_FOUR),
    ),
    "all_reduce_rms_norm": (
        Line(
            "cpu",
            "*",
            (_NCCL, _PAIR),
            "both run the same operators; a call of the pair compares what the ranks give twice, which takes as long "
            "as a small sum",
        ),
        Line(
            "*",
            "*",
            (*_TWO_LARGE, _PAIR, _NCCL, *_FUSED, _QUANT, _TWO_QUANT),
            f"{_H100}; with the norm, 8 KB and 1 MB: Triton's 3.5 and 6.7, FlashInfer's 4.9 and 8.1; on 4 H200, 8 KB, "
            "1 MB and 8 MB (benchmarks/results/comm_4_ranks_h200.json): Triton's 5.4, 16.2 and 95.9, FlashInfer's 5.9, "
            "14.6 and, in two shots, 68.0, NCCL with the norm 33.6, 55.2 and 166; on 2 H200, 8 KB, 1 MB, 8 MB and "
            "32 MB (benchmarks/results/comm_norm_h200.json): Triton's one-shot 3.5, 6.6, 30.4 and 106, its two-shot "
            "5.6, 7.8, 29.5 and 115, FlashInfer's one-shot 5.1 and 8.0, its two-shot 50.7 and 182 from 8 MB on, NCCL "
            "with the norm 30.2, 50.7, 156 and 516; on 2 H100 triton.one_shot_quant takes 4.2 to 4.9 for 8 KB and "
            "7.2 to 7.9 for 1 MB, Triton's one-shot 3.7 and 6.6 (benchmarks/results/comm_quant_h100.json); "
            f"{_QUANTISED_PAIR}; {_QUANTISED_APART}; {_QUANTISED_BY_FOUR}",
        ),
        *(
            Line("*", f"{ranks} ranks, {bucket}", (_PAIR, _NCCL, *_TWO_LARGE, *_FUSED, _QUANT, _TWO_QUANT), _NORM_APART)
            for ranks in ("8", "other")
            for bucket in BUCKETS
        ),
        *(
            Line(
                "*",
                f"4 ranks, {bucket}",
                (_PUSH_TWO, _PUSH_ONE, _POLLED, _CLUSTERED, _PAIR, _NCCL, *_FUSED, _QUANT, _TWO_QUANT),
                f"extrapolated from what was measured {_NORM_OF_FOUR}",
            )
            for bucket in ("1MB", "8MB", "32MB", "more")
        ),
        *(
            Line("hopper", f"2 ranks, {bucket}", (_PUSH_ONE, _POLLED, _CLUSTERED, *_TWO_SMALL), evidence)
            for bucket, evidence in (
                *((bucket, f"{_QUANTISED}; {_NORM_OF_TWO}") for bucket in ("32KB", "256KB")),
                ("1MB", _QUANTISED),
            )
        ),
        *(
            Line(
                "hopper",
                f"2 ranks, {bucket}",
                (*_TWO_LARGE, *quantisers, _PAIR, _NCCL, *_FUSED),
                f"{quantised}; without a form, 8 and 32 MB: Triton's one-shot takes 30.4 and 106, its two-shot 29.5 "
                "and 115, FlashInfer's two-shot 50.7 and 182, NCCL with the norm 156 and 516 "
                "(benchmarks/results/comm_norm_h200.json)",
            )
            for bucket, quantisers, quantised in (
                ("8MB", (_QUANT, _TWO_QUANT), _QUANTISED_8MB),
                ("32MB", (_TWO_QUANT, _QUANT), _QUANTISED_MORE),
                ("more", (_TWO_QUANT, _QUANT), _QUANTISED_MORE),
            )
        ),
        Line("hopper", WIDE_ROWS, (_POLLED, _PUSH_ONE, _CLUSTERED, *_TWO_SMALL), _WIDE),
        Line(
            "hopper",
            CLUSTERED_ROWS["2 ranks, 32KB"],
            (_CLUSTERED, _PUSH_ONE, _POLLED, *_TWO_SMALL),
            f"{_FEW_CLUSTERED}; {_NORM_OF_TWO}",
        ),
        Line(
            "hopper",
            CLUSTERED_ROWS["2 ranks, 1MB"],
            (_CLUSTERED, _POLLED, _PUSH_ONE, *_TWO_SMALL),
            f"{_MORE_CLUSTERED}; {_WIDE}",
        ),
        *(
            Line(
                "hopper",
                f"4 ranks, {bucket}",
                (_PUSH_TWO, _PUSH_ONE, _POLLED, _CLUSTERED, *quantisers, _NCCL, *_FUSED, _QUANT),
                f"{_NORM_OF_FOUR}; {quantised}",
            )
            for bucket, quantisers, quantised in (
                ("1MB", (_PAIR, _TWO_QUANT), f"{_QUANTISED_APART}; {_QUANTISED_BY_FOUR}"),
                *((bucket, (_TWO_QUANT, _PAIR), _QUANTISED_BY_FOUR_MORE) for bucket in ("8MB", "32MB", "more")),
            )
        ),
        Line("hopper", NVFP4_ROWS, (_QUANT, _PAIR, _TWO_QUANT, _NCCL, *_TWO_LARGE, *_FUSED), _NVFP4_OF_FOUR),
    ),
    "all_reduce": (
        Line(
            "*",
            NO_NVLINK,
            first((_NCCL,), _REST),
            "no NVLink is known between the ranks (`prepare` finds it out, no call does), and kernels over peer memory "
            "were not measured over PCIe",
        ),
        *(Line("*", f"other ranks, {bucket}", first((_NCCL,), _REST), _OTHER) for bucket in BUCKETS),
        *(
            Line("*", f"{ranks} ranks, {bucket}", first(kernels[bucket], _REST), evidence)
            for ranks, (kernels, evidence) in _FIRST.items()
            for bucket in BUCKETS
        ),
        *(
            Line("hopper", f"2 ranks, {bucket}", first((_CUDA,), first(_FIRST[2][0][bucket], _REST)), _BY_CUDA)
            for bucket in ("32KB", "256KB", "1MB")
        ),
        *(
            Line("hopper", f"4 ranks, {bucket}", first((_CUDA,), first(_FIRST[4][0][bucket], _REST)), _FOUR_BY_CUDA)
            for bucket in ("32KB", "256KB")
        ),
    ),
}
