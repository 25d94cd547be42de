"""Operands of `moe_dispatch` and `moe_combine`: small integers and weights of 1/2 and 1, whose sums are exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.ops.comm.experts.problem import BLOCK, TOKENS
from kernelhub.ops.comm.inputs import alone
from kernelhub.ops.formats import E4M3

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def dispatch_inputs(
    *,
    tokens: int = 64,
    hidden_size: int = 7168,
    num_experts: int = 256,
    top_k: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    format: str = TOKENS,
    max_tokens: int | None = 128,
    ids: Sequence[Sequence[int]] | None = None,
    device: torch.device | str = "cpu",
    group: ProcessGroup | str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `moe_dispatch`: by default 64 tokens of DeepSeek-V3, in a group of this process alone.

    Args:
        tokens: of this rank.
        hidden_size: columns of x.
        num_experts: of all ranks.
        top_k: choices of a token.
        dtype: of x; float8_e4m3fn comes with scales.
        format, max_tokens: as of the op.
        ids: experts of the tokens; by default random, none twice.
        device: where the tensors are made.
        group: the group; by default one with this process as its only rank.
        seed: of the random numbers, which are the same for every device.
    """
    random = torch.Generator(device="cpu").manual_seed(seed)
    x = torch.randint(-8, 9, (tokens, hidden_size), generator=random, device="cpu").float().to(dtype)
    if ids is None:
        scores = torch.rand(tokens, num_experts, generator=random, device="cpu", dtype=torch.float32)
        chosen = scores.topk(top_k, 1).indices.int()
    else:
        chosen = torch.tensor(ids, dtype=torch.int32, device="cpu").view(tokens, -1)
    made: dict[str, Any] = {
        "x": x.to(device),
        "topk_ids": chosen.to(device),
        "topk_weights": exact_weights(chosen, random).to(device),
        "group": alone(torch.device(device)) if group is None else group,
        "num_experts": num_experts,
    }
    if dtype is E4M3:
        columns = -(-hidden_size // BLOCK)
        scales = torch.randint(-3, 4, (tokens, columns), generator=random, device="cpu").float().exp2()
        made["scales"] = scales.to(device)
    return made | {"format": format, "max_tokens": max_tokens}


def exact_weights(ids: Tensor, random: torch.Generator) -> Tensor:
    """float32 weights of 1/2 and 1 for these ids."""
    return torch.randint(1, 3, ids.shape, generator=random, device="cpu").float() / 2


def combine_inputs(*, dtype: torch.dtype = torch.bfloat16, all_tokens: bool = False, **dispatch: Any) -> dict[str, Any]:
    """Arguments of `moe_combine` after a dispatch with `dispatch_inputs` of `dispatch`; y has other small integers.

    Args:
        dtype: of y.
        all_tokens: of rows ``all``, as the reference of an exact dispatch gives them; by default those of the selected
            kernel.
        dispatch: as of `dispatch_inputs`.
    """
    given = dispatch_inputs(dtype=dtype, **dispatch)
    function = HUB.function("moe_dispatch")
    sent = function.reference(**given) if all_tokens else function(**given)
    random = torch.Generator(device="cpu").manual_seed(dispatch.get("seed", 0) + 1)
    y = torch.randint(-4, 5, tuple(sent.x.shape), generator=random, device="cpu").to(dtype).to(sent.x.device)
    return {"y": y, "handle": sent.handle, "group": given["group"]}
