"""DeepGEMM in plain torch, as it documents itself: what it asserts of operands is asserted, what it leaves open is not.

Not imported from here: `tests.backends.deep_gemm_copies` puts it into a folder of the library's name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.backends.fake.addresses import check_small

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ALIGNMENT = 128
SMS = 132


def fp8_gemm_nt(a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False) -> None:
    assert c is None
    assert recipe is None
    _row_major(d, BF16)
    m, k = a[0].shape
    n, _ = b[0].shape
    assert d.shape == (m, n)
    _fits(n, k)
    d.copy_(_of_rows(a) @ _of_blocks(b).t())


def m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
    weights = _of_blocks(b)
    _fits(*weights.shape[1:])
    _contiguous(_of_rows(a), weights, d, m_indices)


def m_grouped_bf16_gemm_nt_contiguous(a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False) -> None:
    assert not use_psum_layout
    _row_major(a, BF16)
    _row_major(b, BF16)
    _contiguous(a.double(), b.double(), d, grouped_layout)


def _contiguous(rows: Tensor, weights: Tensor, d: Tensor, m_indices: Tensor) -> None:
    """Blocks of one group each, those of -1 skipped."""
    _row_major(d, BF16)
    assert m_indices.dtype is torch.int32
    assert m_indices.shape == rows.shape[:1]
    check_small(m_indices)
    for start in range(0, rows.shape[0], ALIGNMENT):
        block = slice(start, start + ALIGNMENT)
        group = int(m_indices[start])
        assert (m_indices[block] == group).all()
        assert len(m_indices[block]) == ALIGNMENT
        d[block] = torch.nan if group < 0 else rows[block] @ weights[group].t()


def m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, expected_m, recipe=None, compiled_dims="nk") -> None:
    _masked(_of_rows(a), _of_blocks(b), d, masked_m, expected_m)


fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked


def m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m, compiled_dims="nk") -> None:
    _row_major(a, BF16)
    _row_major(b, BF16)
    _masked(a.double(), b.double(), d, masked_m, expected_m)


def get_mk_alignment_for_contiguous_layout() -> int:
    return ALIGNMENT


def get_num_sms() -> int:
    return SMS


def fp8_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0) -> Tensor:
    k, scale = kv
    _row_major(q, FP8)
    _row_major(k, FP8)
    _indexer(q)
    for tensor, dtype in ((scale, torch.float32), (cu_seq_len_k_start, torch.int32), (cu_seq_len_k_end, torch.int32)):
        assert tensor.dtype is dtype
        check_small(tensor)
    assert weights.stride(1) == 1
    keys = k.shape[0]
    made = torch.full((q.shape[0], -(-keys // 256) * 256 + 256), torch.nan)[:, :keys]
    assert not made.is_contiguous() or q.shape[0] == 1
    assert ((cu_seq_len_k_start >= 0) & (cu_seq_len_k_end <= keys) & (cu_seq_len_k_start <= cu_seq_len_k_end)).all()
    made[:] = _scores(q, k, weights) * scale
    if clean_logits:
        key = torch.arange(keys)
        made[(key < cu_seq_len_k_start[:, None]) | (key >= cu_seq_len_k_end[:, None])] = -torch.inf
    return made


def fp8_fp4_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True) -> Tensor:
    raise AssertionError("by this name releases from 2.4.2 on are told; nothing calls it")


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None) -> Tensor:
    assert block_kv == 64
    assert num_sms == SMS
    return torch.stack([context_lens.sum().expand(num_sms + 1), torch.arange(num_sms + 1)], 1).int()


def fp8_paged_mqa_logits(
    q,
    fused_kv_cache,
    weights,
    context_lens,
    block_table,
    schedule_meta,
    max_context_len,
    clean_logits=False,
    indices=None,
) -> Tensor:
    batch, next_n, _, width = q.shape
    pages, page, one, row = fused_kv_cache.shape
    assert indices is None
    assert not clean_logits, "it takes no 2-D lengths then"
    assert next_n in (1, 2)
    assert (page, one, row) == (64, 1, width + 4)
    assert fused_kv_cache.dtype is torch.uint8
    assert fused_kv_cache.stride()[1:] == (row, row, 1)
    assert fused_kv_cache.stride(0) % 4 == 0
    _row_major(q, FP8)
    _indexer(q)
    assert context_lens.shape == (batch, next_n)
    check_small(context_lens, block_table)
    assert context_lens.dtype is block_table.dtype is torch.int32
    assert block_table.stride(1) == 1
    assert schedule_meta.shape == (SMS + 1, 2)
    assert int(schedule_meta[0, 0]) == int(context_lens.sum())
    assert weights.shape == (batch * next_n, q.shape[2])
    assert weights.stride(1) == 1
    made = torch.full((batch * next_n, -(-max_context_len // 256) * 256 + 256), torch.nan)[:, :max_context_len]
    for sequence in range(batch):
        length = int(context_lens[sequence, -1])
        assert 1 <= length <= max_context_len
        table = block_table[sequence, : -(-length // page)].long()
        assert (table < pages).all()
        used = fused_kv_cache[table].flatten(1)
        k = used[:, : page * width].reshape(-1, width).view(FP8)
        scale = used[:, page * width :].contiguous().view(torch.float32).flatten()
        rows = slice(sequence * next_n, (sequence + 1) * next_n)
        scored = (_scores(q[sequence], k, weights[rows]) * scale)[:, :max_context_len]
        made[rows, : scored.shape[1]] = scored.float()
    return made


def _masked(rows: Tensor, weights: Tensor, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
    """Tiles are stored whole, into one matrix of all groups' rows."""
    _row_major(d, BF16)
    groups, room, _ = rows.shape
    assert expected_m > 0
    assert masked_m.dtype is torch.int32
    assert masked_m.shape == (groups,)
    check_small(masked_m)
    flat = d.view(groups * room, -1)
    for group, size in enumerate(masked_m.tolist()):
        assert size <= room
        for start in range(0, size, ALIGNMENT):
            place = slice(group * room + start, group * room + start + ALIGNMENT)
            tile = torch.full_like(flat[place], torch.nan)
            there = rows[group, start : start + ALIGNMENT] @ weights[group].t()
            tile[: len(there)] = there
            flat[place] = tile


