"""Where our Triton kernels ran, for what they were compiled, and which devices Triton says that it compiles for."""

from __future__ import annotations

from kernelhub.dispatch.standing import published, verified

_STATED = "Triton supports NVIDIA GPUs from sm_80 on: https://github.com/triton-lang/triton#compatibility"
AHEAD = "compiled ahead of time with Triton 3.7.1 and not run (benchmarks/results/verification_cpu.json)"
_RAN = (
    verified(
        "hopper",
        evidence="NVIDIA H200, 2026-11-23, torch 2.11.0+cu130, Triton 3.6.0: 3324 tests of this backend passed, "
        "none failed (benchmarks/results/verification_h200.json)",
    ),
    verified(
        "cpu",
        evidence="interpreted, which is all that runs on a CPU: CPU, 2 cores, 2026-11-27, torch 2.13.0+cpu, "
        "Triton 3.7.1: 2430 tests of this backend passed, none failed "
        "(benchmarks/results/verification_cpu.json)",
    ),
)

# Of what is compiled ahead for other GPUs than Hopper.
AHEAD_ELSEWHERE = (
    published("ampere", evidence=f"{_STATED}; for an A100 {AHEAD}"),
    published("ada", evidence=f"{_STATED}; for an L40S {AHEAD}"),
    published("blackwell", evidence=f"{_STATED}; for a B200 {AHEAD}"),
    published("blackwell_rtx", evidence=f"{_STATED}; for an RTX5090 {AHEAD}"),
)
STANDINGS = (*_RAN, *AHEAD_ELSEWHERE)
# Of what has not run on Hopper.
STATED = published("hopper", evidence=_STATED)
