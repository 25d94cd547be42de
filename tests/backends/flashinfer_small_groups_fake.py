"""FlashInfer's grouped products of NVFP4, MXFP4 and MXFP8 of torch on a CPU, which look where the kernels look."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.ops.formats import from_e2m1, from_e8m0

TILE = 128


def by_place(flat: Tensor, start: int, rows: int, columns: int) -> Tensor:
    """Scales of rows whose tiles begin `start` bytes on, each looked up where a tensor core fetches it."""
    wide = -(-columns // 4)
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None]
    tile = (row // TILE) * wide + column // 4
    return flat[start + tile * 512 + row % 32 * 16 + row % TILE // 32 * 4 + column % 4]


def factors(raw: Tensor, span: int) -> Tensor:
    """Bytes of scales as float64, of NVFP4 where they are for 16 columns."""
    values = raw.view(torch.float8_e4m3fn).double() if span == 16 else from_e8m0(raw).double()
    return values.repeat_interleave(span, 1)


def values(codes: Tensor, raw: Tensor, span: int) -> Tensor:
    plain = codes.double() if codes.dtype is torch.float8_e4m3fn else from_e2m1(codes).double()
    return plain * factors(raw, span)


def _tiled(a, b, a_scale, b_scale, m_indptr, alpha, out, out_dtype, span):
    groups, n, half = b.shape
    k = 2 * half
    for tensor in (a, b, a_scale, b_scale, out):
        assert tensor.is_contiguous(), "addresses are read"
        assert tensor.data_ptr() % 16 == 0, "16 bytes"
    assert b.dtype is a_scale.dtype is b_scale.dtype is torch.uint8
    assert m_indptr.dtype is torch.int32
    assert m_indptr.shape == (groups + 1,)
    assert n % 8 == k % 128 == 0
    assert out.dtype is out_dtype
    assert out_dtype in (torch.bfloat16, torch.float16)
    assert out.shape == (a.shape[0], n)
    high, wide = -(-n // TILE) * TILE, -(-(k // span) // 4) * 4
    assert b_scale.shape == (groups, high, wide)
    bounds = m_indptr.tolist()
    assert bounds[0] == 0
    assert all(bound % 4 == 0 for bound in bounds), "groups begin at multiples of 4"
    assert bounds == sorted(bounds)
    assert bounds[-1] <= a.shape[0]
    out.fill_(torch.nan)
    of_rows, of_weights = a_scale.flatten(), b_scale.flatten()
    for group in range(groups):
        first, last = bounds[group], bounds[group + 1]
        tile = (first + group * (TILE - 1)) // TILE * TILE
        if first == last:
            continue
        left = values(a[first:last], by_place(of_rows, tile * wide, last - first, k // span), span)
        right = values(b[group], by_place(of_weights, group * high * wide, n, k // span), span)
        out[first:last] = (left @ right.t() * (1.0 if alpha is None else float(alpha[group]))).to(out_dtype)
    return out


def group_gemm_nvfp4_nt_groupwise(
    a, b, a_scale, b_scale, m_indptr, alpha=None, tile_m=128, tile_n=128, tile_k=128, swap_ab=True, out=None,
    out_dtype=None,
):  # fmt: skip
    assert a.dtype is torch.uint8
    assert a.shape[1] == b.shape[2]
    assert alpha.dtype is torch.float32
    assert alpha.shape == (b.shape[0],)
    return _tiled(a, b, a_scale, b_scale, m_indptr, alpha, out, out_dtype, 16)


def group_gemm_mxfp8_mxfp4_nt_groupwise(
    a, b, a_scale, b_scale, m_indptr, mma_sm=1, tile_m=128, tile_n=128, tile_k=128, swap_ab=True, out=None,
    out_dtype=None,
):  # fmt: skip
    assert a.dtype is torch.float8_e4m3fn
    assert a.shape[1] == 2 * b.shape[2]
    return _tiled(a, b, a_scale, b_scale, m_indptr, None, out, out_dtype, 32)


def grouped_gemm_nt_masked(
    lhs, rhs, out, masked_m, *, ab_dtype, sf_dtype, c_dtype, sf_vec_size, topk_weights=None, idx_src_info=None,
    rank_src_info=None, out_ptrs=None, num_ranks=0, dst_signals=None, sm_count=None, barrier_flag_local=None,
    barrier_flag_multicast=None, is_combine_fusion=False, is_swap_ab=False, **kwargs,
):  # fmt: skip
    alpha, alpha_dtype = kwargs.pop("alpha", None), kwargs.pop("alpha_dtype", None)
    assert not kwargs
    assert out.permute(2, 0, 1).is_contiguous(), "the library looks at this"
    assert out.dtype is getattr(torch, c_dtype)
    assert (ab_dtype, sf_dtype, sf_vec_size) in (
        ("float4_e2m1fn", "float8_e4m3fn", 16),
        ("float4_e2m1fn", "float8_e8m0fnu", 32),
        ("float8_e4m3fn", "float8_e8m0fnu", 32),
    )
    (a, a_scale), (b, b_scale) = ((codes.permute(2, 0, 1), scales) for codes, scales in (lhs, rhs))
    groups, room, columns = a.shape
    n, k = b.shape[1], columns * (2 if ab_dtype == "float4_e2m1fn" else 1)
    assert n % 8 == k % 32 == 0
    if alpha is not None:
        assert alpha_dtype == "float32"
        assert alpha.dtype is torch.float32
        assert alpha.shape == (groups,)
    assert masked_m.dtype is torch.int32
    assert masked_m.shape == (groups,)
    flat = []
    for codes, scales, rows in ((a, a_scale, room), (b, b_scale, n)):
        assert codes.is_contiguous(), "addresses are read"
        assert codes.data_ptr() % 16 == 0
        high, wide = -(-rows // TILE), -(-(k // sf_vec_size) // 4)
        assert scales.shape == (32, 4, high, 4, wide, groups)
        raw = scales.permute(5, 2, 4, 0, 1, 3)
        assert raw.is_contiguous(), "addresses are read"
        flat.append((raw.view(torch.uint8).flatten(), high * wide * 512))
    made = out.permute(2, 0, 1)
    for group, size in enumerate(masked_m.tolist()):
        assert 0 <= size <= room
        tiles = min(-(-size // TILE) * TILE, room)  # stored whole, whatever the rows behind the group's hold
        left = values(a[group, :tiles], _scales(flat[0], group, tiles, k, sf_vec_size), sf_vec_size)
        right = values(b[group], _scales(flat[1], group, n, k, sf_vec_size), sf_vec_size)
        made[group, :tiles] = (left @ right.t() * (1.0 if alpha is None else float(alpha[group]))).to(out.dtype)
    return out


def _scales(of: tuple[Tensor, int], group: int, rows: int, k: int, span: int) -> Tensor:
    flat, apart = of
    return by_place(flat, group * apart, rows, k // span)


FUNCTIONS = (group_gemm_nvfp4_nt_groupwise, group_gemm_mxfp8_mxfp4_nt_groupwise)
MASKED = (grouped_gemm_nt_masked,)
