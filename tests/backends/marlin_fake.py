"""`marlin_gemm` with vLLM's schema in plain torch: strict where the library is, and decoding as its machine code does.

Where a code lies is written down here number by number, from what a thread of the kernel loads and how tensor cores
take their second operand (PTX ISA, mma.m16n8k16), independently of how the backend orders them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.marlin import kernels as records
from kernelhub.dispatch.constraint import Compiled, OnDevice, Package, anything
from kernelhub.dispatch.kernel import Backend, Band
from kernelhub.dispatch.standing import Standing
from tests.backends.cutlass_fakes import packed, registered
from tests.backends.fake.addresses import check_small
from tests.dispatch.backends import EVERYWHERE

SCHEMA = (  # vLLM 0.33.0, vllm/_C_stable_libtorch.abi3.so
    "(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none,Tensor b_scales, Tensor? a_scales, "
    "Tensor? global_scale, Tensor? b_zeros_or_none, Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, "
    "SymInt size_k, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor"
)
FLOAT4_E2M1F = 562949953487106  # vllm.scalar_type.scalar_types.float4_e2m1f.id
FLOAT8_E4M3FN = 2814749767172868  # vllm.scalar_type.scalar_types.float8_e4m3fn.id
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def marlin_gemm(
    a: Tensor, c: Tensor | None, codes: Tensor, bias: Tensor | None, scales: Tensor, a_scales: Tensor | None,
    global_scale: Tensor | None, zeros: Tensor | None, locks: Tensor, type_id: int, m: int, n: int, k: int,
    atomic: bool, float32: bool, zp_float: bool,
) -> Tensor:  # fmt: skip
    assert type_id in (FLOAT4_E2M1F, FLOAT8_E4M3FN)
    assert bias is a_scales is zeros is None
    assert a.dtype in (torch.bfloat16, torch.float16)
    assert a.shape == (m, k)
    assert a.stride(1) == 1
    assert a.stride(0) % 8 == a.data_ptr() % 16 == 0
    assert codes.dtype is torch.int32
    assert codes.shape == (k // 16, (2 if type_id == FLOAT4_E2M1F else 4) * n)
    assert codes.is_contiguous()
    assert any(n % tile_n == k % tile_k == 0 for tile_n, tile_k in ((64, 128), (128, 64), (256, 64)))
    assert locks.dtype is torch.int32
    assert locks.numel() >= 132
    assert not locks.any()
    assert c is not None
    packed(c)
    assert c.dtype is a.dtype
    assert c.shape == (m, n)
    assert scales.is_contiguous()
    left = torch.ones(())
    if type_id == FLOAT8_E4M3FN:
        assert scales.dtype is a.dtype
        assert global_scale is None
        assert scales.shape in ((1, n), (k // 128, n))
        held = bytes_as_numbers(codes, a.dtype, n, k)
        if scales.shape[0] == 1:  # also where K is one block: the library counts groups
            left = scales[0, of_column(torch.arange(n))].float()
        else:
            row, column = torch.arange(n)[:, None], torch.arange(k)[None]
            # A thread loads 8 scales, those of rows c, c + 8, ..., c + 56 of its 64.
            held = held * scales[column // 128, row // 64 * 64 + row % 8 * 8 + row % 64 // 8]
        held = held.float()
    elif scales.dtype is E4M3:
        assert scales.shape == (k // 16, n)
        assert global_scale is not None
        check_small(global_scale)
        assert global_scale.dtype is torch.float32
        left = global_scale.flatten()[0]
    else:
        assert scales.dtype is E8M0
        assert scales.shape == (k // 32, n)
        assert a.dtype is torch.bfloat16
        assert global_scale is None
    if type_id == FLOAT4_E2M1F:
        held = weights(codes, scales, a.dtype, n, k).float()
    assert (atomic, float32, zp_float) == (False, True, False)
    # float32 sums, one product after the other, subnormals kept as tensor cores keep them; then the global scale.
    sums = torch.zeros(m, n)
    for column in range(k):
        sums += a[:, column, None].float() * held[None, :, column]
    return c.copy_(sums * left)


def bytes_as_numbers(codes: Tensor, dtype: torch.dtype, n: int, k: int) -> Tensor:
    """Codes of 8 bits as tensor cores are given them, [N, K] of dtype: bits moved, the exponent's bias left."""
    row, column = torch.arange(n)[:, None], torch.arange(k)[None]
    # A lane loads 32 bytes: two words for each 16 rows, the second of rows 8 higher. Bytes 0 and 2 go to the first
    # register, 1 and 3 to the second.
    lane = 4 * (row % 8) + column % 8 // 2
    word = codes[column // 16, row // 64 * 256 + 8 * lane + row % 64 // 16 * 2 + row % 16 // 8]
    code = (word >> (8 * (column % 16 // 8 + 2 * (column % 2)))) & 0xFF
    return _as((code & 0x80) << 8 | (code & 0x7F) << (7 if dtype is torch.float16 else 4), dtype)


def of_column(n: Tensor) -> Tensor:
    """Where a lane's scales of columns 2 t and 2 t + 1 of each 8 are: eight of 32 columns together."""
    return n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2


def weights(codes: Tensor, scales: Tensor, dtype: torch.dtype, n: int, k: int) -> Tensor:
    """What tensor cores are given, [N, K] of dtype."""
    row, column = torch.arange(n)[:, None], torch.arange(k)[None]
    # Lane 4 c + t of a warp has of the second operand row c of N, columns 2 t, 2 t + 1 (first register) and 8 more
    # (second). It loads 16 bytes: a word for each 16 rows; of a word, the second product takes rows 8 higher.
    warp_lane = 4 * (row % 8) + column % 8 // 2
    word = codes[column // 16, row // 64 * 128 + 4 * warp_lane + row % 64 // 16]
    upper, second, odd = row % 16 // 8, column % 16 // 8, column % 2
    # q << 8 for the first product, q for the second; of each, nibbles 3 and 7 go to the second register, 2 and 6 to
    # the first.
    nibble = torch.where(second == 1, 3, 2) - torch.where(upper == 0, 2, 0) + 4 * odd
    code = (word >> (4 * nibble)) & 15
    # A thread loads 8 scales, those of rows c, c + 8, ..., c + 56 of its 64; bytes 1 and 2 change places.
    place = row % 64 // 8
    byte = place // 4 * 4 + torch.tensor([0, 2, 1, 3])[place % 4]
    raw = scales.view(torch.uint8)[column // (k // scales.shape[0]), row // 64 * 64 + row % 8 * 8 + byte].int()
    sign = (code & 8) << 12
    if dtype is torch.float16:
        value, scale = sign | (code & 7) << 9, raw << 7
    else:
        value = sign | (code & 7) << 6
        scale = raw << 7 if scales.dtype is E8M0 else (raw & 0x80) << 7 | (raw & 0x7F) << 4
    left, right = _as(value, dtype), _as(scale, dtype)
    if scales.dtype is E8M0:
        left = left * 2.0**126
    return left * right


def _as(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).view(dtype)


@contextlib.contextmanager
def on_the_cpu(*, with_library: bool = True, standings: tuple[Standing, ...] = EVERYWHERE) -> Iterator[None]:
    """Backend `fake`: the records of marlin without what they ask of the machine; and the operator they call."""
    made = [
        dataclasses.replace(
            kernel,
            name=kernel.name.replace("marlin.", "fake."),
            band=Band.PLUGIN,
            standings=standings,
            constraints=(
                anything("device"),
                *(item for item in kernel.constraints if not isinstance(item, (OnDevice, Package, Compiled))),
            ),
        )
        for kernel in records.KERNELS
    ]
    module = SimpleNamespace(__name__="fake", BACKEND=Backend("fake", "Marlin in plain torch"), KERNELS=made)
    schemas = {"marlin_gemm": SCHEMA} if with_library else {}
    with registered("_C", schemas, marlin_gemm=marlin_gemm):
        handle = kernelhub.register_backend(module)
        try:
            yield
        finally:
            handle.remove()
