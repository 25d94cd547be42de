"""Where our Gluon kernels ran."""

from __future__ import annotations

from kernelhub.dispatch.standing import Standing, verified

_RAN = "NVIDIA H100 80GB HBM3, 2026-11-26, torch 2.11.0+cu130, Triton 3.6.0"


def standings(passed: int) -> tuple[Standing, ...]:
    """Those of a kernel that passed so many tests of its contract."""
    evidence = f"{_RAN}, contract in Gluon: {passed} tests passed, none failed (benchmarks/results/gluon_h100.json)"
    return (verified("hopper", evidence=evidence),)
