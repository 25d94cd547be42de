"""Where the kernels of PyTorch ran, and the devices that its binaries support."""

from __future__ import annotations

from kernelhub.dispatch.standing import Standing, published, verified

CPU = verified(
    "cpu",
    evidence="CPU, 2 cores, 2026-11-27, torch 2.13.0+cpu: 2564 tests of this backend passed, none failed "
    "(benchmarks/results/verification_cpu.json)",
)
H200 = verified(
    "hopper",
    evidence="NVIDIA H200, 2026-11-23, torch 2.11.0+cu130: 2271 tests of this backend passed, none failed "
    "(benchmarks/results/verification_h200.json)",
)
VARLEN = verified(
    "hopper",
    evidence="NVIDIA H200, 2026-11-23, torch 2.11.0+cu130: 2271 tests of this backend passed, none failed "
    "(benchmarks/results/verification_h200.json); 2026-11-21, beside vllm 0.33.0, its FlashAttention-2 by itself: "
    "234 tests passed (benchmarks/results/libraries_h200.json)",
)


def _stated(*families: str) -> Standing:
    return published(
        *families,
        evidence="PyTorch 2.14 has binaries for sm_70 to sm_120, and for sm_110 on aarch64; code of sm_86 runs on "
        "sm_89: https://github.com/pytorch/pytorch/blob/main/RELEASE.md#pytorch-cuda-support-matrix",
    )


_ROCM = published(
    "cdna3",
    "cdna4",
    evidence="AMD supports PyTorch on Instinct GPUs: "
    "https://rocm.docs.amd.com/en/latest/compatibility/ml-compatibility/pytorch-compatibility.html",
)

# Of what has not run on the H200, beside a standing of its own on Hopper.
STATED = (_stated("volta", "ampere", "ada", "blackwell", "blackwell_rtx", "thor"), _ROCM)
EVERYWHERE = (H200, CPU, _stated("volta", "ampere", "ada", "blackwell", "blackwell_rtx", "thor"), _ROCM)
ON_CPU = (CPU,)
ON_HOPPER = (H200,)
FLASH_ATTENTION_2 = (VARLEN, _stated("ampere", "ada"))
FLOAT8 = (H200, _stated("ada", "blackwell", "blackwell_rtx"))
FLOAT8_BY_ROW = (H200, _stated("ada", "blackwell"))
TENSOR_MEMORY = (H200, _stated("blackwell"))
