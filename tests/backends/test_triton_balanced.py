"""The lengths of a batch share its keys out: every key is read once, and the results are those of the reference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import triton
import triton.language as tl

import kernelhub
from kernelhub.backends.triton.attention import adapter as adapters
from kernelhub.backends.triton.attention.balanced import (
    blocks_of,
    blocks_of_part,
    item_of,
    part_size,
    parts_before_last,
    stored_before,
)
from kernelhub.backends.triton.attention.splits import Division
from kernelhub.backends.triton.attention.tiles import Tiles
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.models.shapes import AttentionModel
from tests.backends.test_triton import Interpreted
from tests.conftest import DEVICE, HAS_GPU
from tests.contract.attention import PagedContract

pytestmark = pytest.mark.device
BLOCK, CHUNK = 16, 64


@triton.jit
def _parts(
    found,
    num_seqs,
    splits,
    shares,
    filled,
    least,
    limit,
    cu,
    seq_lens,
    q_tokens,
    kv_tokens,
    max_rows,
    left,
    GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_LEFT: tl.constexpr,
):
    """(sequence, part, first block, block past the last, place in memory, blocks of the sequence) of each program."""
    each, slack, wanted = part_size(
        num_seqs, splits, shares, filled, least, cu, cu, seq_lens, q_tokens, kv_tokens, max_rows,
        left, 0, GROUP, RAGGED, 1, BLOCK_N, CHUNK, HAS_LEFT, True,
    )  # fmt: skip
    sequence, part = item_of(
        tl.program_id(0), each, slack, wanted, limit, num_seqs, cu, cu, seq_lens, q_tokens, kv_tokens, max_rows,
        left, 0, GROUP, RAGGED, 1, BLOCK_N, HAS_LEFT, True,
    )  # fmt: skip
    row = found + tl.program_id(0) * 6
    if sequence >= num_seqs:
        tl.store(row, sequence)
        return
    blocks = blocks_of(
        sequence, num_seqs, cu, cu, seq_lens, q_tokens, kv_tokens, max_rows,
        left, 0, GROUP, RAGGED, 1, BLOCK_N, HAS_LEFT, True,
    )  # fmt: skip
    whole = parts_before_last(blocks, each, slack, limit)
    part = tl.where(part < 0, whole, part)
    if part > whole:
        return
    tl.store(row, sequence)
    before = stored_before(
        sequence, each, slack, wanted, limit, num_seqs, cu, cu, seq_lens, q_tokens, kv_tokens, max_rows,
        left, 0, GROUP, RAGGED, 1, BLOCK_N, HAS_LEFT, True,
    )  # fmt: skip
    tl.store(row + 1, part)
    size = blocks_of_part(blocks, each, limit)
    tl.store(row + 2, part * size)
    tl.store(row + 3, tl.where(part == whole, blocks, (part + 1) * size))
    tl.store(row + 4, tl.where(whole > 0, before + part, -1))
    tl.store(row + 5, blocks)


def parts_of(
    seq_lens: list[int],
    parts: int,
    shares: int,
    window: int | None = None,
    queries: list[int] | None = None,
    room: int = 1 << 20,
    most: int = 1 << 30,
    filled: int = 0,
    least: int = 0,
) -> list[tuple[int, ...]]:
    """What each program of the grid of a division finds."""
    programs = Division(Tiles(16, BLOCK, 4, 1), parts, shares).items(len(seq_lens))
    found = torch.full((programs, 6), -1, dtype=torch.int32, device=DEVICE)
    cu = torch.tensor([0, *(queries or [])]).cumsum(0).to(torch.int32).to(DEVICE)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    q_tokens = 1 if queries is None else sum(queries)
    _parts[(programs,)](
        found, len(seq_lens), parts, shares, filled, least, most.bit_length() - 1, cu, lengths, q_tokens, room, 16,
        window or 0, GROUP=4, RAGGED=queries is not None, BLOCK_N=BLOCK, CHUNK=CHUNK, HAS_LEFT=window is not None,
    )  # fmt: skip
    return [tuple(row) for row in found.tolist()]


def drawn(seed: int) -> tuple[list[int], int, int]:
    """Lengths, most parts of equal ones, and shares."""
    draw = random.Random(seed)
    count = draw.choice((1, 2, 3, 7, 20, 40, 300))
    longest = draw.choice((1, 40, 700, 5000))
    lengths = [draw.choice((0, 1, 16, 17, longest, draw.randrange(longest + 1))) for _ in range(count)]
    if seed % 3 == 0:
        lengths = [longest + draw.randrange(3) for _ in range(count)]
    return lengths, draw.choice((1, 2, 5)), draw.choice((1, 3, 50))


class TestParts:
    @pytest.mark.parametrize("seed", range(1, 13))  # the default tier has the first, of few sequences
    @pytest.mark.parametrize("most", [8, 1 << 30])
    def test_each_key_is_in_one_part_whose_place_is_its_own(self, most: int, seed: int) -> None:
        lengths, parts, shares = drawn(seed)
        found = parts_of(lengths, parts, shares, most=most)
        held = [row for row in found if 0 <= row[0] < len(lengths)]
        for sequence, length in enumerate(lengths):
            own = sorted(row[1:] for row in held if row[0] == sequence)
            assert [row[0] for row in own] == list(range(len(own)))  # at least one, of no keys if it has none
            edges = [row[1] for row in own] + [own[-1][2]]
            assert len(own) <= most
            assert edges[0] == 0
            assert edges[1:] == [row[2] for row in own]
            assert edges[-1] == -(-length // BLOCK)
            places = [row[3] for row in own]
            assert places == ([-1] if len(own) == 1 else list(range(places[0], places[0] + len(own))))
        places = [row[4] for row in held if row[4] >= 0]
        assert len(set(places)) == len(places)
        assert max(places, default=-1) < Division(Tiles(16, BLOCK, 4, 1), parts, shares).stored(len(lengths))

    def test_programs_without_keys_come_last(self) -> None:
        found = parts_of([900, 20, 0, 300], 2, 8)
        empty = [row[0] >= 4 for row in found]
        assert empty == sorted(empty)

    @pytest.mark.parametrize("parts", [1, 2, 5])
    @pytest.mark.parametrize("length", [1, 100, 1000])
    def test_equal_lengths_have_the_parts_of_the_host_s_rule(self, length: int, parts: int) -> None:
        found = [row for row in parts_of([length] * 5, parts, 100) if row[0] < 5]
        blocks = -(-length // BLOCK)
        each = -(-blocks // max(1, min(parts, -(-length // CHUNK))))
        assert len(found) == 5 * -(-blocks // each)
        assert {row[3] - row[2] for row in found if row[3] < blocks} <= {each}

    def test_equal_lengths_that_do_not_fill_a_round_share_all_keys(self) -> None:
        found = [row for row in parts_of([1600] * 5, 1, 8, filled=8) if row[0] < 5]
        assert sorted(row[3] - row[2] for row in found) == [37] * 5 + [63] * 5
        assert len([row for row in parts_of([1600] * 8, 1, 8, filled=8) if row[0] < 8]) == 8

    @pytest.mark.parametrize(("length", "parts"), [(64, 1), (240, 1), (255, 3), (512, 3), (4000, 3)])
    def test_equal_lengths_of_fewer_keys_than_so_many_have_one_part(self, length: int, parts: int) -> None:
        found = [row for row in parts_of([length] * 5, 3, 8, filled=15, least=256) if row[0] < 5]
        assert len(found) == 5 * parts

    def test_a_long_sequence_is_shared_by_many(self) -> None:
        found = [row for row in parts_of([16_000, *[100] * 20], 1, 50) if row[0] == 0]
        assert len(found) > 40

    def test_a_window_and_the_table_s_room_bound_the_keys(self) -> None:
        assert {row[0]: row[5] for row in parts_of([900, 20], 1, 4, window=100)} == {0: 8, 1: 2} | {
            row[0]: -1 for row in parts_of([900, 20], 1, 4, window=100) if row[0] >= 2
        }
        assert max(row[5] for row in parts_of([900, 20], 1, 4, room=64)) == 4

    def test_sequences_of_the_prefill_kernel_have_no_keys(self) -> None:
        found = parts_of([900, 800, 700], 1, 8, queries=[1, 5, 0])
        assert [max(row[5] for row in found if row[0] == sequence) for sequence in range(3)] == [57, 0, 0]
        assert sum(row[0] in (1, 2) for row in found) == 2


def shared(parts: int, shares: int, ahead: bool = False) -> Any:
    """A rule by which the lengths of every call share the keys out, if a tile has all rows of a sequence."""

    def divide(self: Any, num_seqs: int, rows: int, kv_bound: int) -> Division:
        tiles = replace(self._split_tiles(rows), ahead=ahead)
        return Division(tiles, parts, shares if rows <= tiles.block_m else 0)

    return divide


@pytest.fixture(params=[(2, 9, False)])
def shares(request, monkeypatch) -> Iterator[None]:
    """Lengths share out keys, a few of each part, whatever the host's rule is."""
    with monkeypatch.context() as patched:
        for kind in (adapters.SplitKV, adapters.Mixed):
            patched.setattr(kind, "divide", shared(*request.param))
        patched.setattr(adapters, "BALANCE", True)
        patched.setattr(adapters, "CHUNK", 64)
        kernelhub.paged_attention.op._forget()
        yield
    kernelhub.paged_attention.op._forget()


