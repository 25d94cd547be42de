"""Operators with the schemas of vLLM's and SGLang's libraries, in plain torch: strict where the libraries are.

Each asks of its operands what the library asks or takes for granted, and multiplies exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.cutlass import kernels as records
from kernelhub.backends.cutlass.libraries import SGL
from kernelhub.backends.shared import operators
from kernelhub.dispatch.constraint import AnyOf, Compiled, OnDevice, Package, anything
from kernelhub.dispatch.kernel import Backend, Band
from kernelhub.ops.formats import from_e2m1, from_e8m0
from tests.backends.fake.addresses import check_small
from tests.dispatch.backends import EVERYWHERE

E4M3 = torch.float8_e4m3fn
_HALVES = (torch.bfloat16, torch.float16)
_OF_THE_MACHINE = (OnDevice, Package, AnyOf, Compiled)

# As the named versions declare them, read on 2026-11-20: vLLM's in its wheel's library, SGLang's in its sources.
VLLM = {  # vLLM 0.33.0, vllm/_C_stable_libtorch.abi3.so
    "cutlass_scaled_mm": "(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
    "cutlass_scaled_mm_supports_fp8": "(int cuda_device_capability) -> bool",
    "cutlass_scaled_mm_supports_block_fp8": "(int cuda_device_capability) -> bool",
    "cutlass_scaled_fp4_mm": (
        "(Tensor! out, Tensor a, Tensor b, Tensor block_scale_a, Tensor block_scale_b, Tensor alpha) -> ()"
    ),
    "cutlass_scaled_mm_supports_fp4": "(int cuda_device_capability) -> bool",
    "cutlass_fp4_group_mm": (
        "(Tensor! out, Tensor a, Tensor b, Tensor a_blockscale, Tensor b_blockscales, Tensor alphas,"
        " Tensor problem_sizes, Tensor expert_offsets, Tensor sf_offsets) -> ()"
    ),
    "cutlass_mxfp4_group_mm": (
        "(Tensor! out, Tensor a, Tensor b, Tensor a_blockscale, Tensor b_blockscales,"
        " Tensor problem_sizes, Tensor expert_offsets, Tensor sf_offsets) -> ()"
    ),
}
SGL_0_3 = {  # sgl-kernel 0.3.21, csrc/common_extension.cc
    "fp8_scaled_mm": (
        "(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype, Tensor? bias) -> Tensor"
    ),
    "fp8_blockwise_scaled_mm": (
        "(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype) -> Tensor"
    ),
}
SGL_0_4 = {"fp8_scaled_mm": SGL_0_3["fp8_scaled_mm"]}  # sglang-kernel 0.4.10


def packed(tensor: Tensor) -> None:
    """Row after row, from 16 bytes on: the libraries make strides of their own from the shape."""
    assert tensor.stride() == (tensor.shape[1], 1), tensor.stride()
    assert tensor.data_ptr() % 16 == 0


def _operands(a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    assert a.dtype is E4M3
    assert b.dtype is E4M3
    assert dtype in _HALVES
    packed(a)
    packed(b.t())
    assert a.shape[1] == b.shape[0]
    assert a.shape[1] % 16 == b.shape[1] % 16 == 0


def _blocks(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    assert m % 4 == n % 128 == k % 128 == 0
    assert a_scales.shape == (m, k // 128)
    assert a_scales.stride() == (1, m)
    assert b_scales.shape == (k // 128, n // 128)
    packed(b_scales.t())
    left = a.double() * a_scales.double().repeat_interleave(128, 1)
    right = b.double() * b_scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return left @ right


def _bias(bias: Tensor | None, n: int, dtype: torch.dtype) -> Tensor | float:
    if bias is None:
        return 0.0
    assert bias.shape == (n,)
    assert bias.is_contiguous()
    assert bias.dtype is dtype
    return bias.double()


def cutlass_scaled_mm(out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Any) -> None:
    _operands(a, b, out.dtype)
    packed(out)
    m, n = out.shape
    assert (m, n) == (a.shape[0], b.shape[1])
    assert a_scales.dtype is b_scales.dtype is torch.float32
    if a_scales.numel() in (1, m) and b_scales.numel() in (1, n):
        check_small(a_scales, b_scales)
        made = (a.double() @ b.double()) * a_scales.double().reshape(-1, 1) * b_scales.double().reshape(1, -1)
    else:
        assert bias is None
        made = _blocks(a, b, a_scales, b_scales)
    out.copy_(made + _bias(bias, n, out.dtype))


def fp8_scaled_mm(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, dtype: torch.dtype, bias: Any) -> Tensor:
    _operands(a, b, dtype)
    assert a_scales.numel() == a.shape[0]
    assert b_scales.numel() == b.shape[1]
    assert a_scales.is_contiguous()
    assert b_scales.is_contiguous()
    made = (a.double() @ b.double()) * a_scales.double().reshape(-1, 1) * b_scales.double().reshape(1, -1)
    return (made + _bias(bias, b.shape[1], dtype)).to(dtype)


def fp8_blockwise_scaled_mm(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    _operands(a, b, dtype)
    return _blocks(a, b, a_scales, b_scales).to(dtype)


def cutlass_scaled_fp4_mm(out: Tensor, a: Tensor, b: Tensor, a_sf: Tensor, b_sf: Tensor, alpha: Tensor) -> None:
    for codes in (a, b, out):
        packed(codes)
    assert out.dtype in _HALVES
    assert a.dtype is b.dtype is torch.uint8
    assert a_sf.dtype is b_sf.dtype is E4M3
    assert alpha.dtype is torch.float32
    check_small(alpha)
    assert alpha.numel() == 1
    m, n, k = a.shape[0], b.shape[0], 2 * a.shape[1]
    assert n % 32 == k % 32 == 0
    sides = []
    for codes, scales, rows in ((a, a_sf, m), (b, b_sf, n)):
        assert scales.is_contiguous()
        assert scales.shape == (-(-rows // 128) * 128, -(-k // 64) * 4)
        sides.append(from_e2m1(codes).double() * _by_hand(scales, rows, k // 16).repeat_interleave(16, 1))
    out.copy_(sides[0] @ sides[1].t() * alpha.double())


def _by_hand(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scale by scale from where PTX says that it lies."""
    flat, wide = scales.flatten().double(), scales.shape[1] // 4
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None]
    tile = (row // 128) * wide + column // 4
    return flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]


