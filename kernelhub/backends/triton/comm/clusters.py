# mypy: ignore-errors
"""Programs of one row that are a cluster: they run at once, on multiprocessors that reach each other's shared memory.

A program of `polled_rms_norm.py` reads all of a row for the sum of its squares. In a cluster each reads a part, and
stores the sum of squares of each of its warps in the shared memory of all: one barrier of the cluster, in place of the
barriers of a program that adds up for itself. Triton has no such store, nor a loop of each thread: both are PTX.

A warp that waits until its time is over stores a word that no sum is, so all programs of the row learn of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernelhub.backends.triton.comm.polled import LACKS, TEST, WORDS

_READS = 2048  # of a thread between looks at the clock, about a millisecond
_LATE = 0xFFC01A7E  # a NaN that no sum gives


@triton.constexpr_function
def each_of(elements, item_bytes, threads):
    """Units of 16 bytes of a thread."""
    return (elements * item_bytes // 16 + threads - 1) // threads


@triton.constexpr_function
def waiting_code(units, item_bytes):
    """What a thread does until its `units` have come, or until a time.

    Operands: four words of each unit, their addresses, whether a unit is read, and the time, once for each.
    """
    names = [[f"${word * units + unit}" for word in range(WORDS)] for unit in range(units)]
    address, read, until = (place * units for place in range(WORDS, WORDS + 3))
    lines = [".reg .pred e, " + ", ".join(f"m{unit}" for unit in range(units)) + ";", ".reg .b32 n, t, a;"]
    lines.append(".reg .b64 g;")
    for unit in range(units):
        lines.append(f"setp.ne.b32 m{unit}, ${read + unit}, 0;")
        lines += [f"mov.b32 {word}, 0;" for word in names[unit]]
    lines += ["LOOK:", f"mov.u32 n, {_READS};", "READ:"]
    for unit in range(units):
        words = ", ".join(names[unit])
        lines.append(f"@m{unit} ld.volatile.global.v4.b32 {{{words}}}, [${address + unit}];")
    lines.append("mov.b32 a, 0;")
    lines += [TEST[item_bytes].format(word=word) for words in names for word in words]
    lines += [LACKS[item_bytes], "@!e bra CAME;"]
    lines += ["sub.u32 n, n, 1;", "setp.ne.u32 e, n, 0;", "@e bra READ;"]
    lines += ["mov.u64 g, %globaltimer;", f"setp.lt.u64 e, g, ${until};", "@e bra LOOK;", "CAME:"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def waiting_constraints(units):
    """Of the operands of `waiting_code`."""
    return ",".join(["=&r"] * (WORDS * units) + ["l"] * units + ["r"] * units + ["l"] * units)


@triton.jit
def await_part(start, x, sent, until, PART: tl.constexpr, THREADS: tl.constexpr):
    """The bits of a part of a row [PART] that another rank sends to an address; what lacks at `until` is empty.

    Only the first `sent` bytes are read, whole units of 16.
    """
    SIZE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    UNITS: tl.constexpr = PART * SIZE // 16
    EACH: tl.constexpr = each_of(PART, SIZE, THREADS)
    unit = tl.arange(0, UNITS)
    first, second, third, fourth = tl.inline_asm_elementwise(
        waiting_code(EACH, SIZE),
        waiting_constraints(EACH),
        [start + unit * 16, (unit * 16 < sent).to(tl.int32), unit.to(tl.int64) * 0 + until],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=EACH,
    )
    pairs = tl.join(tl.join(first, second), tl.join(third, fourth))  # [unit, word % 2, word // 2]
    if SIZE == 4:
        bits = tl.reshape(tl.permute(pairs, (0, 2, 1)), [PART])
    else:
        halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
        bits = tl.reshape(tl.permute(halves, (0, 2, 1, 3)), [PART])
    return bits


@triton.constexpr_function
def beginning_code(programs, warps):
    """Make a place for the sums of all warps of a row, 16 bytes behind what says that they have come.

    Results: the place, and where lane p of a warp stores its warp's sum in program p, and says that it has come. The
    two are 0 for lanes beyond the programs. They are computed here, as values are on their way then.
    """
    sums = programs * warps
    return f"""{{
.shared .align 16 .b8 place[{16 + 4 * up_to_four(sums)}];
.reg .pred p, q;
.reg .b32 t, w;
mov.u32 $0, place;
mov.u32 t, %tid.x;
mov.u32 w, %cluster_ctarank;
setp.eq.u32 p, t, 0;
@p mbarrier.init.shared::cta.b64 [$0], 1;
@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {4 * sums};
@p fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned;
mul.lo.u32 w, w, {warps};
shr.u32 $2, t, 5;
add.u32 w, w, $2;
mad.lo.u32 w, w, 4, $0;
add.u32 w, w, 16;
and.b32 t, t, 31;
setp.lt.u32 q, t, {programs};
mov.b32 $1, 0;
mov.b32 $2, 0;
@q mapa.shared::cluster.u32 $1, w, t;
@q mapa.shared::cluster.u32 $2, $0, t;
}}"""


@triton.constexpr_function
def up_to_four(count):
    """Words of whole loads."""
    return -(-count // 4) * 4


@triton.jit
def begin(SPLIT: tl.constexpr, THREADS: tl.constexpr):
    """The place of the sums of a row's warps, in this program's shared memory, which the others may not use yet.

    And two addresses of each thread: see `beginning_code`.
    """
    return tl.inline_asm_elementwise(
        beginning_code(SPLIT, THREADS // 32),
        "=&r,=&r,=&r",
        [],
        dtype=(tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def await_programs():
    """Wait until all programs of the cluster have begun."""
    tl.inline_asm_elementwise("barrier.cluster.wait.aligned; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def sharing_code(elements, item_bytes):
    """Add up the squares of a warp, and store the sum at the place of this warp in each program.

    Operands: a result that nothing uses for each element, the elements, the bits that came, in words, and the two
    addresses of this thread, once for each element.
    """
    values = [f"${elements + index}" for index in range(elements)]
    words = [f"${2 * elements + index}" for index in range(elements * item_bytes // 4)]
    there, come = (f"${2 * elements + len(words) + of * elements}" for of in range(2))
    lines = [".reg .pred p, q;", ".reg .b32 a, b, c, t;", ".reg .f32 s, u;"]
    lines += [f"mul.f32 s, {values[0]}, {values[0]};", f"mul.f32 u, {values[1]}, {values[1]};"]  # two chains
    for index in range(2, elements):
        into = "su"[index % 2]
        lines.append(f"fma.rn.f32 {into}, {values[index]}, {values[index]}, {into};")
    lines.append("add.f32 s, s, u;")
    for distance in (16, 8, 4, 2, 1):
        lines += ["mov.b32 a, s;", f"shfl.sync.bfly.b32 b, a, {distance}, 31, 0xffffffff;", "mov.b32 u, b;"]
        lines.append("add.f32 s, s, u;")
    lines += ["mov.b32 c, s;", "setp.num.f32 p, s, s;", "@p bra WHOLE;"]
    # All lanes have the same NaN: of the row, or of an element that lacks.
    lines += ["mov.b32 a, 0;", *[TEST[item_bytes].format(word=word) for word in words]]
    lines += [LACKS[item_bytes].replace(" e,", " q,"), "vote.sync.any.pred q, q, 0xffffffff;"]
    lines += [f"selp.b32 c, {_LATE}, c, q;", "WHOLE:"]
    # A lane for each program.
    lines.append(f"setp.ne.u32 q, {come}, 0;")
    lines.append(f"@q st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [{there}], c, [{come}];")
    lines += [f"mov.b32 ${index}, 0;" for index in range(elements)]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def sharing_constraints(elements, item_bytes):
    """Of the operands of `sharing_code`."""
    return ",".join(["=&r"] * elements + ["r"] * (3 * elements + elements * item_bytes // 4))


@triton.jit
def share_squares(total, bits, there, come, PART: tl.constexpr, THREADS: tl.constexpr):
    """Send the squares of this program's part of a row, `total` [PART], to the programs of the row.

    `there` and `come` are the addresses of `begin`.
    """
    EACH: tl.constexpr = PART // THREADS
    SIZE: tl.constexpr = bits.dtype.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        sharing_code(EACH, SIZE),
        sharing_constraints(EACH, SIZE),
        [total, bits, tl.zeros([PART], tl.int32) + there, tl.zeros([PART], tl.int32) + come],
        dtype=tl.int32,
        is_pure=False,
        pack=EACH,
    )


@triton.constexpr_function
def rooting_code(programs, warps, width):
    """From the sums of all warps of a row to one over the root of the mean.

    Operands: that, whether a warp lacked something, the place of the sums, and eps.
    """
    sums = programs * warps
    words = up_to_four(sums)
    lines = [".reg .pred p, q;", f".reg .b32 v<{words}>;", ".reg .f32 s, f<4>;", "WAIT:"]
    lines += ["mbarrier.try_wait.parity.shared::cta.b64 p, [$2], 0;", "@!p bra WAIT;"]
    for start in range(0, words, 4):
        names = ", ".join(f"v{start + index}" for index in range(4))
        lines.append(f"ld.shared.v4.b32 {{{names}}}, [$2+{16 + 4 * start}];")
    chains = min(4, sums)
    lines += [f"mov.b32 f{index}, v{index};" for index in range(chains)]
    for index in range(chains, sums):
        lines += [f"mov.b32 s, v{index};", f"add.f32 f{index % chains}, f{index % chains}, s;"]
    lines += ["add.f32 f2, f2, f3;"] if chains > 3 else []
    lines += ["add.f32 f0, f0, f1;"] if chains > 1 else []
    lines += ["add.f32 f0, f0, f2;"] if chains > 2 else []
    lines += ["mov.b32 $1, 0;", "setp.num.f32 p, f0, f0;", "@p bra WHOLE;"]
    for index in range(sums):  # a row with a NaN of its own is not late
        lines += [f"setp.eq.b32 q, v{index}, {_LATE};", "selp.b32 $1, 1, $1, q;"]
    lines += ["WHOLE:", f"div.full.f32 s, f0, {float(width)!r};".replace("e+", "e"), "add.f32 s, s, $3;"]
    lines.append("rsqrt.approx.f32 $0, s;")
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def root_of_row(place, eps, H: tl.constexpr, SPLIT: tl.constexpr, THREADS: tl.constexpr):
    """One over the root of the mean of a row's squares plus eps, once all have come, and whether a part lacks."""
    return tl.inline_asm_elementwise(
        rooting_code(SPLIT, THREADS // 32, H),
        "=&f,=&r,r,f",
        [place, eps],
        dtype=(tl.float32, tl.int32),
        is_pure=False,
        pack=1,
    )
