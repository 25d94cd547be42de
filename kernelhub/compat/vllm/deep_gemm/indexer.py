"""DeepGEMM's logits of sparse attention's indexer, in its own formats (kernelhub's are `kernelhub.mqa_logits`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.compat.vllm.answer import answer, first_bad
from kernelhub.compat.vllm.deep_gemm.calls import deep_gemm
from kernelhub.compat.vllm.deep_gemm.support import has
from kernelhub.compat.vllm.here import capability, on_device
from kernelhub.ops.graph_memory import may_keep
from kernelhub.probes.finding import Finding

_ONE_FOUR_TIMES = 0x7F7F7F7F  # the UE8M0 byte of 1.0, four times
_ones: dict[torch.device, list[Tensor]] = {}  # older, smaller ones stay, since captured graphs read them


def get_paged_mqa_page_sizes() -> tuple[int, ...]:
    """Tokens per page that the paged logits support."""
    return (64,) if _family() == 12 else (32, 64)


@answer
def mqa_logits_use_mx_scales() -> Finding:
    """q and k have one scale for each 32 numbers, as on sm_100, where weights and logits are bf16."""
    return on_device("MX scales of the indexer", families=(10,))


def mqa_logits_mx_inputs(q: Tensor, q_scale: Tensor | None, weights: Tensor) -> tuple[Tensor | None, Tensor]:
    """Scales of q and weights in the format of sm_100; unchanged on other devices.

    If the scale of fp8 q is folded into the weights, which relu allows, the scales of q are ones.
    """
    if not mqa_logits_use_mx_scales():
        return q_scale, weights
    if q_scale is None:
        q_scale = _unit_scales(q.device, q.numel() // q.shape[-1]).view(q.shape[:-1])
    return q_scale, weights.to(torch.bfloat16)


def native_next_n_supported(next_n: int) -> bool:
    """Whether the paged logits support a number of queries per sequence: 1, 2 or 4 on Hopper, any on Blackwell."""
    return next_n in (1, 2, 4) if _family() == 9 else True


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    max_seqlen_k: int,
) -> Tensor:
    """Logits ``[M, max_seqlen_k]`` of contiguous keys; row i begins with key ``cu_seqlen_ks[i]``."""
    logits: Tensor = deep_gemm("fp8_fp4_mqa_logits")(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k)
    return logits


def fp8_mqa_logits(
    q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor
) -> Tensor:
    """The function for fp8 keys up to vLLM 0.14, ``[M, N]``."""
    logits: Tensor = deep_gemm("fp8_mqa_logits")(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke)
    return logits


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_size: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """The schedule of `fp8_fp4_paged_mqa_logits`; on Hopper, two multiprocessors share four queries."""
    queries = context_lens.shape[1] if context_lens.dim() == 2 else 1
    slots = num_sms // 2 if queries == 4 and _family() == 9 else num_sms
    plan: Tensor = deep_gemm("get_paged_mqa_logits_metadata")(context_lens, block_size, slots, **_if_given(indices))
    return plan


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: Tensor,
    max_model_len: int,
    indices: Tensor | None = None,
) -> Tensor:
    """Logits ``[B * next_n, max_model_len]`` of paged keys; values past a row's context are not cleared."""
    if block_tables.dim() >= 2 and block_tables.stride(-1) != 1:
        # DeepGEMM requires stride 1 also in a last dimension of size 1, which contiguous() would not change.
        block_tables = block_tables.clone(memory_format=torch.contiguous_format)
    logits: Tensor = deep_gemm("fp8_fp4_paged_mqa_logits")(
        q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, **_if_given(indices)
    )
    return logits


def fp8_paged_mqa_logits(
    q_fp8: Tensor,
    kv_cache_fp8: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: Tensor,
    max_model_len: int,
) -> Tensor:
    """The function for fp8 keys up to vLLM 0.14, every row cleared past its end."""
    logits: Tensor = deep_gemm("fp8_paged_mqa_logits")(
        q_fp8, kv_cache_fp8, weights, context_lens, block_tables, schedule_metadata, max_model_len, clean_logits=True
    )
    return logits


@answer
def has_deep_gemm_sparse_mqa() -> Finding:
    """DeepGEMM has logits of candidate blocks, which came with 2.8."""
    return first_bad(
        has("fp8_fp4_sparse_mqa_logits"),
        has("fp8_fp4_paged_sparse_mqa_logits"),
        has("get_sparse_mqa_logits_metadata"),
        has("get_paged_sparse_mqa_logits_metadata"),
    )


def get_sparse_mqa_logits_metadata(
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    num_kv_tokens: int,
    sparse_kv_block_indices: Tensor,
    qk_dtype: torch.dtype,
    sparse_block_kv: int,
) -> Tensor:
    """The schedule of `fp8_fp4_sparse_mqa_logits`; rows may begin anywhere in a block."""
    plan: Tensor = deep_gemm("get_sparse_mqa_logits_metadata")(
        cu_seqlen_ks,
        cu_seqlen_ke,
        num_kv_tokens,
        sparse_kv_block_indices,
        qk_dtype,
        sparse_block_kv,
        use_unaligned_ks=True,
    )
    return plan


def get_paged_sparse_mqa_logits_metadata(
    context_lens: Tensor,
    block_table: Tensor,
    indices: Tensor,
    page_kv: int,
    sparse_kv_block_indices: Tensor,
    qk_dtype: torch.dtype,
    sparse_block_kv: int,
) -> Tensor:
    """The schedule of `fp8_fp4_paged_sparse_mqa_logits`."""
    plan: Tensor = deep_gemm("get_paged_sparse_mqa_logits_metadata")(
        context_lens, block_table, indices, page_kv, sparse_kv_block_indices, qk_dtype, sparse_block_kv
    )
    return plan


def fp8_fp4_sparse_mqa_logits(
    q: tuple[Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    metadata: Tensor,
    num_max_sparse_blocks: int,
    sparse_block_kv: int,
) -> Tensor:
    """Logits ``[M, num_max_sparse_blocks * sparse_block_kv]`` of each row's candidate blocks of contiguous keys."""
    logits: Tensor = deep_gemm("fp8_fp4_sparse_mqa_logits")(
        q, kv, weights, metadata, num_max_sparse_blocks, sparse_block_kv, use_unaligned_ks=True
    )
    return logits


def fp8_fp4_paged_sparse_mqa_logits(
    q: tuple[Tensor, Tensor],
    kv_cache: Tensor,
    weights: Tensor,
    metadata: Tensor,
    num_max_sparse_blocks: int,
    sparse_block_kv: int,
) -> Tensor:
    """Logits of each row's candidate blocks of paged keys."""
    logits: Tensor = deep_gemm("fp8_fp4_paged_sparse_mqa_logits")(
        q, kv_cache, weights, metadata, num_max_sparse_blocks, sparse_block_kv
    )
    return logits


def _family() -> int:
    """Major version of the device's compute capability; 0 without one."""
    sm = capability()
    return 0 if sm is None else sm[0]


def _if_given(indices: Tensor | None) -> dict[str, Any]:
    """The parameter only if it is used: older releases do not have it."""
    return {} if indices is None else {"indices": indices}


def _unit_scales(device: torch.device, count: int) -> Tensor:
    buffers = _ones.setdefault(device, [])
    if not buffers or buffers[-1].numel() < count:
        size = max(count, 2 * buffers[-1].numel()) if buffers else count
        made = torch.full((size,), _ONE_FOUR_TIMES, dtype=torch.int32, device=device)
        if not may_keep(made):
            return made[:count]
        buffers.append(made)
    return buffers[-1][:count]
