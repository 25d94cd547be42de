"""The schedule and the merge of `csrc/cuda/sm_90/mla_decode.cu`, emulated: what needs no tensor cores."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from kernelhub.backends.cuda.nvrtc import SOURCES
from kernelhub.backends.shared.latent_rows import cut
from tests.cuda.emulated import COMPILER, EmulatedLibrary, folder

pytestmark = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")

PAIR, LATENT, HEADS = 128, 512, 2
BEFORE = """
#include "formats.h"
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
static inline int min(int x, int y) { return x < y ? x : y; }
static inline int max(int x, int y) { return x > y ? x : y; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline unsigned __ballot_sync(unsigned, bool x) {
  return __reduce_add_sync(~0u, (unsigned)x << threadIdx.x % 32);
}
static inline int __shfl_sync(unsigned, int x, int lane) { return emulated_exchange(x, lane); }
static inline float log2f(float x) { return __builtin_log2f(x); }
static inline float exp2_of(float x) { return __builtin_exp2f(x); }
static inline float __int_as_float(int x) { return float_of((unsigned)x); }
constexpr int LATENT = 512;
"""
AFTER = """
struct Schedule { int *seq_lens, *walked; i64 num_seqs, room; };
void schedule(const Schedule& p) {
  Part part = part_of_program(blockIdx.x, gridDim.x, p.seq_lens, p.num_seqs, p.room);
  int at = part.first_at;
  for (int sequence = part.first; sequence < part.last; sequence++) {
    Segment of = segment(p.seq_lens, sequence, at, part, p.room);
    int* to = p.walked + (blockIdx.x * p.num_seqs + sequence) * 2;
    if (threadIdx.x == 0 && of.low < of.high) to[0] = of.low, to[1] = of.high;
  }
}
EMULATED(schedule, Schedule)
struct Merge {
  bf16* out;
  float *lse, *part_out, *part_lse, *sinks;
  int* seq_lens;
  i64 num_seqs, rows, parts, tiles, room, each;
};
void merge(const Merge& p) {
  mla_merge(p.out, p.lse, p.part_out, p.part_lse, p.sinks, p.seq_lens, p.num_seqs, p.rows, p.parts, p.tiles, p.room,
            p.each, 0, p.rows * LATENT, HEADS * LATENT, LATENT, p.rows, 1, HEADS);
}
EMULATED(merge, Merge)
"""


@functools.cache
def compiled(sinks: bool) -> EmulatedLibrary:
    """The parts of the source that have no instructions of tensor cores."""
    text = (SOURCES / "sm_90" / "mla_decode.cu").read_text()
    constants = text[text.index("constexpr int PAIR") : text.index("// --- the schedule")]
    schedule = text[text.index("// --- the schedule") : text.index("// --- shared memory")]
    merge = text[text.index("// A row of a sequence from its parts") :]
    place = folder() / "latent"
    place.mkdir(exist_ok=True)
    (place / "formats.h").write_text((SOURCES / "formats.h").read_text())
    (place / "merge.cu").write_text(BEFORE + constants + schedule + merge + AFTER)
    return EmulatedLibrary("merge.cu", {"HEADS": HEADS, "HAS_LSE": 1, "HAS_SINKS": int(sinks)}, place)


def walked(library: EmulatedLibrary, lengths: torch.Tensor, parts: int, room: int) -> torch.Tensor:
    """The pairs [low, high) of each sequence that each program walks."""
    found = torch.zeros(parts, len(lengths), 2, dtype=torch.int32)
    library.kernel("schedule", "PPqq")(0, parts, 32, lengths, found, len(lengths), room)
    return found


LENGTHS: dict[str, tuple[int, ...]] = {
    "one": (8192,),
    "few": (1, 0, 63, 64, 65, 127, 128, 129),
    "long and short": (8191, 3, 0, 4097),
    "none": (0, 0),
    "many": (700, 64) * 40,
    "alike": (2048,) * 33,
    "too long and negative": (99999, -5, 300),
}


@pytest.mark.parametrize("parts", [1, 5, 66, 132])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_each_pair_is_walked_once_and_merged(lengths: tuple[int, ...], parts: int) -> None:
    """Every pair of pages by one program, parts of nearly equal work; and the merge gives the whole softmax."""
    sinks = torch.tensor([0.5, -math.inf]) if parts % 2 else None
    library = compiled(sinks is not None)
    room, tokens, given = 8192, 3, torch.tensor(lengths, dtype=torch.int32)
    pairs = [-(-min(max(n, 0), room) // PAIR) for n in lengths]
    found = walked(library, given, parts, room)
    for sequence, count in enumerate(pairs):
        of = [range(*found[part, sequence].tolist()) for part in range(parts)]
        assert [pair for one in of for pair in one] == list(range(count))
    costs = [sum(high - low for low, high in found[part].tolist()) for part in range(parts)]
    assert max(costs) <= max(2, -(-sum(count + 2 for count in pairs if count) // parts))

    for each in (1, 4, 16):
        generator = torch.Generator().manual_seed(0)
        rows, tiles = tokens * HEADS, 1
        scores = [torch.randn(rows, count, generator=generator) * 4 for count in pairs]  # log2 of each pair's weight
        values = [torch.randn(rows, count, LATENT, generator=generator) for count in pairs]
        part_out = torch.full((parts * 2 * tiles * 64, LATENT), math.nan)
        part_lse = torch.full((parts * 2 * tiles * 64,), math.nan)
        out = torch.full((len(pairs), rows, LATENT), 77.0, dtype=torch.bfloat16)
        lse = torch.full((len(pairs), rows), 77.0)
        whole = set()
        for part, sequence in [(p, s) for p in range(parts) for s in range(len(pairs))]:
            low, high = found[part, sequence].tolist()
            if high - low == pairs[sequence]:
                whole.add(sequence) if high else None
            elif low < high:
                of = scores[sequence][:, low:high]
                place = (part * 2 + (low == 0)) * tiles * 64
                part_out[place : place + rows] = (
                    torch.softmax(of * math.log(2), 1)[:, :, None] * values[sequence][:, low:high]
                ).sum(1)
                part_lse[place : place + rows] = torch.logsumexp(of * math.log(2), 1) / math.log(2)
        kernel: Any = library.kernel("merge", "PPPPPPqqqqqq")
        blocks = len(pairs) * -(-rows // each)
        numbers = (len(pairs), rows, parts, tiles, room, each)
        kernel(0, blocks, 128, out, lse, part_out, part_lse, 0 if sinks is None else sinks, given, *numbers)
        for sequence, count in enumerate(pairs):
            if sequence in whole:  # the program that walked it has written it
                assert (out[sequence] == 77).all()
                assert (lse[sequence] == 77).all()
                continue
            logits = scores[sequence] * math.log(2)
            if sinks is not None:
                logits = torch.cat([logits, sinks.repeat(tokens)[:, None]], 1)
            want_lse = torch.logsumexp(logits, 1) if logits.shape[1] else torch.full((rows,), -math.inf)
            weights = torch.exp(logits - want_lse[:, None]).nan_to_num(0.0)[:, :count]
            want = (weights[:, :, None] * values[sequence]).sum(1)
            assert (out[sequence].float() - want).abs().max() < 0.02
            assert torch.allclose(lse[sequence], want_lse, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 16, 64, 65, 128, 256])
@pytest.mark.parametrize("num_seqs", [1, 8, 31, 32, 64, 66, 128, 500])
def test_parts_use_the_gpu_and_cut_no_more_than_they_need(rows: int, num_seqs: int) -> None:
    tiles, parts = cut(rows, num_seqs, 132)
    assert tiles == -(-rows // 64)
    assert 132 // tiles * 19 <= parts * 20
    assert parts * tiles <= 132
    if tiles == 2 and num_seqs == 64:
        assert parts == 64
