"""FlashInfer's quantisers and its dequantiser of torch on a CPU, with their checks and their losses.

Its arithmetic is that of the sources of 0.6.18.post1, on a machine whose reciprocals are rounded as well as can be.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from kernelhub.ops.formats import from_e8m0, to_e2m1, to_e4m3, to_e8m0_up
from tests.backends.fake.addresses import check_small
from tests.backends.flashinfer_products_fake import E4M3

LARGEST_LAUNCH = (1 << 31) - 1
LAUNCHES: list[tuple[int, ...]] = []


def nvfp4_kv_dequant(fp4_data: Tensor, block_scales: Tensor, global_scale: Tensor, output: Tensor) -> None:
    for tensor in (fp4_data, block_scales, output):
        assert tensor.ndim == 2
        assert tensor.is_contiguous(), "CHECK_INPUT"
    assert fp4_data.dtype is torch.uint8
    check_small(global_scale)
    assert output.data_ptr() % 4 == fp4_data.data_ptr() % 2 == 0, "pairs are stored, and pairs of pairs loaded"
    assert output.dtype in (torch.float16, torch.bfloat16)
    rows, k = output.shape
    assert fp4_data.shape == (rows, k // 2)
    assert block_scales.shape == (rows, k // 16)
    assert k // 16 + 4 <= 48 << 10, "dynamic shared memory; a launch with more does not run, and says nothing"
    assert rows * k <= LARGEST_LAUNCH, "int"
    LAUNCHES.append(tuple(output.shape))
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack([fp4_data & 15, fp4_data >> 4], 2).flatten(1).long()
    values = table[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
    scales = block_scales.view(E4M3).float().repeat_interleave(16, 1)
    output.copy_(flushed(flushed(values * scales) * flushed(global_scale)))


def flushed(values: Tensor) -> Tensor:
    """With ``-use_fast_math`` what is below 2^-126 is 0."""
    return torch.where(values.abs() < 2.0**-126, values * 0, values)


def get_fp4_kv_dequantization_module() -> SimpleNamespace:
    return SimpleNamespace(nvfp4_kv_dequant=nvfp4_kv_dequant)


def reciprocal(values: Tensor) -> Tensor:
    """As ``rcp.approx.ftz``, were it exact."""
    return flushed(1 / flushed(values))


def largest_of(groups: Tensor) -> Tensor:
    """Of each group, NaN being dropped unless there is nothing else."""
    sizes = groups.abs()
    return torch.where(sizes.isnan().all(-1), torch.nan, sizes.nan_to_num(-1.0, torch.inf).amax(-1))


def fp4_quantize(
    input: Tensor,
    global_scale: Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
) -> tuple[Tensor, Tensor]:
    check_input(input, sf_vec_size)
    assert backend == "cuda"
    assert enable_pdl is None
    assert not is_sf_swizzled_layout
    assert not is_sf_8x4_layout
    assert (sf_vec_size, global_scale is None) == ((32, True) if sf_use_ue8m0 else (16, False))
    groups = input.float().unflatten(1, (-1, sf_vec_size))
    size = largest_of(groups)
    sixth = reciprocal(torch.tensor(6.0))
    if global_scale is None:
        size = flushed(size * sixth)
        scale = to_e8m0_up(size)
        factor = flushed((127 - scale.view(torch.uint8).float()).exp2())
    else:
        assert global_scale.dtype is torch.float32
        assert global_scale.shape == (1,)
        check_small(global_scale)
        multiplied = reciprocal(global_scale) if is_global_scale_inversed else global_scale
        scale = to_e4m3(flushed(multiplied * flushed(size * sixth)))
        factor = reciprocal(flushed(scale.float() * reciprocal(multiplied)))
    factor = torch.where(size == 0, 0.0, factor)
    values = flushed(groups * factor.unsqueeze(-1)).flatten(1)
    codes = to_e2m1(torch.where(values.isnan(), 6.0, values))
    return codes, scale.view(torch.uint8)


def nvfp4_kv_quant(input: Tensor, global_scale: Tensor, fp4_output: Tensor, block_scales: Tensor) -> None:
    rows, width = input.shape
    for tensor in (input, fp4_output, block_scales):
        assert tensor.ndim == 2
        assert tensor.is_contiguous(), "CHECK_INPUT"
        assert tensor.data_ptr() % 4 == 0, "pairs are loaded, and pairs of pairs of codes stored"
    assert input.dtype in (torch.float16, torch.bfloat16)
    assert width % 16 == 0
    assert fp4_output.shape == (rows, width // 2)
    assert block_scales.shape == (rows, width // 16)
    check_small(global_scale)
    assert global_scale.dtype is torch.float32
    assert global_scale.shape == (1,)
    assert rows * width <= LARGEST_LAUNCH, "int"
    LAUNCHES.append(tuple(input.shape))
    groups = input.float().unflatten(1, (-1, 16))
    sizes = largest_by_comparing(groups) if input.dtype is torch.bfloat16 else largest_of(groups).unsqueeze(-1)
    sixth = reciprocal(torch.tensor(6.0))
    scale = to_e4m3(flushed(reciprocal(global_scale) * flushed(sizes * sixth)))
    factor = torch.where(sizes == 0, 0.0, reciprocal(flushed(scale.float() * global_scale)))
    halves = groups.unflatten(-1, (2, 8)) * factor.expand(*factor.shape[:-1], 2).unsqueeze(-1)
    values = flushed(halves).flatten(1)
    fp4_output.copy_(to_e2m1(torch.where(values.isnan(), 6.0, values)))
    block_scales.copy_(scale[..., 0].view(torch.uint8))


def largest_by_comparing(groups: Tensor) -> Tensor:
    """[..., groups, 2]: as each of two threads, of eight elements, has it, which with NaN depends on the order."""
    pairs = groups.abs().unflatten(-1, (2, 4, 2))  # threads, pairs, lanes
    lanes = pairs[..., 0, :]
    for step in range(1, 4):
        lanes = larger(lanes, pairs[..., step, :])
    lanes = larger(lanes.flip(-2), lanes)
    return larger(lanes[..., 0], lanes[..., 1])


def larger(one: Tensor, other: Tensor) -> Tensor:
    return torch.where(one > other, one, other)


def get_fp4_kv_quantization_module() -> SimpleNamespace:
    return SimpleNamespace(nvfp4_kv_quant=nvfp4_kv_quant)


def mxfp8_quantize(
    input: Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    sf_swizzle_layout: None = None,
) -> tuple[Tensor, Tensor]:
    check_input(input, 32)
    assert backend == "cuda"
    assert not is_sf_swizzled_layout
    groups = input.float().unflatten(1, (-1, 32))
    scale = to_e8m0_up(flushed(largest_of(groups) * reciprocal(torch.tensor(448.0))))
    value = flushed(from_e8m0(scale))
    factor = torch.where(value == 0, 0.0, reciprocal(value)).unsqueeze(-1)
    limit = torch.tensor(448.0)
    values = torch.fmax(torch.fmin(groups * factor, limit), -limit)  # of a number and NaN, the number
    return to_e4m3(values.flatten(1)), scale.view(torch.uint8).flatten()


def check_input(input: Tensor, group: int) -> None:
    assert input.ndim == 2
    assert input.is_contiguous(), "CHECK_CONTIGUOUS"
    assert input.stride() == (input.shape[1], 1), "columns that lie first are taken for rows"
    assert input.dtype in (torch.float16, torch.bfloat16)
    assert input.shape[1] % group == 0
    assert input.data_ptr() % 16 == 0, "vectors of 16 bytes are loaded"


def per_token_group_quant_8bit(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    backend: str = "cutile",
) -> tuple[Tensor, Tensor]:
    assert backend == "cutile"
    assert x.is_contiguous()
    assert x.shape[-1] % group_size == 0
    assert x.numel() + 2 * group_size < LARGEST_LAUNCH, "int32"
    assert column_major_scales or not (scale_tma_aligned or scale_ue8m0)
    groups = x.float().unflatten(-1, (-1, group_size))
    size = torch.fmax(largest_of(groups), torch.tensor(eps))
    scale = size / torch.tensor(448.0)
    if scale_ue8m0:
        scale = scale.clamp(min=1e-10).log2().ceil().exp2()
    each, limit = scale.unsqueeze(-1), torch.tensor(448.0)
    values = groups / each if column_major_scales else groups * (1.0 / each)
    codes = torch.fmin(torch.fmax(values, -limit), limit).flatten(-2).to(dst_dtype or E4M3)
    return codes, scale.t().contiguous().t() if column_major_scales else scale


FP8_FUNCTIONS = (mxfp8_quantize, per_token_group_quant_8bit)
FP4_FUNCTIONS = (get_fp4_kv_dequantization_module, get_fp4_kv_quantization_module, fp4_quantize)
