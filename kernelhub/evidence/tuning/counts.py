"""Default token counts of measurements."""

from __future__ import annotations

import torch

from kernelhub.ops.models.layers import DECODE, PREFILL
from kernelhub.ops.models.problems import PHASES, Need

# Tokens of a step. Decode: sizes that engines capture, a factor of four apart, since the fastest kernel seldom changes
# twice between two of them. Prefill: a short prompt, and the chunk sizes of long prompts.
OF_A_GPU = {DECODE: (1, 4, 16, 64, 256), PREFILL: (256, 1024, 4096)}
OF_A_CPU = {DECODE: (1, 8), PREFILL: (64,)}


def usual_counts(need: Need, device: torch.device) -> tuple[int, ...]:
    """Token counts of the phases of a need; counts without a call of its class are dropped later."""
    by_phase = OF_A_GPU if device.type == "cuda" else OF_A_CPU
    return tuple(sorted({count for phase in need.phases or PHASES for count in by_phase[phase]}))
