"""FlashInfer's functions that vLLM calls through torch.library.

An eager call goes directly to FlashInfer; a compiled graph contains an operator of the namespace ``kernelhub_vllm``.

Tensors have FlashInfer's scale layouts and order of arguments. Only ``flashinfer_concat_mla_k`` is kernelhub's own op,
since a copy gives the same bits in every implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernelhub.compat.vllm.flashinfer import calls
from kernelhub.dispatch.plan import traced_as
from kernelhub.ops.mla.concat.op import concat_mla_k

_LIBRARY = torch.library.Library("kernelhub_vllm", "FRAGMENT")
_MOST_ROWS_8X4 = 32  # up to here trtllm's fp4 products read scales in tiles of 8 x 4
_F = TypeVar("_F", bound=Callable[..., object])


def _operator(schema: str, fake: Callable[..., object]) -> Callable[[_F], _F]:
    """Register a function as an operator of this schema, for graphs of torch.compile only."""
    name = schema.partition("(")[0]

    def decorate(run: _F) -> _F:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"kernelhub_vllm::{name}", fake, lib=_LIBRARY)
        operator = getattr(torch.ops.kernelhub_vllm, name)

        def traced(*args: Any, **kwargs: Any) -> Any:
            return operator(*args, **kwargs)

        return traced_as(run, traced)

    return decorate


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def flashinfer_mm_fp4_fake(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    g_scale: Tensor,
    dtype: torch.dtype,
    use_8x4_sf_layout: bool,
    backend: str,
    block_size: int = 16,
    use_nvfp4: bool = True,
) -> Tensor:
    """Shape and dtype of `flashinfer_mm_fp4`."""
    return A.new_empty((A.shape[0], B.shape[1]), dtype=dtype)


@_operator(
    "flashinfer_mm_fp4(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, Tensor g_scale, ScalarType dtype, "
    "bool use_8x4_sf_layout, str backend, int block_size=16, bool use_nvfp4=True) -> Tensor",
    flashinfer_mm_fp4_fake,
)
def flashinfer_mm_fp4(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    g_scale: Tensor,
    dtype: torch.dtype,
    use_8x4_sf_layout: bool,
    backend: str,
    block_size: int = 16,
    use_nvfp4: bool = True,
) -> Tensor:
    """``A [M, K/2] @ B [K/2, N]`` of fp4 codes."""
    result: Tensor = calls.mm_fp4(
        A,
        B,
        A_scale,
        B_scale,
        g_scale,
        dtype,
        block_size=block_size,
        use_8x4_sf_layout=use_8x4_sf_layout,
        use_nvfp4=use_nvfp4,
        backend=backend,
    )
    return result


def flashinfer_mm_bf16_fp4_fake(A: Tensor, B: Tensor, B_scale: Tensor, global_scale: Tensor) -> Tensor:
    """Shape and dtype of `flashinfer_mm_bf16_fp4`; prepared weights are codes, or int32 in tiles."""
    return A.new_empty((A.shape[0], B.shape[0] if B.dtype == torch.uint8 else B.shape[1] // 2))


@_operator(
    "flashinfer_mm_bf16_fp4(Tensor A, Tensor B, Tensor B_scale, Tensor global_scale) -> Tensor",
    flashinfer_mm_bf16_fp4_fake,
)
def flashinfer_mm_bf16_fp4(A: Tensor, B: Tensor, B_scale: Tensor, global_scale: Tensor) -> Tensor:
    """``A [M, K]`` in bf16 times weights from `flashinfer_prepare_bf16_fp4_weights`."""
    result: Tensor = calls.mm_bf16_fp4(A, B, B_scale, global_scale, backend="cute-dsl")
    return result


def flashinfer_mxfp4_quantize_fake(a: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Codes ``[M, K/2]`` and scales in tiles of 128 x 4."""
    m, k = a.shape
    return a.new_empty((m, k // 2), dtype=torch.uint8), a.new_empty((_up(m, 128), _up(k // 32, 4)), dtype=torch.uint8)


@_operator("flashinfer_mxfp4_quantize(Tensor a, str backend) -> (Tensor, Tensor)", flashinfer_mxfp4_quantize_fake)
def flashinfer_mxfp4_quantize(a: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """MXFP4 codes and scales of ``a [M, K]``."""
    codes, scales = calls.mxfp4_quantize(a, backend=backend)
    return codes, scales


def bmm_fp8_fake(A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """Shape and dtype of `bmm_fp8`."""
    return A.new_empty((A.shape[0], A.shape[1], B.shape[2]), dtype=dtype)


@_operator(
    "bmm_fp8(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, ScalarType dtype, str backend) -> Tensor",
    bmm_fp8_fake,
)
def bmm_fp8(A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """``A [B, M, K] @ B [B, K, N]`` in fp8, each scaled by one number."""
    result: Tensor = calls.bmm_fp8(A, B, A_scale, B_scale, dtype, None, backend)
    return result


def flashinfer_nvfp4_quantize_fake(a: Tensor, a_global_sf: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[M, K/2]`` and scales in tiles of 8 x 4."""
    m, k = a.shape
    return a.new_empty((m, k // 2), dtype=torch.uint8), a.new_empty((_up(m, 8), _up(k // 16, 4)), dtype=torch.uint8)


@_operator(
    "flashinfer_nvfp4_quantize(Tensor a, Tensor a_global_sf) -> (Tensor, Tensor)", flashinfer_nvfp4_quantize_fake
)
def flashinfer_nvfp4_quantize(a: Tensor, a_global_sf: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 codes and scales, these in tiles of 8 x 4."""
    codes, scales = calls.nvfp4_quantize(a, a_global_sf, sfLayout=calls.scale_layout_8x4(), do_shuffle=False)
    return codes, scales


def flashinfer_mxfp8_quantize_8x4_fake(a: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 ``[M, K]`` and scales in tiles of 8 x 4, in a row."""
    m, k = a.shape
    return a.new_empty((m, k), dtype=torch.float8_e4m3fn), a.new_empty(
        (_up(m, 8) * _up(k // 32, 4),), dtype=torch.uint8
    )


@_operator("flashinfer_mxfp8_quantize_8x4(Tensor a) -> (Tensor, Tensor)", flashinfer_mxfp8_quantize_8x4_fake)
def flashinfer_mxfp8_quantize_8x4(a: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8 values and scales, these in tiles of 8 x 4."""
    values, scales = calls.mxfp8_quantize(a, backend="cuda", sf_swizzle_layout=calls.scale_layout_8x4())
    return values, scales


def mm_mxfp8_fake(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    out_dtype: torch.dtype,
    backend: str = "cutlass",
    use_8x4_sf_layout: bool = False,
) -> Tensor:
    """Shape and dtype of `mm_mxfp8`."""
    return A.new_empty((A.shape[0], B.shape[1]), dtype=out_dtype)


@_operator(
    "mm_mxfp8(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, ScalarType out_dtype, str backend='cutlass', "
    "bool use_8x4_sf_layout=False) -> Tensor",
    mm_mxfp8_fake,
)
def mm_mxfp8(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    out_dtype: torch.dtype,
    backend: str = "cutlass",
    use_8x4_sf_layout: bool = False,
) -> Tensor:
    """``A [M, K] @ B [K, N]`` in MXFP8."""
    result: Tensor = calls.mm_mxfp8(
        A,
        B,
        A_scale,
        B_scale,
        out=None,
        out_dtype=out_dtype,
        backend=backend,
        use_8x4_sf_layout=use_8x4_sf_layout,
    )
    return result


def flashinfer_concat_mla_k(k: Tensor, k_nope: Tensor, k_pe: Tensor) -> None:
    """Fill ``k [T, H, N + R]`` with ``k_nope [T, H, N]`` and, for every head, ``k_pe [T, 1, R]``, of any sizes."""
    concat_mla_k(k_nope, k_pe, out=k)


def flashinfer_bf16_mm(a: Tensor, b: Tensor, bias: Tensor | None, pdl: bool, backend: str) -> Tensor:
    """``a [M, K] @ b [K, N] + bias`` in bf16."""
    result: Tensor = calls.mm_bf16(a, b, bias=bias, pdl=pdl, out_dtype=torch.bfloat16, backend=backend)
    return result


def flashinfer_scaled_fp4_mm(
    a: Tensor,
    b: Tensor,
    block_scale_a: Tensor,
    block_scale_b: Tensor,
    alpha: Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
    block_size: int = 16,
    use_nvfp4: bool = True,
) -> Tensor:
    """``alpha * a @ b.T`` of fp4 codes ``a [M, K/2]``, ``b [N, K/2]``; scales in the layout of FlashInfer's backend.

    Raises:
        ValueError: the operands are not matrices of equal K, or are not row-major.
    """
    if not all(operand.ndim == 2 for operand in (a, b, block_scale_a, block_scale_b)) or a.shape[1] != b.shape[1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} must be [M, K/2] and [N, K/2], scales matrices")
    if a.stride(-1) != 1 or b.stride(-1) != 1:
        raise ValueError("a and b must be row-major")
    if alpha is None:
        alpha = torch.ones(1, dtype=torch.float32, device=a.device)
    if backend in ("cutlass", "cudnn"):  # these read scales as bytes
        block_scale_a, block_scale_b = block_scale_a.view(torch.uint8), block_scale_b.view(torch.uint8)
    return flashinfer_mm_fp4(
        a,
        b.t(),
        block_scale_a,
        block_scale_b.t(),
        alpha,
        out_dtype,
        backend == "trtllm" and a.shape[0] <= _MOST_ROWS_8X4,
        backend,
        block_size,
        use_nvfp4,
    )


def flashinfer_scaled_fp8_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """``scale_a * scale_b * a @ b + bias`` of e4m3 ``a [M, K]``, ``b [K, N]``, each scaled by one float32 number.

    Raises:
        ValueError: an operand or scale has another shape or dtype.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} must be [M, K] and [K, N]")
    if not a.dtype == b.dtype == torch.float8_e4m3fn:
        raise ValueError(f"a is {a.dtype} and b is {b.dtype}; both must be float8_e4m3fn")
    if any(scale.numel() != 1 or scale.dtype != torch.float32 for scale in (scale_a, scale_b)):
        raise ValueError("scale_a and scale_b must be one float32 number each")
    product = bmm_fp8(a.unsqueeze(0), b.unsqueeze(0), scale_a, scale_b, out_dtype, "auto").view(a.shape[0], b.shape[1])
    return product if bias is None else product + bias


def flashinfer_quant_nvfp4_8x4_sf_layout(a: Tensor, a_global_sf: Tensor) -> tuple[Tensor, Tensor]:
    """As `flashinfer_nvfp4_quantize`."""
    return flashinfer_nvfp4_quantize(a, a_global_sf)
