"""A layer of experts in a group, by default of this process alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kernelhub.ops.comm.inputs import alone
from kernelhub.ops.moe.experts.inputs import moe_inputs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def parallel_inputs(
    *,
    max_tokens: int | None = 128,
    device: torch.device | str = "cpu",
    group: ProcessGroup | str | None = None,
    **layer: Any,
) -> dict[str, Any]:
    """Arguments of `expert_parallel_moe`: those of `fused_moe` by `moe_inputs`, with a group.

    Args:
        max_tokens: as of the op.
        device: where the tensors are made.
        group: the group; by default one with this process as its only rank.
        layer: as of `moe_inputs`.
    """
    made = moe_inputs(**layer, device=device)
    return made | {"group": alone(torch.device(device)) if group is None else group, "max_tokens": max_tokens}
