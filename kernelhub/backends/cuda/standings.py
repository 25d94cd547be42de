"""Where our CUDA kernels ran."""

from __future__ import annotations

from kernelhub.dispatch.standing import Standing, untested, verified

_OTHERS = untested("ampere", "ada", "blackwell", "thor", "blackwell_rtx")
UNTESTED = (untested("ampere", "ada", "hopper", "blackwell", "thor", "blackwell_rtx"),)


def standings(op: str, passed: int, date: str = "2026-11-25") -> tuple[Standing, ...]:
    """Those of a kernel of an op that passed so many cases on that day."""
    evidence = f"NVIDIA H100 80GB HBM3, {date}, torch 2.11.0+cu130, {op} by CUDA: {passed} tests passed "
    return verified("hopper", evidence=f"{evidence}(benchmarks/results/cuda_h100.json)"), _OTHERS
