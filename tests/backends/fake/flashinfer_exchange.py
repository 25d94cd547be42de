"""TensorRT-LLM's one-sided exchange of tokens on a CPU, by the protocol of its kernels; ranks are threads.

Tokens take their places in any order, as by atomics. Flags are compared for equality, so that a rank that stores again
before the others have looked makes them wait forever. Nothing is cleared between calls.
"""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.backends.fake.flashinfer_comm import wait

_MOST_CHOICES = 22
_NAMES = (
    "FLAG_VAL",
    "LOCAL_TOKEN_COUNTER",
    "SEND_COUNTERS",
    "RECV_COUNTERS",
    "DISPATCH_COMPLETION_FLAGS",
    "COMBINE_COMPLETION_FLAGS",
    "TOPK_TARGET_RANKS",
    "TOPK_SEND_INDICES",
    "EPLB_GATHERED_STATS",
    "PAYLOAD_DATA",
)
_chosen = random.Random(0)
_guard = threading.Lock()


def _up(size: int) -> int:
    return -(-size // 128) * 128


def _offsets(ep_size: int, max_num_tokens: int) -> list[int]:
    choices = 4 * max_num_tokens * _MOST_CHOICES
    flags = _up(8 + 8 * ep_size)
    ranks = flags + 2 * 128
    indices = _up(ranks + choices)
    end = _up(indices + choices)
    return [0, 4, 8, 8 + 4 * ep_size, flags, flags + 128, ranks, indices, end, end]


def _module_pairs() -> tuple[list[str], list[int]]:
    names = [f"MOE_A2A_{name}_OFFSET_INDEX" for name in _NAMES]
    return [*names, "MOE_A2A_NUM_METAINFO_FIELDS"], [*range(len(_NAMES)), len(_NAMES)]


def get_moe_alltoall_module() -> Any:
    return SimpleNamespace(
        moe_a2a_get_metainfo_index_pairs=_module_pairs,
        moe_a2a_get_aux_data_size=lambda ep_size, max_num_tokens: _offsets(ep_size, max_num_tokens)[-1],
    )


def moe_a2a_initialize(
    workspace: Tensor, ep_rank: int, ep_size: int, max_num_tokens: int, eplb_stats_num_experts: int = 0
) -> Tensor:
    assert workspace.dtype is torch.uint8
    assert workspace.shape[0] == ep_size
    workspace[ep_rank].zero_()
    return torch.tensor(_offsets(ep_size, max_num_tokens))


def _ints(workspace: Tensor, rank: int, metainfo: Tensor, part: str, count: int) -> Tensor:
    begin = int(metainfo[_NAMES.index(part)])
    return workspace[rank, begin : begin + 4 * count].view(torch.int32)


def _next_flag(workspace: Tensor, metainfo: Tensor, ep_rank: int) -> int:
    flag = _ints(workspace, ep_rank, metainfo, "FLAG_VAL", 1)
    flag += 1
    return int(flag)


def _meet(workspace: Tensor, metainfo: Tensor, ep_rank: int, flag: int, part: str) -> None:
    size = workspace.shape[0]
    for rank in range(size):
        _ints(workspace, rank, metainfo, part, size)[ep_rank] = flag
    mine = _ints(workspace, ep_rank, metainfo, part, size)
    wait(lambda: bool((mine == flag).all()))


def _check_kernel_operand(tensor: Tensor) -> None:
    assert tensor.is_contiguous()
    width = tensor.shape[-1] * tensor.itemsize
    vector = next(size for size in (16, 8, 4, 2, 1) if width % size == 0)
    assert tensor.data_ptr() % vector == 0, "a thread loads a vector"


def moe_a2a_dispatch(
    token_selected_experts: Tensor,
    input_payloads: list[Tensor],
    workspace: Tensor,
    metainfo: Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
    enable_pdl: bool | None = None,
    eplb_local_stats: Tensor | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: Tensor | None = None,
) -> tuple[list[Tensor], int, None]:
    most, tokens = runtime_max_tokens_per_rank, len(token_selected_experts)
    assert enable_pdl is False
    assert token_selected_experts.dtype is torch.int32
    assert token_selected_experts.shape == (tokens, top_k)
    assert top_k in (1, 2, 4, 8), "the kernels of all releases"
    assert bool(((token_selected_experts >= 0) & (token_selected_experts < num_experts)).all())
    assert tokens <= most
    assert len(input_payloads) <= 6
    places, end = [], int(metainfo[-1])
    for payload in input_payloads:
        assert payload.ndim == 2
        assert len(payload) == tokens
        _check_kernel_operand(payload)
        width = payload.shape[1] * payload.itemsize
        assert end % next(size for size in (16, 8, 4, 2, 1) if width % size == 0) == 0, "a vector is stored"
        places.append((end, width))
        end += ep_size * most * width
    assert end <= workspace.shape[1], "the workspace is too small"
    flag = _next_flag(workspace, metainfo, ep_rank)
    ranks = token_selected_experts // (num_experts // ep_size)
    sent = [0] * ep_size
    with _guard:
        order = _chosen.sample(range(tokens), tokens)
    for token in order:
        for rank in dict.fromkeys(ranks[token].tolist()):
            for payload, (begin, width) in zip(input_payloads, places, strict=True):
                at = begin + (ep_rank * most + sent[rank]) * width
                workspace[rank, at : at + width] = payload[token].view(torch.uint8)
            sent[rank] += 1
    for rank in range(ep_size):
        _ints(workspace, rank, metainfo, "RECV_COUNTERS", ep_size)[ep_rank] = sent[rank]
    _meet(workspace, metainfo, ep_rank, flag, "DISPATCH_COMPLETION_FLAGS")
    came = [
        workspace[ep_rank, begin : begin + ep_size * most * width].view(payload.dtype).view(ep_size, most, -1)
        for payload, (begin, width) in zip(input_payloads, places, strict=True)
    ]
    return came, _up(end), None


def moe_a2a_combine(
    payload: Tensor,
    local_num_tokens: int,
    workspace: Tensor,
    metainfo: Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool = False,
    output_dtype: Any = None,
    output_scales: Any = None,
    output_scalar_scale: float = 1.0,
    sf_layout: Any = None,
    output: Tensor | None = None,
    *,
    use_low_precision: bool = False,
    enable_pdl: bool | None = None,
) -> Tensor:
    most = runtime_max_tokens_per_rank
    assert enable_pdl is False
    assert payload_in_workspace
    assert payload.shape[:2] == (ep_size, most)
    assert payload.data_ptr() == workspace[ep_rank, combine_payload_offset:].data_ptr()
    assert combine_payload_offset + payload.nbytes <= workspace.shape[1], "the workspace is too small"
    assert top_k in (1, 2, 4, 8)
    flag = _next_flag(workspace, metainfo, ep_rank)
    _meet(workspace, metainfo, ep_rank, flag, "COMBINE_COMPLETION_FLAGS")
    targets, indices = (
        _ints(workspace, ep_rank, metainfo, part, local_num_tokens * top_k).view(-1, top_k)
        for part in ("TOPK_TARGET_RANKS", "TOPK_SEND_INDICES")
    )
    columns = payload.shape[2]
    out = payload.new_empty((local_num_tokens, columns)) if output is None else output
    assert out.is_contiguous()
    assert out.shape == (local_num_tokens, columns)
    sums = [
        workspace[rank, combine_payload_offset : combine_payload_offset + payload.nbytes].view(payload.dtype)
        for rank in range(ep_size)
    ]
    for token in range(local_num_tokens):
        parts = torch.zeros(top_k, columns)
        for choice in range(top_k):
            index = int(indices[token, choice])
            if index >= 0:
                at = (ep_rank * most + index) * columns
                parts[choice] = sums[int(targets[token, choice])][at : at + columns]
        while len(parts) > 1:  # neighbours
            parts = parts[::2] + parts[1::2]
        out[token] = parts[0]
    return out


def pack_strided_memory(
    ptr: int, segment_size: int, segment_stride: int, num_segments: int, dtype: torch.dtype, dev_id: int
) -> Tensor:
    return PACKED[ptr, segment_size, segment_stride, num_segments, dtype, dev_id]


PACKED: dict[Any, Tensor] = {}  # what tests expect
FUNCTIONS = (get_moe_alltoall_module, moe_a2a_initialize, moe_a2a_dispatch, moe_a2a_combine)
