"""The attention mask of a transformers model, as models pass it from `key_mask` to `attend`.

It is never 4-D, but one of two forms:

* None: all sequences of the batch are full, and the layer's own ``is_causal`` and ``sliding_window`` apply;
* int64 ``[B, keys]`` for padding, packed sequences, partly filled caches and two-sided windows: 0 if a key is padding,
  else the number of its sequence within the row, from 1 up. Two more fields of the same integers give a query's range
  to the left and right. Keys past the width belong to no sequence; the last columns are those of the queries.

The values contain everything, so a mask may move to another device on its way, as in models on several devices.

A mask without a name in transformers, such as a chunked mask or one that a model extends, is built once as booleans
``[B, queries, keys]`` and converted. The conversion is accepted only if it reproduces the same booleans.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.errors import InvalidArgument

ELSEWHERE = 'use attn_implementation="sdpa" or "eager" for this'

# Range of keys to the left and right of a query's position; -1 is unlimited, a right of 0 is causal.
Sees = tuple[int, int]

_BITS = 21  # of each field of a mask: number of the sequence, left + 2, right + 2
_FIELD = (1 << _BITS) - 1
_UNNAMED = (-2, -2)
_MASKING = "transformers.masking_utils"  # already loaded when a mask is requested


def key_mask(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    kv_offset: int = 0,
    local_size: int | None = None,
    **rest: Any,
) -> Tensor | None:
    """The mask of a forward pass, with the signature of transformers' `AttentionMaskInterface`.

    Args:
        batch_size: rows of the mask.
        kv_length: number of keys that the layers will get.
        mask_function: whether query i attends to key j, ``(batch, head, i, j) -> bool``.
        attention_mask: bool ``[B, tokens]``, false where a token is padding.
        kv_offset: position of the first key among the tokens.
        local_size: width of a window or chunk.
        rest: positions of the queries, ``q_length`` and ``q_offset``, or ``cache_position`` before 5.4; whether
            None may be returned, ``allow_is_causal_skip`` and ``allow_is_bidirectional_skip``; and more.

    Returns:
        None, or int64 ``[B, keys]``; see the docstring of this module.

    Raises:
        InvalidArgument: attention kernels do not support the mask.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        refuse("attention_mask", f"has shape {list(attention_mask.shape)}", "give a padding mask [B, tokens]")
    sees = _named(mask_function, local_size, kv_offset + kv_length)
    num_keys = kv_length if sees == (-1, -1) else _last_query(rest) - kv_offset
    if num_keys > kv_length:
        refuse("past_key_values", f"has {kv_length} keys for a query at position {num_keys}", ELSEWHERE)
    real = None if attention_mask is None else _of_keys(attention_mask, kv_offset, num_keys)
    if sees != _UNNAMED:
        skip = rest.get("allow_is_causal_skip" if sees[1] == 0 else "allow_is_bidirectional_skip", False)
        if not skip and rest.get("q_length", 1) > 1 and _models_may_want_whole_masks():
            refuse("attention_mask", "is needed as a full matrix: this model computes with it", ELSEWHERE)
        # Models disagree on the meaning of sliding_window in a layer that is not causal; only the mask is reliable.
        if skip and sees[1] <= 0 and num_keys == kv_length and (real is None or bool(real.all())):
            return None
    if real is None:
        real = torch.ones(batch_size, num_keys, dtype=torch.bool, device=_device(rest))
    if sees != _UNNAMED and (sees[0] < 0 or _without_holes(real)):
        return _encoded(real, sees)
    visible = sys.modules[_MASKING].sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        **(rest | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}),
    )
    return _read(visible[:, 0], real)


Places = tuple[Tensor, ...]  # rows of the batch and columns in them, int64 [T] each


