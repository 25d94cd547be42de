# mypy: ignore-errors
"""Decodes signed 4-bit integers for a matrix product, four of a 16-bit word at once (see `fp4.py`).

A nibble with its highest bit flipped is the integer plus 8, and 0x4300 with it in its last bits is the bfloat16 of 136
plus the integer, since bfloat16 has steps of one from 128 to 256. A fused multiply-add takes 136 off again, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bfloat16_int4_quads(words):
    """int16 words as four tensors of bfloat16, first element first: integers from -8 to 7."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 one, off, bits;
        mov.b32 one, 0x3F803F80; mov.b32 off, 0xC308C308;
        lop3.b32 bits, $4, 0x000F000F, 0x43084308, 0x6A;
        fma.rn.bf16x2 $0, bits, one, off;
        shr.u32 bits, $4, 4; lop3.b32 bits, bits, 0x000F000F, 0x43084308, 0x6A;
        fma.rn.bf16x2 $1, bits, one, off;
        shr.u32 bits, $4, 8; lop3.b32 bits, bits, 0x000F000F, 0x43084308, 0x6A;
        fma.rn.bf16x2 $2, bits, one, off;
        shr.u32 bits, $4, 12; lop3.b32 bits, bits, 0x000F000F, 0x43084308, 0x6A;
        fma.rn.bf16x2 $3, bits, one, off;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def int4_to_float(code):
    """The lower four bits of integers, two's complement, as float32."""
    return (((code.to(tl.int32) & 15) ^ 8) - 8).to(tl.float32)