def cutlass_fp4_group_mm(out, a, b, a_sf, b_sf, alphas, problem_sizes, expert_offsets, sf_offsets) -> None:
    assert a_sf.dtype is b_sf.dtype is E4M3
    assert alphas.dtype is torch.float32
    assert alphas.shape == (b.shape[0],)
    check_small(alphas)
    _groups(out, a, b, a_sf.double(), b_sf.double(), alphas, (problem_sizes, expert_offsets, sf_offsets), 16)


def cutlass_mxfp4_group_mm(out, a, b, a_sf, b_sf, problem_sizes, expert_offsets, sf_offsets) -> None:
    assert a_sf.dtype is b_sf.dtype is torch.uint8
    one = torch.ones(b.shape[0])
    left, right = (from_e8m0(scales).double() for scales in (a_sf, b_sf))
    _groups(out, a, b, left, right, one, (problem_sizes, expert_offsets, sf_offsets), 32)


def _groups(out: Tensor, a: Tensor, b: Tensor, a_sf: Tensor, b_sf: Tensor, alphas: Tensor, of: Any, span: int) -> None:
    """Products of experts, found by where the operator is told that they begin; nothing else of `out` is written."""
    groups, n, half = b.shape
    k = 2 * half
    for tensor in (a, out):
        packed(tensor)
    assert b.is_contiguous()
    assert a.dtype is b.dtype is torch.uint8
    assert out.dtype in _HALVES
    assert n % 8 == 0, "rows of the result begin at 16 bytes"
    assert k // span * n % 512 == 0, "scales of a group's weights fill whole tiles"
    assert a_sf.ndim == 2
    assert b_sf.shape == (groups, n, k // span)
    problems, rows, tiles = of
    assert problems.shape == (groups, 3)
    assert all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in of)
    for group, ((m, *rest), row, tile) in enumerate(zip(problems.tolist(), rows.tolist(), tiles.tolist(), strict=True)):
        assert rest == [n, k]
        assert tile * (k // span) % 128 == 0, "TMA asks for it"
        if m == 0:
            continue
        assert tile % 128 == 0, "a group's scales begin with a tile"
        assert tile + -(-m // 128) * 128 <= a_sf.shape[0]
        assert row + m <= a.shape[0]
        left = from_e2m1(a[row : row + m]).double() * _by_hand(a_sf[tile:], m, k // span).repeat_interleave(span, 1)
        right = from_e2m1(b[group]).double() * _by_hand(b_sf[group], n, k // span).repeat_interleave(span, 1)
        out[row : row + m] = (left @ right.t() * float(alphas[group])).to(out.dtype)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "cutlass_scaled_mm": cutlass_scaled_mm,
    "cutlass_scaled_fp4_mm": cutlass_scaled_fp4_mm,
    "cutlass_fp4_group_mm": cutlass_fp4_group_mm,
    "cutlass_mxfp4_group_mm": cutlass_mxfp4_group_mm,
    "fp8_scaled_mm": fp8_scaled_mm,
    "fp8_blockwise_scaled_mm": fp8_blockwise_scaled_mm,
    **{name: lambda _: True for name in VLLM if "supports" in name},
}


@contextlib.contextmanager
def registered(namespace: str, schemas: dict[str, str], **other: Callable[..., Any]) -> Iterator[list[Any]]:
    """Operators of these schemas are registered, as a loaded library's would be, and none stays."""
    made = [register(namespace, schemas, **other)]
    try:
        yield made
    finally:
        for library in made:
            library._destroy()
        operators._files.clear()


def register(namespace: str, schemas: dict[str, str], **other: Callable[..., Any]) -> Any:
    """The library object, whose end is the operators' end."""
    library = torch.library.Library(namespace, "FRAGMENT")
    for name, schema in schemas.items():
        library.define(name + schema)
        library.impl(name, (IMPLEMENTATIONS | other)[name], "CompositeExplicitAutograd")
    return library


@contextlib.contextmanager
def on_the_cpu(*, with_library: bool = True) -> Iterator[None]:
    """Backend `fake`: the records of cutlass without what they ask of the machine; and the operators they call."""
    made = [
        dataclasses.replace(
            kernel,
            name=kernel.name.replace("cutlass.", "fake."),
            band=Band.PLUGIN,
            standings=EVERYWHERE,
            constraints=(
                anything("device"),
                *(item for item in kernel.constraints if not isinstance(item, _OF_THE_MACHINE)),
            ),
        )
        for kernel in records.KERNELS
    ]
    module = SimpleNamespace(__name__="fake", BACKEND=Backend("fake", "CUTLASS in plain torch"), KERNELS=made)
    present = (VLLM, SGL_0_3) if with_library else ({}, {})
    with registered("_C", present[0]), registered(SGL.namespace, present[1]):
        handle = kernelhub.register_backend(module)
        try:
            yield
        finally:
            handle.remove()
