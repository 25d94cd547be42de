# mypy: ignore-errors
"""Rows of other ranks, of which each thread waits for its own part.

A look at a whole row ends with a reduction over the program, which asks whether something is missing. Until a row has
come a program makes such looks one after the other, each of the whole row: what comes shortly after a look has begun
waits for that and the next one. Here a thread reads its own units of 16 bytes again until none has an empty element,
and the program adds up only once. That takes a loop of each thread, which Triton does not have: it is in PTX.

Such a loop ends after so many reads, too. Then, or where the row itself has a NaN, the caller looks again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.slots import slot_at

_READS = 2048  # of a thread in one look, about a millisecond
WORDS = 4  # of 32 bits in a unit
# Of 16-bit elements: one of a word w is all ones if (0xFFFEFFFE - w) & w has a bit of 0x80008000, the usual test of
# ~w for a zero. Of 32-bit elements: the word is all ones.
TEST = {2: "sub.u32 t, 0xFFFEFFFE, {word}; and.b32 t, t, {word}; or.b32 a, a, t;", 4: "max.u32 a, a, {word};"}
LACKS = {2: "and.b32 a, a, 0x80008000; setp.ne.u32 e, a, 0;", 4: "setp.eq.u32 e, a, 0xFFFFFFFF;"}


@triton.constexpr_function
def units_of(block, item_bytes):
    """Units of 16 bytes of a block."""
    return block * item_bytes // 16


@triton.constexpr_function
def code(units, item_bytes):
    """What a thread does for its `units`: operands are the four words of each, its address, and whether it is read."""
    names = [[f"${word * units + unit}" for word in range(WORDS)] for unit in range(units)]
    lines = [".reg .pred e, " + ", ".join(f"m{unit}" for unit in range(units)) + ";", ".reg .b32 n, t, a;"]
    lines.append(f"mov.u32 n, {_READS};")
    for unit in range(units):
        lines.append(f"setp.ne.b32 m{unit}, ${(WORDS + 1) * units + unit}, 0;")
        lines += [f"mov.b32 {word}, 0;" for word in names[unit]]
    lines.append("READ:")
    for unit in range(units):
        words = ", ".join(names[unit])
        lines.append(f"@m{unit} ld.volatile.global.v4.b32 {{{words}}}, [${WORDS * units + unit}];")
    lines.append("mov.b32 a, 0;")
    lines += [TEST[item_bytes].format(word=word) for words in names for word in words]
    lines += [LACKS[item_bytes], "sub.u32 n, n, 1;", "setp.ne.and.u32 e, n, 0, e;", "@e bra READ;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def constraints(units):
    """Of the operands of `code`; results are written before all addresses have been read for the last time."""
    return ",".join(["=&r"] * (WORDS * units) + ["l"] * units + ["r"] * units)


@triton.jit
def await_row(slot, x, H: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr):
    """The bits of a row [BLOCK] that another rank sends to an address, once all have come, or after some time.

    H elements are whole units of 16 bytes.
    """
    SIZE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    UNITS: tl.constexpr = units_of(BLOCK, SIZE)
    EACH: tl.constexpr = (UNITS + THREADS - 1) // THREADS
    unit = tl.arange(0, UNITS)
    first, second, third, fourth = tl.inline_asm_elementwise(
        code(EACH, SIZE),
        constraints(EACH),
        [slot + unit * 16, (unit * 16 < H * SIZE).to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=EACH,
    )
    pairs = tl.join(tl.join(first, second), tl.join(third, fourth))  # [unit, word % 2, word // 2]
    if SIZE == 4:
        bits = tl.reshape(tl.permute(pairs, (0, 2, 1)), [BLOCK])
    else:
        halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
        bits = tl.reshape(tl.permute(halves, (0, 2, 1, 3)), [BLOCK])
    return bits


@triton.jit
def look_patiently(
    own,
    x,
    at,
    row,
    mask,
    slots,
    here,
    sender,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """As `at_once.look_only`, but each thread waits for its elements. `at` begins at element `row` of a slot."""
    words = ()
    for place in tl.static_range(WORLD - 1):
        slot = slots[RANK] + here + place * sender
        if CLOCK:
            start = slot + row.to(tl.int64) * (x.dtype.element_ty.primitive_bitwidth // 8)
            bits = await_row(start, x, H, BLOCK, THREADS)
        else:  # the interpreter has no PTX, and reads again in the next look
            bits = tl.load(slot_at(slot, x) + at, mask, other=0, volatile=True)
        words = words + (bits,)  # noqa: RUF005  Triton unpacks none
    total = own
    for peer in tl.static_range(WORLD):
        value = own
        if peer != RANK:
            other: tl.constexpr = peer if peer < RANK else peer - 1
            value = words[other].to(x.dtype.element_ty, bitcast=True).to(tl.float32)
        total = value if peer == 0 else total + value
    return total
