"""From positions in a sequence to slots of the cache, in the form that FlashMLA reads.

One program per query token. It finds the token's sequence, looks each listed position up in the sequence's block table,
and writes its slot, or -1 for what the token does not see or a row of the table has no page for (`room` tokens), up to
the padded length of a list; beside it the number of entries up to the last that is seen, so that lists of short
sequences cost what they hold.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "topk", "padded", "num_seqs", "room"])
def slots_kernel(
    slots,
    used,
    topk_indices,
    block_table,
    seq_lens,
    cu_seqlens_q,
    tokens,
    topk,
    padded,
    num_seqs,
    room,
    rows_per_page,
    topk_stride,
    topk_entry_stride,
    table_stride,
    table_entry_stride,
    lens_stride,
    offsets_stride,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if RAGGED:
        sequence = 0
        for start in range(0, num_seqs, BLOCK):
            ends = start + 1 + tl.arange(0, BLOCK)
            end = tl.load(cu_seqlens_q + ends * offsets_stride, mask=ends <= num_seqs, other=1 << 30)
            sequence += tl.sum((end <= token).to(tl.int32), 0)
        alive = sequence < num_seqs
        last = tl.load(cu_seqlens_q + (sequence + 1) * offsets_stride, mask=alive, other=0)
        behind = last - 1 - token
    else:
        sequence = (token // tokens).to(tl.int32)
        alive = sequence < num_seqs
        behind = tokens - 1 - token % tokens
    seen_keys = tl.load(seq_lens + sequence * lens_stride, mask=alive, other=0).to(tl.int64)
    if CAUSAL:
        seen_keys -= behind
    seen_keys = tl.minimum(seen_keys, room)
    table = block_table + sequence.to(tl.int64) * table_stride
    most = 1
    for start in range(0, padded, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        listed = entry < topk
        position = tl.load(
            topk_indices + token * topk_stride + entry.to(tl.int64) * topk_entry_stride, mask=listed, other=-1
        )
        seen = listed & (position >= 0) & (position < seen_keys)
        page = tl.load(table + (position // PAGE).to(tl.int64) * table_entry_stride, mask=seen, other=0)
        slot = page * rows_per_page + position % PAGE
        tl.store(slots + token * padded + entry, tl.where(seen, slot, -1), mask=entry < padded)
        most = tl.maximum(most, tl.max(tl.where(seen, entry + 1, 0), 0))
    tl.store(used + token, most)
