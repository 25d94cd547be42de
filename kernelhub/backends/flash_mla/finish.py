"""From FlashMLA's results to ours: heads that were added left out, sinks in the denominator, LSE in our form and order.

FlashMLA gives +inf as the LSE of a query that sees nothing. One program takes some heads of one query token.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "heads", "num_seqs"])
def finish_kernel(
    out,
    lse,
    result,
    result_lse,
    sinks,
    cu_seqlens_q,
    tokens,
    heads,
    num_seqs,
    out_sequence,
    out_token,
    out_head,
    out_entry,
    lse_sequence,
    lse_head,
    lse_token,
    result_sequence,
    result_token,
    result_head,
    result_lse_sequence,
    result_lse_head,
    result_lse_token,
    sinks_stride,
    offsets_stride,
    HAS_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    RAGGED: tl.constexpr,
    V: tl.constexpr,
    HEADS: tl.constexpr,
):
    blocks = tl.cdiv(heads, HEADS)
    number = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    sequence, token = number // tokens, number % tokens
    mine = head < heads
    if RAGGED:
        mine &= token < tl.load(cu_seqlens_q + num_seqs * offsets_stride)
    width = tl.arange(0, V)
    value = tl.load(
        result
        + sequence * result_sequence
        + token * result_token
        + head.to(tl.int64)[:, None] * result_head
        + width[None, :],
        mask=mine[:, None],
        other=0.0,
    ).to(tl.float32)
    row_lse = tl.load(
        result_lse + sequence * result_lse_sequence + token * result_lse_token + head * result_lse_head,
        mask=mine,
        other=0.0,
    )
    row_lse = tl.where(row_lse == float("inf"), float("-inf"), row_lse)
    value = tl.where((row_lse == float("-inf"))[:, None], 0.0, value)
    if HAS_SINKS:
        sink = tl.load(sinks + head * sinks_stride, mask=mine, other=0.0).to(tl.float32)
        most = tl.maximum(row_lse, sink)
        finite = tl.where(most == float("-inf"), 0.0, most)
        weight = tl.exp(row_lse - finite)
        total = weight + tl.exp(sink - finite)
        value *= tl.where(total == 0.0, 0.0, weight / total)[:, None]
        row_lse = finite + tl.log(total)
    place = out + sequence * out_sequence + token * out_token
    place += head.to(tl.int64)[:, None] * out_head + width.to(tl.int64)[None, :] * out_entry
    tl.store(place, value.to(out.dtype.element_ty), mask=mine[:, None])
    if HAS_LSE:
        tl.store(lse + sequence * lse_sequence + head.to(tl.int64) * lse_head + token * lse_token, row_lse, mask=mine)
