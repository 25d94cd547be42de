"""FlashInfer's products of torch on a CPU, which read memory where the kernels read it, whatever shapes say."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.backends.fake.addresses import check_small

E4M3 = torch.float8_e4m3fn


def read(tensor: Tensor, *shape: int) -> Tensor:
    """The memory behind a pointer as that many elements, one after the other."""
    assert tensor.data_ptr() % 16 == 0, "16 bytes"
    return tensor.as_strided(shape, [torch.Size(shape[i + 1 :]).numel() for i in range(len(shape))])


def in_blocks(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """a_scale [M, K / 128], b_scale [N / 128, K / 128]."""
    n, k = b.shape
    wide_a = a_scale.repeat_interleave(128, 1)[:, :k]
    wide_b = b_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return (a.float() * wide_a) @ (b.float() * wide_b).t()


def check_matrices(a: Tensor, b: Tensor, out: Tensor) -> None:
    for tensor in (a, b, out):
        assert tensor.is_contiguous(), "pointers are read"
        assert tensor.data_ptr() % 16 == 0, "16 bytes"
    assert a.dtype is b.dtype is E4M3
    assert out.shape == (a.shape[0], b.shape[0])


def fp8_blockscale_gemm_sm90(input, weight, input_scale=None, weight_scale=None, out=None, out_dtype=None):
    check_matrices(input, weight, out)
    (m, k), n = input.shape, weight.shape[0]
    assert k % 128 == 0
    assert n % 64 == 0
    assert out.dtype is out_dtype is torch.bfloat16, "whatever it is, bfloat16 is written"
    assert input_scale.dtype is weight_scale.dtype is torch.float32
    assert weight_scale.shape == (-(-n // 128), k // 128)
    fours = -(-m // 4) * 4
    scales = read(input_scale, k // 128, fours)[:, :m].t()
    out.copy_(in_blocks(input, weight, scales, read(weight_scale, *weight_scale.shape)))
    return out


def gemm_fp8_nt_groupwise(
    a, b, a_scale, b_scale, scale_major_mode=None, mma_sm=1, scale_granularity_mnk=(1, 128, 128), out=None,
    out_dtype=None, backend="cutlass",
):  # fmt: skip
    check_matrices(a, b, out)
    (m, k), n = a.shape, b.shape[0]
    assert m % 4 == 0
    assert n % 128 == k % 128 == 0
    assert (mma_sm, scale_granularity_mnk, out_dtype) == (1, (1, 128, 128), out.dtype)
    assert a_scale.dtype is b_scale.dtype is torch.float32
    if backend == "cutlass":
        assert scale_major_mode == "K"
        assert a_scale.shape == (m, k // 128)
        scales = read(a_scale, m, k // 128)
    else:
        assert (backend, scale_major_mode, out.dtype) == ("trtllm", None, torch.bfloat16)
        assert k >= 256
        scales = read(a_scale, k // 128, m).t()
    out.copy_(in_blocks(a, b, scales, read(b_scale, n // 128, k // 128)))
    return out


def fp8_gemm_sm100(a, b, scale_a, scale_b, out, workspace_buffer, runner_names) -> None:
    assert runner_names in (["cublas"], ["cudnn"], ["cutlass_sm10x"]), "one of its runners, by name"
    assert a.is_contiguous()
    assert b.transpose(1, 2).is_contiguous(), "K runs fastest"
    assert out.is_contiguous()
    assert all(size % 16 == 0 for size in b.shape[1:])
    assert scale_a.numel() == scale_b.numel() == 1
    assert scale_a.dtype is scale_b.dtype is torch.float32
    check_small(scale_a, scale_b)
    assert out.dtype in (torch.bfloat16, torch.float16)
    assert workspace_buffer.numel() == 32 << 20
    out.copy_((a.float() @ b.float()) * scale_a * scale_b)


def mm_fp4(
    a, b, a_descale, b_descale, alpha=None, out_dtype=torch.bfloat16, out=None, block_size=16,
    use_8x4_sf_layout=False, backend="auto", use_nvfp4=True,
):  # fmt: skip
    weight, scale = b.t(), b_descale.t()
    for tensor in (a, weight, a_descale, scale, out):
        assert tensor.is_contiguous(), "CHECK_INPUT"
        assert tensor.data_ptr() % 16 == 0, "16 bytes"
    assert a.dtype is b.dtype is a_descale.dtype is b_descale.dtype is torch.uint8
    assert (block_size, use_8x4_sf_layout, out.dtype) == (16 if use_nvfp4 else 32, False, out_dtype)
    assert backend in ("cutlass", "trtllm", "cudnn")
    assert use_nvfp4 or backend == "cudnn"
    if use_nvfp4:
        assert alpha.shape == (1,)
        check_small(alpha)
        assert alpha.dtype is torch.float32
    else:
        assert alpha is None
    (m, half), n = a.shape, weight.shape[0]
    assert n % 128 == 2 * half % 128 == 0
    left, right = (in_floats(codes, at, block_size) for codes, at in ((a, a_descale), (weight, scale)))
    if backend == "trtllm":
        assert out_dtype is torch.bfloat16
        assert 2 * half % 256 == 0
        right = right[row_indices(n).argsort()]
    assert out.shape == (m, n)
    out.copy_((left @ right.t()) * (1 if alpha is None else alpha))
    return out


def row_indices(rows: int) -> Tensor:
    """Which row of the weight lies where, as `get_shuffle_matrix_a_row_indices` tells for tiles of 128."""
    blocks = torch.arange(rows).view(-1, 32)
    return torch.cat([block[[i * 4 + j for j in range(4) for i in range(8)]] for block in blocks])


def in_floats(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """What codes and scales mean."""
    factors = at_their_places(scale, codes.shape[0], codes.shape[1] * 2 // group)
    factors = factors.view(E4M3 if group == 16 else torch.float8_e8m0fnu).float()
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack([codes & 15, codes >> 4], 2).flatten(1).long()
    values = table[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
    return values * factors.repeat_interleave(group, 1)


def at_their_places(scale: Tensor, rows: int, groups: int) -> Tensor:
    """Scales as bytes [rows, groups], each looked up by the address that the library's layout gives it."""
    wide = -(-groups // 4)
    row, group = torch.arange(rows)[:, None], torch.arange(groups)[None]
    tile = (row // 128) * wide + group // 4
    places = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4
    assert scale.numel() == -(-rows // 128) * wide * 512
    return read(scale, scale.numel())[places]


def mm_mxfp8(a, b, a_descale, b_descale, out=None, out_dtype=torch.bfloat16, use_8x4_sf_layout=False, backend="auto"):
    weight = b.t()
    check_matrices(a, weight, out)
    n, k = weight.shape
    assert n >= 128
    assert k >= 128
    assert (use_8x4_sf_layout, out.dtype) == (False, out_dtype)
    assert backend in ("cutlass", "cudnn")
    operands = []
    for codes, scale in ((a, a_descale), (weight, b_descale)):
        assert scale.dtype is torch.uint8
        assert scale.ndim == 1, "two dimensions are another layout"
        factors = at_their_places(scale, codes.shape[0], k // 32).view(torch.float8_e8m0fnu).float()
        operands.append(codes.float() * factors.repeat_interleave(32, 1))
    out.copy_(operands[0] @ operands[1].t())
    return out


FUNCTIONS = (mm_fp4, mm_mxfp8, fp8_blockscale_gemm_sm90, gemm_fp8_nt_groupwise, fp8_gemm_sm100)
