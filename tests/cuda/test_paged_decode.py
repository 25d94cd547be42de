"""`csrc/cuda/sm_90/paged_decode.cu`, thread by thread on a CPU: any lengths in any parts, and faults that must show."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.attention import decode
from kernelhub.backends.cuda.attention.decode import blocks_for_one, parts_of, tiles_of
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.runtime.counters import counters_of
from tests.cuda import emulated
from tests.dispatch.backends import register

needs_a_compiler = pytest.mark.skipif(not emulated.COMPILER.ok, reason=emulated.COMPILER.reason)

SMALL = AttentionModel("small", 6, 2, 64, 64)
FLOAT8 = torch.float8_e4m3fn
LENGTHS: dict[str, tuple[int, ...]] = {
    "one": (500,),
    "few": (1, 0, 15, 16, 17, 63, 64, 65, 127, 128, 129),
    "long and short": (700, 3, 0, 300),
    "none": (0, 0),
    "many": (70, 6) * 8,
}
# Lengths and queries of sequences, and a bound on the queries.
RAGGED: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "one query each": ((500, 0, 17, 64, 300), (1, 1, 0, 1, 1), 1),
    "few": ((700, 3, 300, 129, 0), (7, 3, 0, 2, 1), 8),  # two tiles of rows
    "more queries than keys": ((3, 40, 1), (5, 6, 4), 9),
    "no queries": ((30, 5), (0, 0), 2),
    "many": ((70, 6) * 8, (1, 0, 3, 1) * 4, 4),
}
SOURCE = "sm_90/paged_decode.cu"
# A line of the source, what is in its place, and whether copies happen when they are asked for, not when waited for.
FAULTS: dict[str, tuple[str, str, bool]] = {
    "copies are not waited for": ("copies_wait<STAGES - 2>", "copies_wait<STAGES - 1>", False),
    "a place is filled while it is read": ("k, v, ring + free", "k, v, ring + ready", True),
    "a key too many": ("key + row + own_row < keys);", "key + row + own_row <= keys);", False),
    "sums keep their scale": ("sums.total[n][j] *= kept;", "", False),
    "values keep their scale": ("sums.at[tile][n][j + 2] *= kept;", "", False),
    "warps do not wait for sums": ("  if (warp >= 2) give();\n  __syncthreads();", "  if (warp >= 2) give();", False),
    "a part too many is merged": ("early_lse[i] = one <= last ?", "early_lse[i] = one <= last + 1 ?", False),
    "slots are mixed up": ("(of_part == first)", "(of_part != first)", False),
    "parts begin at the first sequence": ("made.first_at += sum_of_warp(passed ? cost : 0);", "", False),
    "a tile of rows begins too late": ("blockIdx.x % p.tiles * ROWS", "blockIdx.x % p.tiles * (ROWS + 1)", False),
}
# The same of more parts than warps read at once.
FAULTS_OF_MANY_PARTS: dict[str, tuple[str, str]] = {
    "a part too many is merged": ("one <= last; one += each)", "one <= last + 1; one += each)"),
    "parts that were read are read again": ("first + warp % each + EARLY * each;", "first + warp % each;"),
}
# The same of one launch.
FAULTS_OF_ONE_LAUNCH: dict[str, tuple[str, str]] = {
    "a block merges before the last": ("== (u32)others;", "== (u32)(others - 1);"),
    "counters are not set back": ("if (last) *counter = 0;", ""),
    "sequences share a counter": ("counters + (i64)one * inner +", "counters +"),
    "KV heads share a counter": ("counters + (i64)one * inner + blockIdx.x % inner", "counters + one"),
    "the last part is left out": ("bool there = from + i <= last;", "bool there = from + i < last;"),
    "parts begin a unit early": ("first = (at - of.of.units) / each", "first = (at - of.of.units - 1) / each"),
    "more parts than are read at once lose what was before": ("float kept = exp2_of(top - above);", "float kept = 0;"),
    "their sums are not scaled": ("      total *= kept;\n", ""),
    "only the first sequence without keys is written": ("empty &= empty - 1", "empty = 0"),
    "sequences without keys are those of other parts": ("- empty)) - 1) * parts;", "- empty)) - 1);"),
}
# The same of ragged steps.
FAULTS_OF_RAGGED: dict[str, tuple[str, str]] = {
    "every sequence begins at the first query": (
        "of.first_token = min(max(p.cu_seqlens_q[of.sequence], 0), rows);",
        "of.first_token = 0;",
    ),
    "every sequence has a query more": ("0), p.tokens);\n}", "0) + 1, p.tokens);\n}"),
    "queries are the last but the bound": (
        "int before = of.keys - tokens_of(p, of);",
        "int before = of.keys - p.tokens;",
    ),
    "tiles are those of other sequences": ("first_row = one % p.tiles * ROWS;", "first_row = one / p.tiles * ROWS;"),
    "pages are those of a tile": ("sequence_of(now.of, one) * p.stride_table", "one % p.num_seqs * p.stride_table"),
    "lengths are those of a tile": ("p.seq_lens[sequence_of(made, one)]", "p.seq_lens[one % p.num_seqs]"),
    "the first query is merged with the sequence before": ("[at + 1] <= token", "[at + 1] < token"),
    "all tiles are merged as the first": ("* p.tiles + in_head / ROWS, head", "* p.tiles, head"),
    "a row of no sequence is written": ("in_sequence < of.tokens;", "in_sequence <= of.tokens;"),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(library, "library", emulated.library)
    handle = register("emulated", *emulated.KERNELS)
    yield
    handle.remove()
    left = counters_of(torch.empty(0, device="cpu"), 1)
    assert left is not None
    left.zero_()  # after a fault


def is_right(lengths: tuple[int, ...], tokens: int | None, kv_dtype: torch.dtype, **more: Any) -> bool:
    """Whether a call gives what the reference gives. What no query sees is NaN."""
    arguments = paged_attention_inputs(
        SMALL, seq_lens=[max(n, tokens or 0) for n in lengths], q_lens=tokens, kv_dtype=kv_dtype
    )
    want, want_lse = kernelhub.paged_attention.reference(**arguments | more, return_lse=True)
    out = torch.full_like(arguments["q"], math.nan)
    got, lse = kernelhub.paged_attention(**arguments | more, out=out, return_lse=True, backend="emulated.paged_decode")
    found = compare_out(got, want, largest_value(arguments)).ok
    return found and compare_lse(lse, want_lse) <= lse_tolerance(got.dtype)


def ragged_is_right(name: str, kv_dtype: torch.dtype, **more: Any) -> bool:
    """The same of a ragged step, whose q and out have rows of no sequence: NaN, which stays. Both are strided."""
    lengths, queries, most = RAGGED[name]
    arguments = paged_attention_inputs(SMALL, seq_lens=lengths, q_lens=queries, kv_dtype=kv_dtype)
    q, count = arguments["q"], arguments["q"].shape[0]
    wide = torch.full((count + 3, q.shape[1] + 2, q.shape[2]), math.nan, dtype=q.dtype)
    wide[:count, 1:-1] = q
    arguments |= {"q": wide[:, 1:-1], "max_seqlen_q": most} | more
    want, want_lse = kernelhub.paged_attention.reference(**arguments, return_lse=True)
    room = torch.full_like(wide, math.nan)
    out = room[:, 1:-1]
    got, lse = kernelhub.paged_attention(**arguments, out=out, return_lse=True, backend="emulated.paged_decode")
    untouched = room[count:].isnan().all() and room[:, 0].isnan().all() and room[:, -1].isnan().all()
    found = not count or compare_out(got[:count], want[:count], largest_value(arguments)).ok
    of_lse = not count or compare_lse(lse[:, :count], want_lse[:, :count]) <= lse_tolerance(got.dtype)
    return bool(found and of_lse and untouched)


def in_parts(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    monkeypatch.setattr(decode, "parts_of", lambda *_: parts)


def in_launches(monkeypatch: pytest.MonkeyPatch, launches: int) -> None:
    monkeypatch.setattr(decode.Decode, "merges", launches == 1)


def copy_early(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    """Let copies happen when they are asked for."""
    built = emulated.built

    def of(*given: Any) -> ctypes.CDLL:
        made = built(*given)
        if given[0] == SOURCE:
            ctypes.c_int.in_dll(made, "emulated_early").value = int(early)
        return made

    monkeypatch.setattr(emulated, "built", of)


ANY_PARTS = pytest.mark.parametrize(
    ("launches", "parts", "early"), [(1, 1, False), (2, 3, True), (1, 7, False), (1, 40, True), (2, 40, False)]
)


@needs_a_compiler
@ANY_PARTS
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FLOAT8], ids=["bfloat16", "float8"])
@pytest.mark.parametrize("tokens", [None, 6])
def test_any_lengths_in_any_parts(
    tokens: int | None, kv_dtype: torch.dtype, launches: int, parts: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that fill no tile, and two tiles of them; copies as late and as early as they can be; large scores."""
    in_launches(monkeypatch, launches)
    in_parts(monkeypatch, parts)
    copy_early(monkeypatch, early)
    for lengths in LENGTHS.values():
        assert is_right(lengths, tokens, kv_dtype)
    assert is_right(LENGTHS["long and short"], tokens, kv_dtype, window=40)
    assert is_right(LENGTHS["long and short"], tokens, kv_dtype, scale=1.0)