@pytest.mark.usefixtures("shares")
class TestShared(Interpreted, PagedContract):
    kernel = "triton.split_kv"
    quick = not HAS_GPU


@pytest.mark.usefixtures("shares")
@pytest.mark.parametrize("shares", [(5, 0, True)], indirect=True, ids=["5 parts"])
class TestAhead(Interpreted, PagedContract):
    """Entries of the block table are read a block before they are needed."""

    kernel = "triton.split_kv"
    quick = not HAS_GPU


@pytest.mark.usefixtures("shares")
class TestSharedOfMixed(Interpreted, PagedContract):
    kernel = "triton.mixed"
    quick = not HAS_GPU
    plain: ClassVar = {"seq_lens": (40, 9, 77), "q_lens": (7, 1, 30)}
    rich: ClassVar = plain | {"causal": True, "window": (5, -1)}


@pytest.mark.usefixtures("shares")
@pytest.mark.parametrize("shares", [(2, 9, False), (2, 9, True)], indirect=True, ids=["", "ahead"])
class TestUnequalLengths:
    @pytest.mark.parametrize(
        ("heads", "more"),
        [
            ((4, 2), {}),
            ((4, 1), {"window": 300}),
            ((14, 2), {"softcap": 4.0}),
            ((4, 1), {"q_lens": 3, "seq_lens": (900, 64, 3, 129)}),
            ((4, 2), {"q_lens": (1, 3, 1, 70, 0), "seq_lens": (300, 64, 1, 129, 50)}),
            ((4, 1), {"kv_dtype": torch.float8_e4m3fn}),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("one_launch", [True, False])
    def test_it_gives_the_reference_whatever_was_in_the_memory_of_parts(
        self, one_launch, heads, more, monkeypatch
    ) -> None:
        monkeypatch.setattr(adapters, "ONE_LAUNCH", one_launch)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *shape, **of: poisoned(empty(*shape, **of)))
        inputs, features = dict(more), {}
        for name in ("window", "softcap"):
            if name in inputs:
                features[name] = inputs.pop(name)
        model = AttentionModel("some heads", *heads, 64, 64)
        given = {"seq_lens": (1100, 64, 0, 65, 500, 0)} | inputs
        arguments = paged_attention_inputs(model, device=DEVICE, page_size=64, **given)
        sinks = torch.linspace(-2, 3, heads[0], device=DEVICE)
        call = arguments | features | {"sinks": sinks, "return_lse": True}
        out, lse = kernelhub.paged_attention(**call, backend=("triton.split_kv", "triton.mixed"))
        want, want_lse = kernelhub.paged_attention.reference(**call)
        assert compare_out(out, want, 4.5).ok
        assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """NaN wherever nothing is written."""
    return tensor.fill_(float("nan")) if tensor.is_floating_point() and tensor.element_size() > 1 else tensor


class TestRule:
    """Shapes decide when lengths share the keys out."""

    @pytest.fixture(autouse=True)
    def balance(self, monkeypatch) -> None:
        monkeypatch.setattr(adapters, "BALANCE", True)

    def problem(self, **facets: Any) -> Any:
        given = {"num_q_heads": 32, "num_kv_heads": 8} | facets
        return kernelhub.explain("paged_attention", device="H200", **given).problem

    def test_many_sequences_of_a_large_bound(self) -> None:
        adapter = adapters.SplitKV(self.problem())
        assert adapter.divide(256, 4, 9472).shares > 0
        assert adapter.divide(2, 4, 9472).shares > 0
        assert adapter.divide(256, 4, 2048).shares > 0
        assert adapter.divide(1, 4, 9472).shares == 0
        assert adapter.divide(48, 4, 4096).filled == 49
        assert adapter.divide(32, 4, 9472).shares > 0

    def test_a_round_that_would_be_nearly_empty_is_filled_by_parts(self) -> None:
        """One part of each of 832 programs takes a third round of 396 for the last 40."""
        adapter = adapters.SplitKV(self.problem())
        parts = [adapter.divide(count, 4, 9472).parts for count in (40, 56, 80, 104, 112, 120, 152, 200)]
        assert parts == [6, 5, 3, 3, 3, 2, 3, 2]
        assert [adapter.divide(count, 4, 9472).parts for count in (48, 64, 96, 240, 256)] == [1] * 5

    def test_many_short_sequences_have_one_part_each(self) -> None:
        adapter = adapters.SplitKV(self.problem())
        assert [adapter.divide(count, 4, 9472).least for count in (2, 8, 24)] == [0] * 3
        # Where the last round of undivided ones is nearly empty, parts pay early; where it is nearly full, late.
        early = [adapter.divide(count, 4, 9472).least for count in (32, 56, 104, 152)]
        late = [adapter.divide(count, 4, 9472).least for count in (40, 80, 128)]
        assert 512 < min(early) < max(early) < 2048 < min(late) < max(late) < 4096
        fp8 = adapters.SplitKV(self.problem(kv_dtype="float8_e4m3fn"))
        assert fp8.divide(104, 4, 9472).least > adapter.divide(104, 4, 9472).least

    def test_a_grid_of_few_sequences_fits_at_once(self) -> None:
        """Beyond that a multiprocessor may get three programs where another gets one."""
        adapter = adapters.SplitKV(self.problem())
        for count in (2, 4, 8, 16, 24):
            for bound in (4096, 16384, 1 << 17):
                division = adapter.divide(count, 4, bound)
                assert division.shares > 0
                assert division.items(count) * 8 <= 3 * 132
        assert adapter.divide(256, 4, 512).shares == 0
        assert adapter.divide(256, 100, 9472).shares == 0  # more rows than a tile has

    def test_kernels_whose_bits_do_not_depend_on_the_batch_have_fixed_parts(self) -> None:
        adapter = adapters.SplitKVFixed(self.problem())
        assert adapter.divide(256, 4, 9472) == adapter.divide(1, 4, 9472)
        assert adapter.divide(256, 4, 9472).shares == 0

    def test_memory_and_grid_grow_with_the_sequences_and_not_with_the_bound(self) -> None:
        adapter = adapters.SplitKV(self.problem())
        divisions = [adapter.divide(256, 4, bound) for bound in (4096, 1 << 20)]
        assert len({(one.items(256), one.stored(256)) for one in divisions}) == 1
        assert adapter.split_bytes(1024, 4, divisions[0]) < 64 << 20
