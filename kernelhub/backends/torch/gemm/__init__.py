"""The records of matrix products."""

from __future__ import annotations

from kernelhub.backends.torch.gemm import fp4, fp8, grouped

KERNELS = (
    *fp4.KERNELS,
    *fp8.KERNELS,
    *grouped.KERNELS,
)

KNOWN_BAD = fp8.KNOWN_BAD