def fill_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that no block writes hold what would count: memory that happens to be small would hide a read of them."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **more: empty(*size, **more).fill_(99))


@needs_a_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, wrong, early = FAULTS[fault]
    fill_new_memory(monkeypatch)
    in_parts(monkeypatch, 3)
    copy_early(monkeypatch, early)
    emulated.planted(tmp_path, monkeypatch, SOURCE, line, wrong)
    found = [is_right((300, 17, 500), 6, torch.bfloat16, scale=1.0) for _ in range(2)]
    assert not all(found)


@needs_a_compiler
@pytest.mark.parametrize("fault", [None, *FAULTS_OF_MANY_PARTS])
def test_more_parts_than_are_read_at_once(fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_new_memory(monkeypatch)
    in_launches(monkeypatch, 2)
    in_parts(monkeypatch, 60)  # 41 of them have the first sequence, a unit each
    if fault is not None:
        emulated.planted(tmp_path, monkeypatch, SOURCE, *FAULTS_OF_MANY_PARTS[fault])
    assert is_right((5000, 900), None, torch.bfloat16, scale=1.0) == (fault is None)


@needs_a_compiler
@pytest.mark.parametrize("fault", FAULTS_OF_ONE_LAUNCH)
def test_planted_faults_of_one_launch_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run one after another, in the second call backwards."""
    in_launches(monkeypatch, 1)
    emulated.planted(tmp_path, monkeypatch, SOURCE, *FAULTS_OF_ONE_LAUNCH[fault])
    found = []
    for parts, lengths in ((4, (300, 0, 500, 0, 0, 17)), (2, (300, 0, 0, 0, 17)), (60, (5000, 900))):
        in_parts(monkeypatch, parts)
        found += [is_right(lengths, None, torch.bfloat16, scale=1.0) for _ in range(2)]
    assert not all(found)


@needs_a_compiler
def test_one_launch_has_the_same_bits_in_any_order_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves the counters zero, which the next launch begins with."""
    in_launches(monkeypatch, 1)
    in_parts(monkeypatch, 5)
    arguments = paged_attention_inputs(SMALL, seq_lens=(700, 3, 0, 300), dtype=torch.bfloat16)
    forwards, backwards = (kernelhub.paged_attention(**arguments, backend="emulated.paged_decode") for _ in range(2))
    assert torch.equal(forwards, backwards)


@needs_a_compiler
def test_two_launches_where_there_are_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    in_launches(monkeypatch, 1)
    in_parts(monkeypatch, 5)
    monkeypatch.setattr(decode, "counters_of", lambda *_: None)
    assert is_right(LENGTHS["long and short"], None, torch.bfloat16)


@needs_a_compiler
@pytest.mark.parametrize("count", [127, 128])
def test_one_launch_for_many_sequences_of_one_query(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer take less time by two, and steps of more queries were not timed."""
    counted: list[int] = []
    monkeypatch.setattr(decode, "counters_of", lambda q, most: (counted.append(most), counters_of(q, most))[1])
    lengths = ((70, 6, 0, 20) * 32)[:count]
    queries = ((1, 0, 1, 1) * 32)[:count]
    monkeypatch.setitem(RAGGED, "of the test", (lengths, queries, 1))
    assert is_right(lengths, None, torch.bfloat16)
    assert ragged_is_right("of the test", torch.bfloat16)
    assert counted == [2 * count] * (2 if count == 128 else 0)  # of two KV heads
    monkeypatch.setitem(RAGGED, "of the test", (lengths, queries, 2))
    assert ragged_is_right("of the test", torch.bfloat16)
    assert is_right(lengths, 2, torch.bfloat16)
    assert len(counted) in (0, 2)


@needs_a_compiler
@ANY_PARTS
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FLOAT8], ids=["bfloat16", "float8"])
def test_ragged_steps_in_any_parts(
    kv_dtype: torch.dtype, launches: int, parts: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences without queries or without keys, tiles of rows that some sequences have, rows of no sequence."""
    in_launches(monkeypatch, launches)
    in_parts(monkeypatch, parts)
    copy_early(monkeypatch, early)
    for name in RAGGED:
        assert ragged_is_right(name, kv_dtype)
    assert ragged_is_right("few", kv_dtype, window=40, scale=1.0)
    assert ragged_is_right("few", kv_dtype, causal=False)


@needs_a_compiler
@pytest.mark.parametrize("fault", FAULTS_OF_RAGGED)
def test_planted_faults_of_ragged_steps_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 4)
    emulated.planted(tmp_path, monkeypatch, SOURCE, *FAULTS_OF_RAGGED[fault])
    assert not ragged_is_right("few", torch.bfloat16, scale=1.0)


@needs_a_compiler
@pytest.mark.parametrize("prepared_for", [1, 5])
def test_a_ragged_plan_serves_steps_of_more_queries_than_it_was_prepared_for(prepared_for: int) -> None:
    """Nothing holds a step to the bound of its plan, and one without a bound may have any number of queries."""
    arguments = paged_attention_inputs(SMALL, seq_lens=[40, 300, 9], q_lens=[1, 1, 0])
    plan = kernelhub.paged_attention.prepare(**arguments, max_seqlen_q=prepared_for, backend="emulated.paged_decode")
    caches = arguments["k_cache"], arguments["v_cache"]
    for queries, most in (([1, 1, 1], 1), ([4, 0, 5], 5), ([20, 3, 0], 20), ([7, 1, 2], None)):
        offsets = torch.tensor([0, *queries]).cumsum(0).int()
        q = torch.randn(sum(queries), 6, 64, dtype=torch.bfloat16)
        want = kernelhub.paged_attention.reference(**arguments | {"q": q, "cu_seqlens_q": offsets})
        step = plan.begin(arguments["block_table"], arguments["seq_lens"], offsets, max_seqlen_q=most)
        assert compare_out(step.run(q, *caches), want, largest_value(arguments)).ok


@needs_a_compiler
def test_wrong_offsets_read_and_write_nothing_beyond_the_rows_that_there_are() -> None:
    """On a device nothing looks at them before the launch."""
    problem = kernelhub.paged_attention.explain(
        **(arguments := paged_attention_inputs(SMALL, seq_lens=[40, 70, 9], q_lens=[1, 1, 1])),
        max_seqlen_q=2,
        backend="emulated.paged_decode",
    ).problem
    q, values = arguments["q"], Values(0.125, -1, 0)
    room = torch.full((9, *q.shape[1:]), math.nan, dtype=q.dtype)
    for offsets in ([0, 1, 2, 9], [5, 5, 5, 5], [-7, 2, 1, 3], [1 << 30] * 4, [3, 2, 1, 0]):
        given = torch.tensor(offsets, dtype=torch.int32)
        step = PagedStep(arguments["block_table"], arguments["seq_lens"], given, 2)
        caches = arguments["k_cache"], arguments["v_cache"]
        decode.Decode(problem).launch(q, *caches, step, values, room[3:6], None)
        assert room[:3].isnan().all()
        assert room[6:].isnan().all()


@needs_a_compiler
def test_a_plan_for_few_tokens_compiles_nothing_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile has 8 rows or 16, which a group of 5 to 8 heads needs for one token and for two."""
    made: list[str] = []
    built = library.library
    monkeypatch.setattr(library, "library", lambda *given, **named: (made.append(given[0]), built(*given, **named))[1])
    model = AttentionModel("a group of 6", 12, 2, 64, 64)
    arguments = paged_attention_inputs(model, seq_lens=[40, 30], q_lens=4, kv_dtype=torch.bfloat16)
    plan = kernelhub.paged_attention.prepare(**arguments, backend="emulated.paged_decode")
    compiled = len(made)
    for tokens in (1, 2, 4):
        q = arguments["q"][:, :tokens]
        got = plan.run(q, *(arguments[name] for name in ("k_cache", "v_cache", "block_table", "seq_lens")))
        want = kernelhub.paged_attention.reference(**arguments | {"q": q})
        assert compare_out(got, want, largest_value(arguments)).ok
    assert len(made) == compiled


@pytest.mark.parametrize("inner", [1, 2, 8, 16])
@pytest.mark.parametrize("num_seqs", [1, 8, 16, 31, 32, 64, 66, 128, 500])
def test_parts_use_the_gpu_and_cut_no_more_than_they_need(num_seqs: int, inner: int) -> None:
    blocks = 2 * 132
    parts = parts_of(num_seqs, blocks, inner)
    most = blocks // inner
    assert most * 19 <= parts * 20
    assert parts <= most
    if parts < most:  # as many parts of each sequence, or as many sequences of each part
        assert parts % num_seqs == 0 or -(-num_seqs // parts) == -(-num_seqs // most)


@pytest.mark.parametrize(
    ("most", "keys", "blocks"),
    [(264, 8 * 16384, 176), (264, 8 * 16384 + 1, 264), (264, 0, 176), (132, 8, 132), (264, 1 << 33, 264)],
)
def test_one_short_sequence_has_fewer_blocks_than_run_at_once(most: int, keys: int, blocks: int) -> None:
    assert blocks_for_one(132, most, keys) == blocks


@pytest.mark.parametrize("rows", [1, 4, 8, 9, 16, 64])
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_leave_room_for_their_blocks(head_dim: int, itemsize: int, rows: int) -> None:
    tiles = tiles_of(head_dim, itemsize, rows)
    shared_bytes = tiles.constants(head_dim, itemsize)["SHARED_BYTES"]
    shared_bytes += 128  # in which a block that merges notes that it is the last
    assert shared_bytes <= 227 << 10
    assert tiles.blocks * (shared_bytes + 1024) <= 228 << 10  # the system has a KB of each block


@pytest.mark.parametrize(
    ("kernel", "facets"),
    [
        ("cuda.paged_decode", {}),
        ("cuda.paged_decode", {"head_dim_qk": 256}),
        ("cuda.paged_decode", {"head_dim_qk": 64, "kv_scale": "tensor"}),
        ("triton.split_kv", {"head_dim_qk": 64}),
        ("triton.split_kv", {"window_left": True}),
        ("triton.split_kv", {"num_q_heads": 32, "num_kv_heads": 1}),
        ("triton.split_kv", {"q_len": "few"}),
        ("cuda.paged_decode", {"ragged": True}),
        ("cuda.paged_decode", {"ragged": True, "kv_scale": "tensor"}),
        ("triton.split_kv", {"ragged": True, "window_left": True}),
    ],
    ids=str,
)
def test_hopper_selects_it_where_it_was_faster(kernel: str, facets: dict[str, Any]) -> None:
    machine = SimulatedMachine({"triton": "3.6.0", "cuda": "13.0.3"})
    found = kernelhub.explain("paged_attention", device="H200", machine=machine, **{"q_len": "one"} | facets)
    assert found.kernel is not None
    assert found.kernel.name == kernel
