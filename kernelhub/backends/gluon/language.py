# mypy: ignore-errors
"""The names of Gluon that kernels use, the same for Triton 3.6 to 3.9.

3.8 renamed the copies by TMA, and 3.9 those by cp.async and `_reinterpret`; the old names raise in 3.9. Arguments whose
names changed (the bytes of `mbarrier.expect` in 3.7.1) are passed by position.

Allocate and initialise no barrier that a variant of a kernel does not use. The compiler sees that the barrier is dead
and gives its memory to other data. While other processes' kernels took turns on an H200, that memory changed long after
the barrier was initialised: results were wrong in one of 100 calls, or a launch never ended (`shared_gpu_h200.json`).
What is used lives until the end of the launch. `tests/gluon/ahead.py` reports barriers that nothing uses.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
copy_arrive = async_copy.mbarrier_arrive

# Of Triton: its assembler spills in other forms of a kernel from release to release.
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpreted(buf, dtype: gl.constexpr, like):
        """The memory of a buffer as elements of another dtype of the same size, in the layout of `like`."""
        return buf.reinterpret(dtype, buf.shape, like.layout)

    @gluon.jit
    def words_of(buf, TILES: gl.constexpr, LAYOUT: gl.constexpr):
        """The memory of tiles of 64 columns in 16 bits, which lie one after the other, as words of 32 bits."""
        return buf.reinterpret(gl.int32, [TILES, buf.shape[1], 32], LAYOUT)

else:

    @gluon.jit
    def reinterpreted(buf, dtype: gl.constexpr, like):
        """The memory of a buffer as elements of another dtype of the same size, in the layout of `like`."""
        return buf._reinterpret(dtype, buf.shape, like.layout)

    @gluon.jit
    def words_of(buf, TILES: gl.constexpr, LAYOUT: gl.constexpr):
        """The memory of tiles of 64 columns in 16 bits, which lie one after the other, as words of 32 bits."""
        return buf._reinterpret(gl.int32, [TILES, buf.shape[1], 32], LAYOUT)


@gluon.jit
def halves_of_float8(words):
    """Four e4m3 of a word as two words of two float16, the first two first. Triton would move each byte on its own."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def bring_to_cache(addresses, wanted):
    """Ask for the lines of 128 bytes at some addresses to be brought into the L2 cache, where `wanted` is not 0.

    One instruction for many lines (`cp.async.bulk.prefetch`) would be in a loop over threads that differ: ptxas then
    keeps the descriptors of all products of the kernel in registers, and its loops are half as long again.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p prefetch.global.L2 [$1];
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [addresses, wanted],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def quick_exp2(x):
    """2^x of float32 within two units; numbers below the normal ones become 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def quick_reciprocal(x):
    """1 / x of float32 within a unit; numbers below the normal ones become 0, and are taken for 0."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rounded_to(x, dtype: gl.constexpr):
    """float32 rounded to another dtype, bfloat16 two at a time. Triton would round each on its own."""
    if dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
            }""",
            "=r,=r,r,r",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        x = x.to(dtype).to(gl.float32)
    return x


@gluon.jit
def masked_after(x, key, last):
    """x in float32 where key <= last, else -inf."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.le.s32 p, $2, $3;
        selp.f32 $0, $1, 0fFF800000, p;
        }""",
        "=r,r,r,r",
        [x, key, last],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def masked_outside(x, key, first, last):
    """x in float32 where first <= key <= last, else -inf."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.le.s32 p, $2, $4;
        setp.ge.and.s32 p, $2, $3, p;
        selp.f32 $0, $1, 0fFF800000, p;
        }""",
        "=r,r,r,r,r",
        [x, key, first, last],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def softmax_is_done(sums):
    """Does nothing with float32 numbers, four of each thread, none of which is below 0.

    To the assembler it is a store to shared memory that depends on them. So it leaves what they are made of before the
    next wait for products. Of a real store Triton orders those of two steps by a barrier, which this has not.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .f32 a, b;
        .reg .b32 nowhere;
        add.f32 a, $4, $5;
        add.f32 b, $6, $7;
        add.f32 a, a, b;
        setp.lt.f32 p, a, 0f00000000;
        mov.b32 nowhere, 0;
        @p st.shared.f32 [nowhere], a;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        }""",
        "=r,=r,=r,=r,r,r,r,r",
        [sums],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


__all__ = [
    "PropagateNan",
    "TensorDescriptor",
    "bring_to_cache",
    "copy_arrive",
    "copy_rows",
    "fence_async_shared",
    "gl",
    "gluon",
    "halves_of_float8",
    "masked_after",
    "masked_outside",
    "mbarrier",
    "quick_exp2",
    "quick_reciprocal",
    "reinterpreted",
    "rounded_to",
    "softmax_is_done",
    "tma",
    "tma_load",
    "tma_store",
    "warpgroup_mma",
    "warpgroup_mma_wait",
    "words_of",
]
