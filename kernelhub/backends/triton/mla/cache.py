# mypy: ignore-errors
"""New rows into the pages of a latent cache: a block of tokens per program, both parts in one pass.

FP8: values are divided by the scale, as IEEE 754 divides, and rounded to e4m3. Otherwise their bits are copied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.formats import float_to_e4m3


@triton.jit
def encoded(values, scale, FP8: tl.constexpr):
    """Values in the format of the cache."""
    result = values
    if FP8:
        result = float_to_e4m3(tl.div_rn(values.to(tl.float32), scale))
    return result


@triton.jit(do_not_specialize=["tokens", "slots"], do_not_specialize_on_alignment=["slot_mapping", "kv_scale"])
def write_cache_kernel(
    kv_c,
    k_rope,
    kv_cache,
    slot_mapping,
    kv_scale,
    scale,
    tokens,
    slots,
    stride_ct,
    stride_cd,
    stride_rt,
    stride_rd,
    stride_kp,
    stride_kt,
    stride_kd,
    stride_s,
    PAGE: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr,
):
    """R may be 0. For a slot from `slots` on, which is past the cache, nothing is written.

    SCALE_ON_DEVICE: the scale is at `kv_scale`, else it is `scale`.
    """
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    slot = tl.load(slot_mapping + token * stride_s, mask=token < tokens, other=-1).to(tl.int64)
    there = ((slot >= 0) & (slot < slots))[:, None]
    row = kv_cache + (slot // PAGE * stride_kp + slot % PAGE * stride_kt)[:, None]
    if SCALE_ON_DEVICE:
        scale = tl.load(kv_scale)
    d = tl.arange(0, V_PAD)[None, :]
    mask = there & (d < V)
    latent = tl.load(kv_c + token[:, None] * stride_ct + d * stride_cd, mask, other=0)
    tl.store(row + d * stride_kd, encoded(latent, scale, FP8), mask)
    if R > 0:
        r = tl.arange(0, R_PAD)[None, :]
        mask = there & (r < R)
        rotary = tl.load(k_rope + token[:, None] * stride_rt + r * stride_rd, mask, other=0)
        tl.store(row + (V + r) * stride_kd, encoded(rotary, scale, FP8), mask)
