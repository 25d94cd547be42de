# mypy: ignore-errors
"""Merges the parts of sequences that several programs walked, and writes the results of those without keys.

program of one warp -> one row; weigh its parts by 2^(lse - max), add the sink, store
"""

from __future__ import annotations

from kernelhub.backends.gluon.language import gl, gluon
from kernelhub.backends.gluon.mla.schedule import parts_of

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LEAST = gl.constexpr(-1e30)
PARTS = gl.constexpr(8)  # at a time
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0]))
COLUMN = gl.constexpr(gl.SliceLayout(1, TILE))
ROW = gl.constexpr(gl.SliceLayout(0, TILE))


@gluon.jit(
    do_not_specialize=["num_seqs", "rows", "parts", "tiles", "room", "stride_lb", "stride_lh", "stride_lt"],
    do_not_specialize_on_alignment=["lse", "sinks", "seq_lens", "counted"],
)
def merge_kernel(
    out, lse, part_out, part_lse, sinks, seq_lens, counted, num_seqs, rows, parts, tiles, room, stride_ob, stride_ot,
    stride_oh, stride_lb, stride_lh, stride_lt, HEADS: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """One program per row; `rows` are those of a sequence. `counted` says how many sequences have rows; all if None."""
    sequence = gl.program_id(0) // rows
    if counted is not None:
        num_seqs = gl.minimum(gl.maximum(gl.load(counted), 0), num_seqs)
        if sequence >= num_seqs:
            return
    row = gl.program_id(0) % rows
    first, last, kv_len = parts_of(sequence, parts, seq_lens, num_seqs, room)
    if (kv_len > 0) & (first == last):  # the decode kernel wrote the result
        return
    token = row // HEADS
    head = row % HEADS
    columns = gl.arange(0, 512, ROW)
    acc = gl.zeros((512,), gl.float32, ROW)
    m = LEAST + first.to(gl.float32) * 0.0
    total = m * 0.0
    if kv_len > 0:
        for start in range(first, last + 1, PARTS):
            part = start + gl.arange(0, PARTS, COLUMN)
            # A sequence that begins in a part and goes on is in its second slot.
            slot = gl.where(part == first, part * 2 + 1, part * 2)
            place = slot * tiles * 64 + row
            used = part <= last
            part_m = gl.load(part_lse + place, mask=used, other=float("-inf"))
            values = gl.load(
                part_out + place.to(gl.int64)[:, None] * 512 + columns[None, :], mask=used[:, None], other=0.0
            )
            top = gl.maximum(m, gl.max(part_m, 0))
            weights = gl.exp2(part_m - top)
            kept = gl.exp2(m - top)
            acc = acc * kept + gl.sum(values * weights[:, None], 0)
            total = total * kept + gl.sum(weights, 0)
            m = top
    if HAS_SINKS:
        sink = gl.load(sinks + head).to(gl.float32) * LOG2E
        top = gl.maximum(m, sink)
        kept = gl.exp2(m - top)
        acc = acc * kept
        total = total * kept + gl.exp2(sink - top)
        m = top
    some = total > 0.0
    safe = gl.where(some, total, 1.0)
    out += sequence.to(gl.int64) * stride_ob + token.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
    gl.store(out + columns, (acc / safe).to(out.dtype.element_ty))
    if HAS_LSE:
        value = gl.where(some, (m + gl.log2(safe)) * LN2, float("-inf"))
        gl.store(
            lse + sequence.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh + token.to(gl.int64) * stride_lt,
            value,
        )
