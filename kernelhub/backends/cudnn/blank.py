"""Results of queries whose sequence has no keys, where cuDNN 9.19 gives NaN or undefined values: zeros, and -inf.

One program per sequence, which mostly has nothing to do.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row", "heads"])
def blank_kernel(out, lse, q_at, k_lens, row, heads, HAS_LSE: tl.constexpr, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    if tl.load(k_lens + sequence) == 0:
        first = tl.load(q_at + sequence).to(tl.int64)
        tokens = tl.load(q_at + sequence + 1) - first
        for start in range(0, tokens * row, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], out.dtype.element_ty)
            tl.store(out + first * row + entry, zeros, mask=entry < tokens * row)
        if HAS_LSE:
            for start in range(0, tokens * heads, BLOCK):
                entry = start + tl.arange(0, BLOCK)
                nothing = tl.full([BLOCK], float("-inf"), tl.float32)
                tl.store(lse + first * heads + entry, nothing, mask=entry < tokens * heads)
