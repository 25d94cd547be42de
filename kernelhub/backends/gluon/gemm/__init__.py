"""The records of matrix products."""

from __future__ import annotations

from kernelhub.backends.gluon.gemm import fp8, grouped

KERNELS = (*fp8.KERNELS, *grouped.KERNELS)