def _scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("th,ths->ts", weights.double(), (q.double() @ k.double().t()).relu())


def _indexer(q: Tensor) -> None:
    assert q.shape[-2] in (32, 64)
    assert q.shape[-1] in (32, 64, 128)


def _of_rows(pair: tuple[Tensor, Tensor]) -> Tensor:
    codes, scale = pair
    _row_major(codes, FP8)
    values = _column_major(scale, codes.shape)
    return codes.double() * values.repeat_interleave(128, -1)


def _of_blocks(pair: tuple[Tensor, Tensor]) -> Tensor:
    codes, scale = pair
    _row_major(codes, FP8)
    *lead, n, k = codes.shape
    if scale.dtype is torch.int32:
        return codes.double() * _column_major(scale, codes.shape).repeat_interleave(128, -1)
    _row_major(scale, torch.float32)
    assert scale.shape == (*lead, -(-n // 128), k // 128)
    return codes.double() * scale.repeat_interleave(128, -2)[..., :n, :].repeat_interleave(128, -1)


def _column_major(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A scale for each row and 128 columns, out of float32 or of exponents, four in an int32."""
    *lead, rows, k = shape
    apart, words = -(-rows // 4) * 4, k // 128 if scale.dtype is torch.float32 else -(-k // 512)
    assert scale.dtype in (torch.float32, torch.int32)
    assert scale.shape == (*lead, rows, words)
    assert scale.stride()[-2:] == (1, apart)
    assert scale.ndim == 2 or scale.stride(0) == apart * words
    assert scale.data_ptr() % 16 == 0
    if scale.dtype is torch.float32:
        return scale.double()
    exponents = torch.stack([(scale >> 8 * place) & 0xFF for place in range(4)], -1).flatten(-2)
    assert (exponents[..., k // 128 :] == 0).all()
    return torch.exp2(exponents[..., : k // 128].double() - 127)


def _row_major(matrix: Tensor, dtype: torch.dtype) -> None:
    assert matrix.dtype is dtype
    assert matrix.data_ptr() % 16 == 0
    apart = 1
    for size, stride in zip(reversed(matrix.shape), reversed(matrix.stride()), strict=True):
        assert stride == apart, f"{matrix.shape} with strides {matrix.stride()}"
        apart *= size


def _fits(n: int, k: int) -> None:
    assert n % 64 == 0
    assert k % 128 == 0
