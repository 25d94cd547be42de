"""The rotary embedding that `write_kv_cache` may apply: its operands, their checks, and what it does in plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.ops.arguments import check_wants_no_gradient, describe, dtype_name, refuse
from kernelhub.ops.kv_cache.problem import INTERLEAVED, NEOX
from kernelhub.ops.operands import check_apart, check_flag, check_operand, overlaps_itself
from kernelhub.ops.values import values_to_check

NAME = "write_kv_cache"


class Rope(NamedTuple):
    """The operands of the embedding.

    Attributes:
        positions: int64 [T], of any stride.
        cos_sin_cache: float32 [max_position, rotary_dim], of any strides: cosines, then sines.
        q: [T, QH, D] in the dtype of k, of any strides, rotated in place; or None.
    """

    positions: Tensor
    cos_sin_cache: Tensor
    q: Tensor | None


def style_of(cos_sin_cache: Any, is_neox: Any) -> str | None:
    """What a call is asked to rotate: ``"neox"``, ``"interleaved"`` or None."""
    return None if cos_sin_cache is None else NEOX if is_neox else INTERLEAVED


def check_rope(
    k: Tensor, others: dict[str, Tensor], positions: Any, cos_sin_cache: Any, q: Any, is_neox: Any
) -> dict[str, Tensor]:
    """Everything that the contract says of the embedding's operands, but of their values. Returns those that are read.

    Args:
        k: keys, which were checked.
        others: operands that q may share no memory with, by name.
        positions, cos_sin_cache, q, is_neox: as they were given.
    """
    check_flag(NAME, "is_neox", is_neox)
    if cos_sin_cache is None:
        for parameter, given in (("positions", positions), ("q", q)):
            if given is not None:
                refuse(NAME, parameter, "is given without cos_sin_cache", "give both, or neither")
        return {}
    tokens, _, width = k.shape
    check_operand(NAME, "cos_sin_cache", cos_sin_cache)
    if cos_sin_cache.dtype is not torch.float32:
        refuse(NAME, "cos_sin_cache", f"has dtype {dtype_name(cos_sin_cache.dtype)}", "give float32: .float()")
    if cos_sin_cache.ndim != 2 or not cos_sin_cache.shape[0] or not _fits(cos_sin_cache.shape[1], width):
        fix = f"give [max_position, rotary_dim] with an even rotary_dim of 2 to {width}, the width of k"
        refuse(NAME, "cos_sin_cache", f"has shape {list(cos_sin_cache.shape)}", fix)
    check_operand(NAME, "positions", positions)
    if positions.dtype is not torch.int64:
        refuse(NAME, "positions", f"has dtype {dtype_name(positions.dtype)}", "give int64: .to(torch.int64)")
    if positions.shape != (tokens,):
        refuse(NAME, "positions", f"has shape {list(positions.shape)}", f"give [{tokens}], one for each token")
    read = {"positions": positions, "cos_sin_cache": cos_sin_cache}
    given = read if q is None else read | {"q": q}
    if q is not None:
        check_operand(NAME, "q", q)
        if q.ndim != 3 or q.shape[0] != tokens or not q.shape[1] or q.shape[2] != width or q.dtype is not k.dtype:
            refuse(NAME, "q", f"is {describe(q)}", f"give {dtype_name(k.dtype)} [{tokens}, QH, {width}], as k has it")
    for parameter, tensor in given.items():
        if tensor.device != k.device:
            refuse(NAME, parameter, f"is on {tensor.device}", f"move it to {k.device}, where k is")
        check_wants_no_gradient(NAME, parameter, tensor)
    if q is not None:
        if overlaps_itself(q):
            refuse(NAME, "q", f"overlaps itself (strides {list(q.stride())})", "give elements that do not overlap")
        check_apart(NAME, "q", q, others | read)
    return read


def _fits(rotary_dim: int, width: int) -> bool:
    return 2 <= rotary_dim <= width and rotary_dim % 2 == 0


def check_positions(positions: Tensor, cos_sin_cache: Tensor, slot_mapping: Tensor) -> None:
    """Each token that is written has a row of the cache; on a GPU only KERNELHUB_CHECK=1 checks that."""
    given, slots = values_to_check(positions), values_to_check(slot_mapping)
    if given is None or slots is None or not given.numel():
        return
    wrong = (slots >= 0) & ((given < 0) | (given >= cos_sin_cache.shape[0]))
    if bool(wrong.any()):
        token = int(wrong.int().argmax())
        fix = f"cos_sin_cache has {cos_sin_cache.shape[0]} rows"
        refuse(NAME, "positions", f"is {int(given[token])} for token {token}", fix)


def has_row(positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Whether the position of each token [T] has a row of the cache."""
    return (positions >= 0) & (positions < cos_sin_cache.shape[0])


def rotated(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, style: str) -> Tensor:
    """x [T, H, D] rotated, in new memory.

    Products and sums are rounded to float32 one by one, the result to the dtype of x. Tokens without a row of the
    cache are as they were.
    """
    half = cos_sin_cache.shape[1] // 2
    there = has_row(positions, cos_sin_cache)
    rows = cos_sin_cache[torch.where(there, positions, 0)].unsqueeze(1)  # [T, 1, rotary_dim]
    cos, sin = rows[..., :half], rows[..., half:]
    first, second = (
        (slice(0, half), slice(half, 2 * half)) if style == NEOX else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    a, b = x[..., first].float(), x[..., second].float()
    made = x.clone()
    made[..., first] = (a * cos - b * sin).to(x.dtype)
    made[..., second] = (b * cos + a * sin).to(x.dtype)
    return torch.where(there.view(-1, 1, 1), made, x)
