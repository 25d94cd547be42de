"""Where cuDNN's kernels ran."""

from __future__ import annotations

from kernelhub.dispatch.standing import opt_in, verified

_RAN = (
    "NVIDIA H200, 2026-11-21, torch 2.11.0+cu130, nvidia-cudnn-frontend 1.32.0, cuDNN 9.19: 156 tests passed "
    "(benchmarks/results/libraries_h200.json)"
)

PACKED = (verified("hopper", evidence=_RAN),)
PAGED = (
    opt_in(
        "hopper",
        evidence=f"it needs a promise by the caller: no NaN in the unused end of a page. On such caches: {_RAN}",
    ),
)
