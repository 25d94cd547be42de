"""Order of the kernels of the collectives, where NVLink connects the ranks.

Buckets of messages are those of `kernelhub.ops.comm.problem`. `benchmarks/comm.py` measures them.
"""

from kernelhub.dispatch.order import Line, first
from kernelhub.ops.comm.problem import BUCKETS, NO_NVLINK

_PUSH_ONE, _PUSH_TWO = "triton.one_shot", "triton.two_shot"
_ONE, _TWO, _NCCL = "torch.symm_mem_one_shot", "torch.symm_mem_two_shot", "torch.distributed"
_ALL = (_PUSH_ONE, _PUSH_TWO, _ONE, _TWO, _NCCL)
_FUSED = ("flashinfer.trtllm_one_shot", "flashinfer.trtllm_two_shot")
# They wait for a missing rank without limit: after those that do not. FlashInfer's two shots take 245 us for one row.
_LIBRARIES = ("custom_all_reduce.vllm", *_FUSED, "custom_all_reduce.sgl_kernel")
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
_H200 = (
    f"in CUDA graphs on 4 NVIDIA H200, 2026-11-22, {_VERSIONS}, without the copy to a workspace: torch's one-shot, its "
    "two-shot and NCCL take 8.5, 9.3 and 16.0 us for 64 KB, 18.3, 13.1 and 26.3 for 1 MB, 86.8, 49.4 and 62.9 for 8 "
    "MB; Triton's kernels, which were faster on 2 ranks, have not run on more"
)
# By number of ranks, the kernels that are first in each bucket, and the evidence. Other GPUs are expected as Hopper.
_ONE_FIRST, _TWO_FIRST = (_PUSH_ONE, _PUSH_TWO, _ONE, _TWO), (_PUSH_TWO, _PUSH_ONE, _TWO, _ONE)
# What ran on the number of ranks goes before what did not: Triton's kernels have run on 2.
_SMALL_RAN, _LARGE_RAN = (_ONE, _TWO, _NCCL), (_TWO, _ONE, _NCCL)
_LARGE = {"1MB": _LARGE_RAN, "8MB": _LARGE_RAN, "32MB": _LARGE_RAN, "more": (_NCCL,)}
_FIRST = {
    2: (
        {
            "32KB": _ONE_FIRST,
            "256KB": _ONE_FIRST,
            "1MB": _ONE_FIRST,
            "8MB": _TWO_FIRST,
            "32MB": (_PUSH_ONE, _PUSH_TWO, _TWO),
            "more": (_NCCL,),
        },
        _H100,
    ),
    4: ({**_LARGE, "32KB": _SMALL_RAN, "256KB": _SMALL_RAN}, _H200),
    8: ({**_LARGE, "32KB": _SMALL_RAN, "256KB": _LARGE_RAN}, f"extrapolated from what was measured {_H200}"),
}

_PUSHED = (
    f"in CUDA graphs on 2 NVIDIA H200, 2026-11-26, {_VERSIONS}, DeepSeek-V3.2, dispatch and combine of 1, 64 and 512 "
    "tokens of a rank as tokens: triton.push 9.3, 13.9 and 58.6 us, torch.gather_fixed with torch.reduce_scatter_fixed "
    "61, 91 and 228, torch.all_to_all_fixed 74, 106 and 290 (benchmarks/results/expert_comm_h200.json)"
)
_MORE = f"triton.push has not run on more than 2 ranks; {_PUSHED}"
_EXPERTS = ("torch.gather_fixed", "torch.all_to_all", "torch.all_to_all_fixed", "torch.gather", "triton.push")
_SUMS = (
    "torch.all_to_all",
    "torch.all_to_all_fixed",
    "torch.reduce_scatter",
    "torch.reduce_scatter_fixed",
    "triton.push",
)
_OTHER = "kernels over peer memory have not run on 3, 5, 6 or 7 ranks"
_OF_TWO = ("2 ranks, few", "2 ranks, many")

ORDER = {
    "moe_dispatch": (
        Line("*", "*", _EXPERTS, _MORE),
        *(Line("hopper", regime, first(("triton.push",), _EXPERTS), _PUSHED) for regime in _OF_TWO),
    ),
    "moe_combine": (
        Line("*", "*", _SUMS, _MORE),
        *(
            Line("hopper", regime, first(("triton.push", "torch.reduce_scatter_fixed"), _SUMS), _PUSHED)
            for regime in _OF_TWO
        ),
    ),
    "all_reduce_rms_norm": (
        Line(
            "*",
            "*",
            (_PUSH_ONE, _NCCL, *_FUSED),
            f"{_H100}; with the norm, 8 KB and 1 MB: Triton's 3.5 and 6.7, FlashInfer's 4.9 and 8.1",
        ),
    ),
    "all_reduce": (
        Line(
            "*", NO_NVLINK, first((_NCCL,), _ALL + _LIBRARIES), "kernels over peer memory were not measured over PCIe"
        ),
        *(Line("*", f"other ranks, {bucket}", first((_NCCL,), _ALL + _LIBRARIES), _OTHER) for bucket in BUCKETS),
        *(
            Line("*", f"{ranks} ranks, {bucket}", first(kernels[bucket], _ALL + _LIBRARIES), evidence)
            for ranks, (kernels, evidence) in _FIRST.items()
            for bucket in BUCKETS
        ),
    ),
}
