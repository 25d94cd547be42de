"""Kernels that read lengths on the host, and the arguments that they need in a sealed process."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.warming.outcome import FAILED, Outcome

_GIVEN = {
    "attention": "`cu_seqlens_q_cpu` and `cu_seqlens_k_cpu`",
    "paged_attention": "`seq_lens_cpu` (and `cu_seqlens_q_cpu` for ragged queries)",
    "mla_attention": "`seq_lens_cpu` (and `cu_seqlens_q_cpu` for ragged queries)",
}


def notes_on_lengths(outcomes: Iterable[Outcome], device: torch.device) -> list[str]:
    """A sentence for each kernel that waits for the device unless lengths are given on the host.

    Args:
        outcomes: results of a warm-up.
        device: device of the warm-up.
    """
    if device.type == "cpu":
        return []
    kernels = {(item.op, item.kernel): None for item in outcomes if item.kernel and item.how != FAILED}
    notes = []
    for op, kernel in kernels:
        record = next(record for record in HUB.registry.candidates(op).kernels if record.name == kernel)
        if not record.reads_lengths:
            continue
        remedy = f"give {given} to its plan's `begin`" if (given := _GIVEN.get(op)) else "select another kernel"
        notes.append(
            f"{op} {kernel} reads lengths on the host, so a call without them waits for the device: after `seal`, "
            f"{remedy}; calls that would wait are refused"
        )
    return notes