@dataclass(frozen=True)
class Layout:
    """The positions of a mask's sequences, for a layer with a given number of queries per row.

    Attributes:
        sees: the range of keys of each query in its sequence.
        num_keys: number of keys that belong to sequences, from the first.
        queries: positions of the queries without padding; None if each row is one full sequence.
        keys: positions of the keys without padding, or None.
        cu_seqlens_q: int32 [num_seqs + 1], or None.
        cu_seqlens_k: int32 [num_seqs + 1], or None.
        max_seqlen_q: queries of the longest sequence, or None.
        max_seqlen_k: keys of the longest sequence, or None.
    """

    sees: Sees
    num_keys: int
    queries: Places | None = None
    keys: Places | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


def layout(mask: Tensor, batch: int, q_len: int) -> Layout:
    """The layout of a mask for a layer with q [batch, q_len, H, D].

    Raises:
        InvalidArgument: the mask is not one of `key_mask`.
    """
    if mask.ndim != 2 or mask.dtype != torch.int64 or mask.shape[0] != batch:
        what = f"is {str(mask.dtype)[6:]} {list(mask.shape)} where the layer gets it, which kernels do not take"
        refuse("attention_mask", what, f"give the model a padding mask [B, tokens]; for any other, {ELSEWHERE}")
    ids, sees = _decoded(mask)
    num_keys = ids.shape[1]
    if q_len > num_keys and sees != (-1, -1):
        refuse("attention_mask", f"is for {num_keys} keys", f"the layer has {q_len} queries among them")
    if bool((ids == 1).all()):
        return Layout(sees, num_keys)
    per_row = max(1, int(ids.max()))
    first_of_row = torch.arange(batch, device=ids.device)[:, None] * per_row
    keys = ids > 0
    if sees == (-1, -1) and per_row == 1:
        # Positions of queries do not matter here, and those of cross attention are not among the keys: run all.
        queries = torch.ones(batch, q_len, dtype=torch.bool, device=ids.device)
        sequence_of_query = first_of_row.expand(-1, q_len)
    else:
        queries = keys[:, num_keys - q_len :]
        sequence_of_query = (first_of_row + ids - 1)[:, num_keys - q_len :]
    cu_seqlens_q, max_seqlen_q = _offsets(sequence_of_query[queries], batch * per_row)
    cu_seqlens_k, max_seqlen_k = _offsets((first_of_row + ids - 1)[keys], batch * per_row)
    places = (queries.nonzero(as_tuple=True), keys.nonzero(as_tuple=True))
    return Layout(sees, num_keys, *places, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the argument of transformers."""
    raise InvalidArgument("kernelhub in transformers", parameter, problem, fix)


def _named(mask_function: Callable[..., Tensor], local_size: int | None, tokens: int) -> Sees:
    """The meaning of a mask function of transformers; `_UNNAMED` for any other function."""
    masking = sys.modules[_MASKING]
    if mask_function is masking.causal_mask_function:
        return (-1, 0)
    if mask_function is getattr(masking, "bidirectional_mask_function", None):
        return (-1, -1)
    if local_size is None:
        return _UNNAMED
    if _same(mask_function, masking.sliding_window_causal_mask_function(local_size)):
        return (local_size - 1, 0)
    two_sided = getattr(masking, "sliding_window_bidirectional_mask_function", None)
    if two_sided is not None and _same(mask_function, two_sided(local_size)):
        return (local_size, local_size)
    chunked = masking.chunked_causal_mask_function(local_size, torch.empty(0, dtype=torch.float32, device="cpu"))
    return (-1, 0) if tokens <= local_size and _same(mask_function, chunked) else _UNNAMED


def _models_may_want_whole_masks() -> bool:
    """Whether a mask that must not be None is a model's override; since 5.16; before that static caches had one."""
    return "allow_is_causal_skip" in inspect.signature(sys.modules[_MASKING].create_causal_mask).parameters


def _same(one: object, other: object) -> bool:
    """Whether two functions have the same code over the same numbers and functions; all tensors count as equal."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        cells = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (one, other)]
        return one.__code__ is other.__code__ and _same(*cells)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return (isinstance(one, Tensor) and isinstance(other, Tensor)) or (isinstance(one, int) and one == other)


def _last_query(rest: dict[str, Any]) -> Any:
    """One past the position of the last query among all tokens; a static cache has it on the device."""
    position = rest.get("cache_position")
    if position is not None:
        return int(position[-1]) + 1
    offset = rest["q_offset"]
    return (int(offset) if isinstance(offset, Tensor) else offset) + rest["q_length"]


def _device(rest: dict[str, Any]) -> Any:
    """The positions of the tokens."""
    position = rest.get("cache_position")
    return rest["device"] if position is None else position.device


def _of_keys(attention_mask: Tensor, kv_offset: int, num_keys: int) -> Tensor:
    """The columns of a padding mask that belong to the keys."""
    tokens = attention_mask.shape[1]
    if tokens == num_keys:  # of the keys already: `generate` requests a mask before the model does
        return attention_mask
    if tokens < kv_offset + num_keys:
        refuse("attention_mask", f"has {tokens} columns", f"give one for each of {kv_offset + num_keys} tokens")
    return attention_mask[:, kv_offset : kv_offset + num_keys]


def _without_holes(real: Tensor) -> bool:
    """Whether a row has no padding between its tokens, so that distances are the same as without padding."""
    begins = real.clone()
    begins[:, 1:] &= ~real[:, :-1]
    return bool((begins.sum(1) <= 1).all())


def _read(visible: Tensor, real: Tensor) -> Tensor:
    """The mask that is equivalent to `visible`, bool [B, queries, keys], where `real` [B, keys] are not padding.

    Keys that no query attends to are dropped. A sequence begins where a query does not attend to the previous key.
    """
    num_keys = real.shape[1]
    own = slice(num_keys - visible.shape[1], None)
    rows = real[:, own]
    beyond, visible = visible[:, :, num_keys:], visible[:, :, :num_keys] & rows[:, :, None]
    kept = visible.any(1)
    rank = kept.cumsum(1, dtype=torch.int32)
    distance = rank[:, own, None] - rank[:, None, :]
    begins = torch.zeros_like(kept)
    begins[:, own] = rows & (rank[:, own] > 1) & ~(visible & (distance == 1)).any(2)
    ids = (1 + begins.cumsum(1)) * kept
    together = (ids[:, own, None] == ids[:, None, :]) & kept[:, None, :] & rows[:, :, None]
    left = int(torch.where(visible, distance, 0).max())
    right = int(torch.where(visible, -distance, 0).max())
    shown = together & (distance <= left) & (-distance <= right)
    if bool(beyond.any()) or not torch.equal(kept[:, own], rows) or not torch.equal(shown, visible):
        refuse("attention_mask", "is not a combination of causality, a window, padding and packed sequences", ELSEWHERE)
    return _encoded(ids, (left, right))


def _encoded(ids: Tensor, sees: Sees) -> Tensor:
    """Sequence numbers [B, keys], packed with the range of a query."""
    num_keys = ids.shape[1]
    if num_keys > _FIELD - 2:
        refuse("attention_mask", f"has {num_keys} columns", f"there is room for {_FIELD - 2}")
    left, right = (-1 if side >= num_keys else side for side in sees)
    fields = (left + 2) << _BITS | (right + 2) << 2 * _BITS
    return torch.where(ids > 0, ids.long() | fields, 0)


def _decoded(mask: Tensor) -> tuple[Tensor, Sees]:
    """Sequence numbers, and the range of a query."""
    fields = int(mask.max()) >> _BITS if mask.numel() else 0
    if bool(((mask != 0) & ((mask >> _BITS != fields) | (fields == 0))).any()):
        refuse("attention_mask", "is not kernelhub's, or several of them joined", ELSEWHERE)
    return mask & _FIELD, ((fields & _FIELD) - 2, (fields >> _BITS) - 2) if fields else (-1, -1)


def _offsets(sequence_of_token: Tensor, num_seqs: int) -> tuple[Tensor, int]:
    """int32 [num_seqs + 1], where each sequence begins and ends, and the tokens of the longest."""
    lengths = torch.bincount(sequence_of_token, minlength=num_seqs)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32), int(lengths.max())
