"""Where FlashAttention's kernels ran, and the devices that their authors state."""

from __future__ import annotations

from kernelhub.dispatch.standing import opt_in, published, verified

_ON = "NVIDIA H200, 2026-11-21, torch 2.11.0+cu130"
_AGAIN = "NVIDIA H200, 2026-11-22, torch 2.11.0+cu130"
_RESULTS = "(benchmarks/results/libraries_h200.json)"
_README = "https://github.com/Dao-AILab/flash-attention"

FA3 = (
    verified(
        "hopper",
        evidence=f"{_AGAIN}, tokenspeed-fa3 3.0.0.post20260810 (FlashAttention-3): 177 tests passed {_RESULTS}",
    ),
)
VLLM_FA3 = (
    verified(
        "hopper",
        evidence=f"{_ON}, vllm 0.33.0, its FlashAttention-3 by itself; and torch's own FlashAttention-2: "
        f"145 tests passed {_RESULTS}",
    ),
)
FA2 = (
    published(
        "ampere",
        "ada",
        evidence=f"FlashAttention-2 supports Ampere, Ada and Hopper ({_README}#nvidia-cuda-support); on an A100 it is "
        "1.3 to 2.5 times as fast as FlashAttention in Triton (Dao 2023, section 4.1, https://arxiv.org/abs/2307.08691)",
        figure="1.3x to 2.5x of FlashAttention in Triton on an A100",
    ),
    published("hopper", evidence=f"FlashAttention-2 supports Ampere, Ada and Hopper: {_README}#nvidia-cuda-support"),
)
VLLM_FA2 = (
    opt_in(
        "hopper",
        evidence="its library has code for sm_80 alone, which the driver compiles for sm_90 at the first call. "
        f"It ran: {_ON}, vllm 0.33.0, its FlashAttention-2 by itself: 234 tests passed {_RESULTS}",
    ),
    published(
        "ampere",
        "ada",
        evidence="vLLM's FLASH_ATTN runs FlashAttention-2 from sm_80 on: "
        "https://docs.vllm.ai/en/latest/design/attention_backends/",
    ),
)
FA4 = (
    opt_in(
        "hopper",
        evidence="CuTe DSL compiles it for seconds at the first call of a class of problems, and flash_attn.fa3 is "
        f"faster there. It ran: {_ON}, flash-attn-4 4.0.0b36, nvidia-cutlass-dsl 4.8.1: 48 tests passed {_RESULTS}",
    ),
    published(
        "blackwell",
        evidence="FlashAttention-4 is for Hopper and Blackwell (https://pypi.org/project/flash-attn-4); its authors "
        f"measured it on a B200 with bfloat16 ({_README}/blob/main/assets/fa4_paper.pdf)",
        figure="up to 1.3x of cuDNN 9.13 and 2.7x of Triton on a B200",
        seconds=60.0,
    ),
)
