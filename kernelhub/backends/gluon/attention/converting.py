# mypy: ignore-errors
"""float8 keys and values on their way to the tensor cores, which multiply them in 16 bits.

    loader (`prefill.load_tiles`): tiles of float8 by TMA into raw buffers
    converter, four warps: raw tile -> keys and values in float16, which holds float8 exactly
    attend (`prefill.attend`): as with 16 bits; factors of keys go into the scores, those of values into the result

To bfloat16 a conversion would take two steps, of which the second is slow. So queries of bfloat16 become float16, too,
each row over the power of two of its largest element: exact down to 2^-24 of that, and in range for any queries.

A factor of keys below 0 would turn the order of scores round: its sign goes into the keys here.
"""

from __future__ import annotations

from kernelhub.backends.gluon.attention.tiles import key_steps, tile_of
from kernelhub.backends.gluon.language import fence_async_shared, gl, gluon, mbarrier, reinterpreted


@gluon.jit
def scale_of(scales, head, GROUP: gl.constexpr, SCALES: gl.constexpr):
    """The factor of a head: of all (SCALES is 2), or one of each KV head (3)."""
    at = scales
    if SCALES == 3:
        at = scales + head // GROUP
    return gl.load(at)


@gluon.jit
def narrowed(q, q1, like, like1, ready, phase, D1: gl.constexpr, ROW: gl.constexpr):
    """Queries as float16 in the place where they were, and a power of two for each row to multiply its scores by."""
    ACROSS: gl.constexpr = q.shape[1] // 8
    ACROSS1: gl.constexpr = q1.shape[1] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    layout1: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS1, ACROSS1], [4, 1], [1, 0])
    raw = q.load(layout).to(gl.float32)
    largest = gl.max(gl.abs(raw), 1)
    if D1 > 0:
        raw1 = q1.load(layout1).to(gl.float32)
        largest = gl.maximum(largest, gl.convert_layout(gl.max(gl.abs(raw1), 1), gl.SliceLayout(1, layout)))
    bits = largest.to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.minimum(gl.maximum(bits, 0x00800000), 0x7E800000)  # of which the inverse is a normal number, too
    inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
    made = reinterpreted(q, gl.float16, like)
    made.store((raw * inverse[:, None]).to(gl.float16))
    made1 = made
    if D1 > 0:
        made1 = reinterpreted(q1, gl.float16, like1)
        made1.store((raw1 * gl.convert_layout(inverse, gl.SliceLayout(1, layout1))[:, None]).to(gl.float16))
    fence_async_shared()
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(ready, phase)
    return made, made1, gl.convert_layout(bits.to(gl.float32, bitcast=True), ROW)


@gluon.jit
def convert_tile(source, into, sign, SIGNED: gl.constexpr):
    """A tile. Eight threads write the 128 bytes of a row that lie in all banks."""
    ACROSS: gl.constexpr = into.shape[1] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    made = source.load(layout).to(into.dtype)
    if SIGNED:
        made = made * sign.to(into.dtype)
    into.store(made)
    fence_async_shared()


@gluon.jit
def convert_tiles(
    raw_k, raw_k1, raw_v, k_bufs, k_bufs1, v_bufs, raw_k_full, raw_k_empty, raw_v_full, raw_v_empty, k_full, k_empty,
    v_full, v_empty, k_scale, cu_seqlens_q, cu_seqlens_k, seq_lens, num_seqs, q_tokens, kv_tokens, total, window_left,
    window_right,
    HEADS: gl.constexpr, GROUP: gl.constexpr, RAGGED: gl.constexpr, PAGE: gl.constexpr, D1: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SCALES: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, RAW_STAGES: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """Every step of keys that the loader loads, in the same order."""
    step = 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        head, _, block, _, q_len, _, kv_len = tile_of(
            t, cu_seqlens_q, cu_seqlens_k, seq_lens, num_seqs, q_tokens, kv_tokens, HEADS, RAGGED, PAGE, PACK
        )
        if block >= 0:
            _, steps, _, _ = key_steps(
                block, q_len, kv_len, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N, PACK
            )
            sign = 1.0
            if SCALES > 1:
                sign = gl.where(scale_of(k_scale, head, GROUP, SCALES) < 0, -1.0, 1.0)
            for _ in range(steps):
                r = step % RAW_STAGES
                s = step % STAGES
                came = (step // RAW_STAGES) & 1
                left = ((step // STAGES) & 1) ^ 1
                mbarrier.wait(raw_k_full.index(r), came)
                mbarrier.wait(k_empty.index(s), left)
                convert_tile(raw_k.index(r), k_bufs.index(s), sign, SCALES > 1)
                if D1 > 0:
                    convert_tile(raw_k1.index(r), k_bufs1.index(s), sign, SCALES > 1)
                mbarrier.arrive(k_full.index(s), count=1)
                mbarrier.arrive(raw_k_empty.index(r), count=1)
                mbarrier.wait(raw_v_full.index(r), came)
                mbarrier.wait(v_empty.index(s), left)
                convert_tile(raw_v.index(r), v_bufs.index(s), sign, False)
                mbarrier.arrive(v_full.index(s), count=1)
                mbarrier.arrive(raw_v_empty.index(r), count=1)
                step += 1
