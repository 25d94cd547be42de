"""For how many tokens kernels are measured, unless somebody says."""

from __future__ import annotations

import torch

from kernelhub.ops.models.layers import DECODE, PREFILL
from kernelhub.ops.models.problems import PHASES, Need

# Tokens of a step: of decode what engines capture, a power of four apart, since between two of them the fastest kernel
# seldom changes twice; of prefill a short prompt, and the chunks that engines cut long ones into.
OF_A_GPU = {DECODE: (1, 4, 16, 64, 256), PREFILL: (256, 1024, 4096)}
OF_A_CPU = {DECODE: (1, 8), PREFILL: (64,)}


def usual_counts(need: Need, device: torch.device) -> tuple[int, ...]:
    """Token counts of the phases in which a need is asked; those that its class has no call of fall away later."""
    by_phase = OF_A_GPU if device.type == "cuda" else OF_A_CPU
    return tuple(sorted({count for phase in need.phases or PHASES for count in by_phase[phase]}))
