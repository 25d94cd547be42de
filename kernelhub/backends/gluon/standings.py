"""Where our Gluon kernels ran."""

from __future__ import annotations

from kernelhub.dispatch.standing import Standing, verified

# By file of results.
_RAN = {
    "gluon_h100.json": "NVIDIA H100 80GB HBM3, 2026-11-26, torch 2.11.0+cu130, Triton 3.6.0",
    "gluon_h200.json": "NVIDIA H200, 2026-11-26, torch 2.11.0+cu130, Triton 3.6.0",
    "gluon_mla_h200.json": "NVIDIA H200, 2026-11-27, torch 2.11.0+cu130, Triton 3.6.0",
    "gluon_more_h200.json": "NVIDIA H200, 2026-11-27, torch 2.11.0+cu130, Triton 3.6.0",
    "gluon_tests_h100.json": "NVIDIA H100 80GB HBM3, 2026-11-28, torch 2.11.0+cu130, Triton 3.6.0",
    "gluon_tests_h200.json": "NVIDIA H200, 2026-11-27, torch 2.11.0+cu130, Triton 3.6.0",
}


def standings(passed: int, file: str = "gluon_h100.json") -> tuple[Standing, ...]:
    """Those of a kernel that passed so many tests of its contract."""
    evidence = f"{_RAN[file]}, contract in Gluon: {passed} tests passed, none failed (benchmarks/results/{file})"
    return (verified("hopper", evidence=evidence),)
