"""Inputs of linear attention with the shapes of real models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.models.shapes import LINEAR_ATTENTION, LinearModel


def slopes(num_heads: int, depth: float = 0.0) -> Tensor:
    """Decays of the heads of a layer, float32 [H]: 2^(-8 (h + 1) / H), less in deeper layers.

    So MiniMax-Text-01 has them (`get_slope_rate` of transformers' modeling code), and Ring-2.5 for a power of two of
    heads (`build_slope_tensor` of modeling_bailing_moe_v2_5.py). Not verified: the modeling code of Ring-linear-2.0.

    Args:
        num_heads: heads.
        depth: of layer i of L: i / (L - 1) in MiniMax-Text-01, (i - 1) / (L - 1) in Ring-2.5.
    """
    return 2.0 ** (-8.0 * torch.arange(1, num_heads + 1, dtype=torch.float32, device="cpu") / num_heads) * (
        1.0 - depth + 1e-5
    )


def linear_inputs(
    model: LinearModel | str = "minimax-text-01",
    *,
    batch: int = 1,
    tokens: int = 100,
    lengths: Sequence[int] | None = None,
    state: bool = False,
    slots: Sequence[int] | None = None,
    num_slots: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `linear_attention`.

    Args:
        model: its shape, or its name.
        batch: sequences.
        tokens: per sequence.
        lengths: of the sequences of a ragged batch, in place of `batch` and `tokens`.
        state: sequences continue from a state.
        slots: where in a pool of states, one per sequence, which implies `state`.
        num_slots: states in the pool.
        dtype: of q, k and v.
        device: where the tensors are made.
        seed: of the random numbers, which are the same for every device.
    """
    model = LINEAR_ATTENTION[model] if isinstance(model, str) else model
    random = torch.Generator(device="cpu").manual_seed(seed)
    rows = (batch, tokens) if lengths is None else (sum(lengths),)
    sequences = batch if lengths is None else len(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float32, device="cpu")

    heads, width, value_width = model.num_heads, model.head_dim, model.value_dim
    made: dict[str, Any] = {
        "q": normal(*rows, heads, width).to(dtype).to(device),
        "k": (normal(*rows, heads, width) * width**-0.5).to(dtype).to(device),
        "v": normal(*rows, heads, value_width).to(dtype).to(device),
        "decay": slopes(heads).to(device),
    }
    if state or slots is not None:
        count = sequences if slots is None else num_slots or max([*slots, 0]) + 2
        made["state"] = normal(count, heads, width, value_width).to(device)
    if lengths is not None:
        made["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu").to(device)
    if slots is not None:
        made["state_indices"] = torch.tensor(slots, dtype=torch.int32, device="cpu").to(device)
    return made
