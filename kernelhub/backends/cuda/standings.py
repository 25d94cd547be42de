"""Where our CUDA kernels ran."""

from __future__ import annotations

from kernelhub.dispatch.standing import Standing, untested, verified

_OTHERS = untested("ampere", "ada", "blackwell", "thor", "blackwell_rtx")
UNTESTED = (untested("ampere", "ada", "hopper", "blackwell", "thor", "blackwell_rtx"),)


def standings(
    op: str, passed: int, on_h100: int | None = None, date_on_h100: str = "2026-11-25"
) -> tuple[Standing, ...]:
    """Those of a kernel of an op that passed so many cases; on an H100 as many, or others, by earlier sources."""
    before = passed if on_h100 is None else on_h100
    evidence = (
        f"NVIDIA H200, 2026-11-27, torch 2.11.0+cu130, {op} by CUDA: {passed} tests passed "
        f"(benchmarks/results/cuda_h200.json); earlier sources on NVIDIA H100 80GB HBM3, {date_on_h100}, "
        f"torch 2.11.0+cu130, {op} by CUDA: {before} tests passed (benchmarks/results/cuda_h100.json)"
    )
    return verified("hopper", evidence=evidence), _OTHERS
