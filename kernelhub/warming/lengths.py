"""Kernels that read lengths on the host: what a sealed process has to give them."""

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


def told_of_lengths(outcomes: Iterable[Outcome], device: torch.device) -> list[str]:
    """A sentence for each kernel that waits for the device unless lengths are given on the host.

    Args:
        outcomes: of a warm-up.
        device: it was for.
    """
    if device.type == "cpu":
        return []
    kernels = {(item.op, item.kernel): None for item in outcomes if item.kernel and item.how != FAILED}
    told = []
    for op, kernel in kernels:
        record = next(record for record in HUB.registry.candidates(op).kernels if record.name == kernel)
        if not record.reads_lengths:
            continue
        remedy = f"give {given} to its plan's `begin`" if (given := _GIVEN.get(op)) else "choose another kernel"
        told.append(
            f"{op} {kernel} reads lengths on the host, for which a call waits for the device: after `seal`, "
            f"{remedy}; calls that would wait are refused"
        )
    return told
