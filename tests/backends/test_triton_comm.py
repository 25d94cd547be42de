"""The Triton kernels over memory of all ranks, in the interpreter: ranks are processes that share memory."""

from __future__ import annotations

import itertools
import random
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl

from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.comm import adapter as adapter_module
from kernelhub.backends.triton.comm import clustered_rms_norm
from kernelhub.backends.triton.comm import quantised as quantised_module
from kernelhub.backends.triton.comm.adapter import (
    ClusteredRmsNorm,
    OneShot,
    OneShotRmsNorm,
    PolledRmsNorm,
    TwoShot,
    TwoShotRmsNorm,
)
from kernelhub.backends.triton.comm.quantised import OneShotRmsNormQuant, TwoShotRmsNormQuant
from kernelhub.backends.triton.fused_quant.adapter import Norm
from kernelhub.errors import KernelUnavailable, RanksDisagree
from kernelhub.ops.case import bytes_of
from kernelhub.ops.comm.problem import ATOMICS, MESSAGE_BYTES, MORE, NVLINK, AllReduceProblem, AllReduceRmsNormProblem
from kernelhub.ops.fused_quant.formats import Results
from kernelhub.ops.fused_quant.problem import NormProblem
from kernelhub.probes.device import facts_of, simulated
from tests.backends import programs_in_turn
from tests.backends.simulated_ranks import GROUP, Group, Ranks, run_ranks
from tests.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the interpreter is off; tests/gpu runs these kernels on GPUs")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MESSAGE = "32KB"
FACETS = {"device": simulated("H100"), "link": NVLINK, "peers": ATOMICS, "message": MESSAGE}
TIMEOUT_S = 10.0  # polls in the interpreter, which has no clock: 10 million
interpreter.repair()


class Cluster:
    """In place of `clustered_rms_norm.of_cluster`: programs of a row that wait for what each of them has."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[float, int]]] = {}
        self._left: dict[int, int] = {}

    def __call__(self, squares: Any, lacks: Any, programs: Any) -> tuple[Any, Any]:
        row = programs_in_turn.program() // int(programs)
        found = self._of.setdefault(row, [])
        found.append((squares.handle.data.item(), lacks.handle.data.item()))
        while len(found) < int(programs):
            programs_in_turn.give_way()
        self._left[row] = self._left.get(row, 0) + 1
        if self._left[row] == int(programs):
            del self._of[row], self._left[row]
        total, late = sum(one for one, _ in sorted(found)), max(late for _, late in found)
        return tl.full([], total, tl.float32), tl.full([], late, tl.int32)


@pytest.fixture(autouse=True)
def rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs send a row on other numbers of ranks, too, than those on which that is done."""
    monkeypatch.setattr(adapter_module, "_SPLIT_RANKS", range(2, 9))
    monkeypatch.setattr(adapter_module, "_TURN_RANKS", (2, 3))
    monkeypatch.setattr(adapter_module, "_LEAST_TURNS", 2)
    programs_in_turn.patch(monkeypatch)
    monkeypatch.setattr(clustered_rms_norm, "of_cluster", Cluster())


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1 + rank)).to(dtype)


def sum_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks, in float32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def adapters(world_size: int, rank: int, workspace: Any, dtype: torch.dtype) -> list[Any]:
    problem = AllReduceProblem(**FACETS, dtype=str(dtype)[6:], world_size=world_size)
    made = [OneShot(problem), TwoShot(problem)]
    for adapter in made:
        adapter.attach(GROUP.group_name, workspace)
    return made


def sums(rank: int, world_size: int, workspace: Any) -> list[str]:
    """What is wrong of sums of several sizes, by kernels in turn, so that the sets of slots alternate."""
    wrong = []
    for dtype in DTYPES:
        for adapter in adapters(world_size, rank, workspace, dtype):
            for shape in ((1,), (0, 8), (3, 5), (8, 8), (2, 605)):
                parts = [values(other, shape, dtype) for other in range(world_size)]
                want = sum_of(parts).to(dtype)
                x = parts[rank]
                out = torch.full(shape, torch.nan, dtype=dtype)
                adapter.launch(x, out, GROUP, TIMEOUT_S)
                found = {"out": out}
                if shape == (8, 8):
                    wide = torch.full((8, 17), torch.nan, dtype=dtype)
                    wide[:, 1::2] = x.t()
                    adapter.launch(wide[:, 1::2].t(), out.fill_(torch.nan), GROUP, TIMEOUT_S)
                    adapter.launch(x, wide[:, 1::2], GROUP, TIMEOUT_S)
                    found |= {"strided": out, "strided out": wide[:, 1::2]}
                if shape == (3, 5):
                    adapter.launch(x, x, GROUP, TIMEOUT_S)
                    found["in place"] = x
                name = type(adapter).__name__
                wrong += [f"{name} {dtype} {shape} {what}" for what, got in found.items() if not torch.equal(got, want)]
    return wrong


def long_messages(rank: int, workspace: Any) -> list[str]:
    """What is wrong of messages of several launches, as large ones are."""
    wrong = []
    facets = {**FACETS, "message": MORE, "dtype": "bfloat16", "world_size": 2}
    parts = [values(other, (77, 24), torch.bfloat16) for other in range(2)]
    want = sum_of(parts)
    for adapter in (OneShot(AllReduceProblem(**facets)), TwoShot(AllReduceProblem(**facets))):
        adapter.attach(GROUP.group_name, workspace)
        out = torch.full_like(parts[rank], torch.nan)
        adapter.launch(parts[rank], out, GROUP, TIMEOUT_S)
        wrong += [] if torch.equal(out, want.bfloat16()) else [type(adapter).__name__]
    for kind in (OneShotRmsNorm, TwoShotRmsNorm):
        norm = kind(AllReduceRmsNormProblem(**facets, hidden_size=24))
        norm.attach(GROUP.group_name, workspace)
        out, residual_out = torch.full_like(out, torch.nan), torch.full_like(out, torch.nan)
        ones = torch.ones(24, dtype=torch.bfloat16)
        norm.launch(parts[rank], torch.zeros_like(out), ones, 1e-5, out, residual_out, GROUP, TIMEOUT_S)
        scaled = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-5)
        close = torch.allclose(out.float(), scaled, rtol=2**-7, atol=1e-3)
        wrong += [] if close and torch.equal(residual_out, want.bfloat16()) else [kind.__name__]
    return wrong


def norms(rank: int, world_size: int, workspace: Any) -> list[str]:
    """What is wrong of sums with a residual and their norms."""
    wrong = []
    for dtype, weight_dtype in ((torch.bfloat16, torch.float32), (torch.float16, torch.float16)):
        facets = {"dtype": str(dtype)[6:], "weight_dtype": str(weight_dtype)[6:], "world_size": world_size}
        # The last: of one shot parts of a row are sent by several programs, of the last part nothing.
        kinds = (OneShotRmsNorm, TwoShotRmsNorm, *([PolledRmsNorm, ClusteredRmsNorm] if world_size == 2 else []))
        for shape, kind in itertools.product(((1, 48), (2, 3, 40), (2, 2904)), kinds):
            adapter = kind(AllReduceRmsNormProblem(**FACETS, **facets, hidden_size=shape[-1]))
            adapter.attach(GROUP.group_name, workspace)
            residual, weight = values(99, shape, dtype), values(98, shape[-1:], weight_dtype)
            x = values(rank, shape, dtype)
            total = sum_of([values(other, shape, dtype) for other in range(world_size)])
            total = (total.to(dtype).float() if kind is TwoShotRmsNorm else total) + residual.float()
            norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.float()
            out, residual_out = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
            found = {"apart": (out, residual_out), "in place": (x, residual)}
            wide = torch.full((*shape[:-1], 2 * shape[-1]), torch.nan, dtype=dtype)
            found["strided"] = (wide[..., ::2], wide[..., 1::2])
            for what in ("apart", "strided", "in place"):
                adapter.launch(x, residual, weight, 1e-5, *found[what], GROUP, TIMEOUT_S)
            for what, (got, got_residual) in found.items():
                close = torch.allclose(got.float(), norm, rtol=torch.finfo(dtype).eps, atol=1e-3)
                if not (close and torch.equal(got_residual, total.to(dtype))):
                    wrong.append(f"{kind.__name__} {dtype} {shape} {what}")
            adapter.launch(x[:0], residual[:0], weight, 1e-5, out[:0], residual_out[:0], GROUP, TIMEOUT_S)
    return wrong


FORMS: tuple[dict[str, Any], ...] = (
    {"format": "fp8_tensor"},
    {"format": "fp8_token"},
    {"format": "fp8_token", "ue8m0": True, "scale_dtype": "float8_e8m0fnu"},
    {"format": "fp8_group"},
    {"format": "fp8_group", "column": True},
    {"format": "mxfp8"},
    {"format": "nvfp4"},
)


def bits(tensor: torch.Tensor | None) -> list[Any]:
    return [] if tensor is None else bytes_of(tensor).tolist()


def quantised_norms(
    rank: int,
    world_size: int,
    workspace: Any,
    rows: int = 3,
    width: int = 160,
    forms: Any = FORMS,
    kind: Any = OneShotRmsNormQuant,
) -> list[str]:
    """What is wrong of sums with a residual whose norms are quantised: codes are those of `triton.rows` of the sum."""
    wrong = []
    facets = {**FACETS, "device": facts_of(-1), "weight_dtype": "float32", "world_size": world_size}
    others = ((torch.float16, FORMS[1]), (torch.float32, FORMS[3])) if forms is FORMS else ()
    for dtype, form in (*((torch.bfloat16, form) for form in forms), *others):
        problem = AllReduceRmsNormProblem(**{**facets, "dtype": str(dtype)[6:]}, hidden_size=width, **form)
        adapter = kind(problem)
        adapter.attach(GROUP.group_name, workspace)
        own = {"width": width, "weight_dtype": "float32", "dtype": str(dtype)[6:], **form, "residual": False}
        alone = Norm(NormProblem(device=facts_of(-1), **own))
        x, residual = values(rank, (rows, width), dtype), values(99, (rows, width), dtype)
        weight, given = values(98, (width,), torch.float32), torch.full((1,), 0.02)
        total = sum_of([values(other, (rows, width), dtype) for other in range(world_size)])
        total = (total.to(dtype).float() if kind is TwoShotRmsNormQuant else total) + residual.float()
        results = Results("rms_norm_quant", alone.problem, -1)
        want, want_scale = results.completed(x, (rows, width), None, None)
        alone.launch(total.to(dtype), weight, 1e-5, None, given, want, want_scale, None)
        for what in ("apart", "strided", "in place") if form["format"] == "fp8_group" else ("apart",):
            out, scale = results.completed(x, (rows, width), None, None)
            added = residual.clone() if what == "in place" else torch.full_like(x, torch.nan)
            source = x
            if what == "strided":
                out = torch.full((rows, 2 * out.shape[1]), 99, dtype=torch.uint8).view(out.dtype)[:, ::2]
                source = torch.full((width, rows), torch.nan, dtype=dtype).t().copy_(x)
            before = added if what == "in place" else residual
            adapter.launch(source, before, weight, 1e-5, out, added, GROUP, TIMEOUT_S, given, scale)
            found = bits(out) == bits(want) and bits(scale) == bits(want_scale)
            wrong += [] if found and torch.equal(added, total.to(dtype)) else [f"{dtype} {form} {what}"]
        out, scale = results.completed(x, (0, width), None, None)
        adapter.launch(x[:0], x[:0], weight, 1e-5, out, x[:0], GROUP, TIMEOUT_S, given, scale)
    return wrong


def check(world_size: int) -> None:
    ranks = Ranks(world_size, MESSAGE_BYTES[MESSAGE])

    def act(rank: int) -> list[str]:
        workspace = ranks.workspaces[rank]
        return sums(rank, world_size, workspace) + norms(rank, world_size, workspace)

    assert run_ranks(act, world_size) == [[]] * world_size
    assert ranks.are_empty()


def test_two_ranks_get_the_sums_in_the_order_of_ranks() -> None:
    check(2)


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_get_the_sums_in_the_order_of_ranks(world_size: int) -> None:
    check(world_size)


QUANTISERS = ((2, OneShotRmsNormQuant), (2, TwoShotRmsNormQuant), (4, OneShotRmsNormQuant), (4, TwoShotRmsNormQuant))


@pytest.mark.parametrize(("world_size", "kind"), QUANTISERS)
def test_quantised_norms_have_the_bits_of_the_quantiser(world_size: int, kind: type) -> None:
    ranks = Ranks(world_size, MESSAGE_BYTES[MESSAGE])

    def act(rank: int) -> list[str]:
        return quantised_norms(rank, world_size, ranks.workspaces[rank], rows=world_size + 1, kind=kind)

    assert run_ranks(act, world_size) == [[]] * world_size
    assert ranks.are_empty()


def test_quantised_norms_in_two_steps_of_rows_that_are_not_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_module, "MOST_AT_ONCE", 0)
    ranks = Ranks(3, MESSAGE_BYTES[MESSAGE])

    def act(rank: int) -> list[str]:
        return quantised_norms(rank, 3, ranks.workspaces[rank], rows=5, forms=FORMS[3:4], kind=TwoShotRmsNormQuant)

    assert run_ranks(act, 3) == [[]] * 3
    assert ranks.are_empty()


@pytest.mark.parametrize("kind", [OneShotRmsNormQuant, TwoShotRmsNormQuant])
def test_quantised_norms_of_many_rows_are_made_in_pieces(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_module, "LARGEST", 512)
    monkeypatch.setattr(quantised_module, "MESSAGE_BYTES", {MESSAGE: 512})
    ranks = Ranks(2, 1024)

    def act(rank: int) -> list[str]:
        return quantised_norms(rank, 2, ranks.workspaces[rank], rows=17, width=16, forms=FORMS[4:6], kind=kind)

    assert run_ranks(act, 2) == [[]] * 2
    assert ranks.are_empty()


def test_long_messages_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_module, "LARGEST", 1024)
    monkeypatch.setattr(adapter_module, "_SLOTS", 1024)
    ranks = Ranks(2, 2048)
    assert run_ranks(lambda rank: long_messages(rank, ranks.workspaces[rank]), 2) == [[]] * 2


@pytest.mark.parametrize(("programs", "world_size"), [(512, 3), (512, 2), (2, 3)])
def test_norms_of_more_rows_than_programs_and_of_rows_with_a_nan(
    programs: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN in a row stays there; where a program has one row, it looks like a rank that has not come."""
    tile = adapter_module.row_tile(48, 2)._replace(programs=programs)
    monkeypatch.setattr(adapter_module, "row_tile", lambda *sizes: tile)
    ranks = Ranks(world_size, MESSAGE_BYTES[MESSAGE])
    facets = {**FACETS, "dtype": "bfloat16", "weight_dtype": "bfloat16", "hidden_size": 48, "world_size": world_size}

    def act(rank: int) -> list[str]:
        wrong = []
        for kind in (OneShotRmsNorm, TwoShotRmsNorm, *([PolledRmsNorm, ClusteredRmsNorm] if world_size == 2 else [])):
            adapter = kind(AllReduceRmsNormProblem(**facets))
            adapter.attach(GROUP.group_name, ranks.workspaces[rank])
            parts = [values(other, (7, 48), torch.bfloat16) for other in range(world_size)]
            for bad in (torch.nan, torch.inf):
                parts[1][3, 5] = bad
                out, added = torch.zeros(7, 48).bfloat16(), torch.zeros(7, 48).bfloat16()
                weight = torch.ones(48, dtype=torch.bfloat16)
                adapter.launch(parts[rank], parts[0].clone(), weight, 1e-5, out, added, GROUP, TIMEOUT_S)
                want = sum_of(parts)
                want = (want.bfloat16().float() if kind is TwoShotRmsNorm else want) + parts[0].float()
                want = want.bfloat16()
                same = torch.equal(added.isnan(), want.isnan()) and torch.equal(added.nan_to_num(), want.nan_to_num())
                rows = out.isfinite().all(1).tolist() == [True, True, True, False, True, True, True]
                wrong += [] if same and rows else [f"{kind.__name__} {bad}"]
        return wrong

    assert run_ranks(act, world_size) == [[]] * world_size
    assert ranks.are_empty()


@pytest.mark.parametrize(("width", "rows", "message"), [(7168, 18, "256KB"), (7168, 73, "1MB"), (2880, 45, "256KB")])
def test_all_rows_of_a_message_of_two_ranks_are_one_launch(width: int, rows: int, message: str) -> None:
    facets = {**FACETS, "dtype": "bfloat16", "weight_dtype": "bfloat16", "hidden_size": width, "message": message}
    kinds = (OneShotRmsNorm, PolledRmsNorm)
    found = [kind(AllReduceRmsNormProblem(**facets, world_size=2)).rows_of_launch(2 * width) for kind in kinds]
    assert found == [rows] * 2
    assert OneShotRmsNorm(AllReduceRmsNormProblem(**facets, world_size=4)).rows_of_launch(2 * width) == rows // 8 * 8


def test_a_row_of_a_norm_keeps_its_programs_where_one_more_would_halve_them() -> None:
    facets = {**FACETS, "dtype": "bfloat16", "weight_dtype": "bfloat16", "hidden_size": 3584, "message": "256KB"}
    assert OneShotRmsNorm(AllReduceRmsNormProblem(**facets, world_size=2)).rows_of_launch(2 * 3584) == 32


def test_polled_norms_of_more_rows_than_a_grid_has_programs_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has one row; in place a row has two."""
    tile = adapter_module.row_tile(48, 2)._replace(programs=8)
    monkeypatch.setattr(adapter_module, "row_tile", lambda *sizes: tile)
    monkeypatch.setattr(adapter_module, "MOST_PROGRAMS", 8)
    ranks = Ranks(2, MESSAGE_BYTES[MESSAGE])
    facets = {**FACETS, "dtype": "bfloat16", "weight_dtype": "bfloat16", "hidden_size": 48, "world_size": 2}
    parts = [values(other, (11, 48), torch.bfloat16) for other in range(2)]
    residual, weight = values(99, (11, 48), torch.bfloat16), torch.ones(48, dtype=torch.bfloat16)
    want = (sum_of(parts) + residual.float()).bfloat16()

    def act(rank: int) -> list[bool]:
        adapter = PolledRmsNorm(AllReduceRmsNormProblem(**facets))
        adapter.attach(GROUP.group_name, ranks.workspaces[rank])
        apart, own = torch.full_like(want, torch.nan), residual.clone()
        out = torch.full_like(want, torch.nan)
        adapter.launch(parts[rank], residual, weight, 1e-5, out, apart, GROUP, TIMEOUT_S)
        adapter.launch(parts[rank], own, weight, 1e-5, out.clone(), own, GROUP, TIMEOUT_S)
        return [torch.equal(apart, want), torch.equal(own, want), bool(out.isfinite().all())]

    assert run_ranks(act, 2) == [[True] * 3] * 2


def split_norm(
    problem_dtype: torch.dtype, width: int, world_size: int, workspace: Any, kind: type = OneShotRmsNorm
) -> OneShotRmsNorm:
    """A norm whose rows several programs send and normalise, connected."""
    facets = {**FACETS, "dtype": str(problem_dtype)[6:], "weight_dtype": "float32", "world_size": world_size}
    adapter: OneShotRmsNorm = kind(AllReduceRmsNormProblem(**facets, hidden_size=width))
    assert adapter.turns or adapter.cluster > 1
    adapter.attach(GROUP.group_name, workspace)
    return adapter


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        *((2, (kind,)) for kind in (OneShotRmsNorm, PolledRmsNorm, ClusteredRmsNorm)),
        (2, (OneShotRmsNorm, ClusteredRmsNorm, PolledRmsNorm, ClusteredRmsNorm)),  # as for messages of several sizes
        (3, (OneShotRmsNorm,)),
    ],
    ids=lambda given: given if isinstance(given, int) else "-".join(kind.__name__ for kind in given),
)
def test_norms_of_several_programs_follow_each_other_whatever_their_sizes(
    world_size: int, kinds: tuple[type, ...]
) -> None:
    """Calls of few and many rows, dtypes, ranks that come late, destinations that are operands, and a NaN in a row."""
    ranks = Ranks(world_size, MESSAGE_BYTES[MESSAGE])
    calls = (
        *((torch.bfloat16, 2048, 4, ""), (torch.float32, 1100, 1, "residual"), (torch.bfloat16, 2048, 1, "x")),
        *((torch.float16, 2104, 2, "both"), (torch.float32, 1100, 3, ""), (torch.bfloat16, 2048, 1, "both")),
        *((torch.bfloat16, 2048, 1, "swapped"), (torch.float32, 1100, 1, "x"), (torch.float16, 2104, 3, "residual")),
    )

    def act(rank: int) -> list[str]:
        wrong = []
        chosen = random.Random(rank)
        for turn, (dtype, width, rows, _) in enumerate(calls):
            place = calls[(turn + rank * (turn // 4)) % len(calls)][-1]  # at first as on other ranks
            adapter = split_norm(dtype, width, world_size, ranks.workspaces[rank], kinds[turn % len(kinds)])
            parts = [values(100 * turn + other, (rows, width), dtype) for other in range(world_size)]
            if turn % 3 == 2:
                parts[-1][0, 7] = torch.nan
            residual, weight = values(99, (rows, width), dtype), values(98, (width,), torch.float32)
            total = sum_of(parts) + residual.float()
            norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight
            x, before = parts[rank].clone(), residual.clone()
            out = x if place in ("x", "both") else before if place == "swapped" else torch.full_like(x, 9)
            added = before if place in ("residual", "both") else x if place == "swapped" else torch.full_like(x, 9)
            time.sleep(chosen.choice((0, 0, 0.05)))
            adapter.launch(x, before, weight, 1e-5, out, added, GROUP, TIMEOUT_S)
            close = torch.allclose(out.float(), norm, rtol=torch.finfo(dtype).eps, atol=1e-3, equal_nan=True)
            same = torch.allclose(added.float(), total.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
            wrong += [] if close and same else [f"call {turn}: {dtype} {rows} rows, {place}"]
        return wrong

    assert run_ranks(act, world_size) == [[]] * world_size
    assert ranks.are_empty()


class TestMissingRank:
    """Rank 0 of two, alone."""

    @pytest.mark.parametrize("kind", [OneShotRmsNorm, PolledRmsNorm, ClusteredRmsNorm])
    def test_captured_norms_of_several_programs_do_not_wait_again(self, kind: type) -> None:
        ranks = Ranks(2, MESSAGE_BYTES[MESSAGE])
        adapter = split_norm(torch.bfloat16, 2048, 2, ranks.workspaces[0], kind)
        x, weight = torch.ones(2, 2048).bfloat16(), torch.ones(2048)
        out, added = torch.zeros_like(x), torch.zeros_like(x)
        adapter.launch(x, x, weight, 1e-5, out, added, GROUP, 3e-6)
        ranks.workspaces[0].missing.zero_()  # a replay does not look at it
        sent = ranks.memories[1].clone()
        for place in (out, x):
            place.zero_()
            adapter.launch(x, x, weight, 1e-5, place, added.zero_(), GROUP, 1e3)
            assert bool(place.isnan().all())
            assert bool(added.isnan().all())
        assert torch.equal(ranks.memories[1], sent)

    def test_a_call_ends_and_the_next_one_names_the_rank(self) -> None:
        ranks = Ranks(2, MESSAGE_BYTES[MESSAGE])
        adapter = adapters(2, 0, ranks.workspaces[0], torch.float32)[0]
        x, out = torch.ones(100), torch.ones(100)
        adapter.launch(x, out, GROUP, 3e-6)
        assert bool(out.isnan().all())
        with pytest.raises(
            RanksDisagree, match="all_reduce: rank 0 of 2 waited in vain for rank 1 in an earl"
        ) as error:
            adapter.launch(x, out, GROUP, 3e-6)
        assert error.value.ranks == (1,)

    @pytest.mark.parametrize(
        ("kind", "hidden_size"), [(OneShotRmsNorm, 32), (OneShotRmsNorm, 4096), (TwoShotRmsNorm, 32)]
    )
    def test_a_norm_that_lacks_a_rank_is_nan_and_the_next_call_names_it(self, kind: Any, hidden_size: int) -> None:
        ranks = Ranks(3, MESSAGE_BYTES[MESSAGE])
        facets = {**FACETS, "dtype": "bfloat16", "weight_dtype": "bfloat16", "world_size": 3}
        facets |= {"hidden_size": hidden_size}
        adapter = kind(AllReduceRmsNormProblem(**facets))
        adapter.attach(GROUP.group_name, ranks.workspaces[0])
        x, weight = torch.ones(3, hidden_size).bfloat16(), torch.ones(hidden_size).bfloat16()
        out, added = torch.zeros_like(x), torch.zeros_like(x)
        adapter.launch(x, x, weight, 1e-5, out, added, GROUP, 3e-6)
        assert bool(out.isnan().all())
        assert bool(added.isnan().all())
        with pytest.raises(RanksDisagree) as error:
            adapter.launch(x, x, weight, 1e-5, out, added, GROUP, 3e-6)
        assert error.value.ranks == (1, 2)

    @pytest.mark.parametrize("kind", [OneShotRmsNormQuant, TwoShotRmsNormQuant])
    @pytest.mark.parametrize("form", [FORMS[1], FORMS[3], FORMS[6]], ids=lambda form: str(form["format"]))
    def test_a_quantised_norm_that_lacks_a_rank_is_nan(self, form: dict[str, Any], kind: Any) -> None:
        ranks = Ranks(2, MESSAGE_BYTES[MESSAGE])
        facets = {**FACETS, "device": facts_of(-1), "dtype": "bfloat16", "world_size": 2, "hidden_size": 32}
        problem = AllReduceRmsNormProblem(**facets, **form)
        adapter = kind(problem)
        adapter.attach(GROUP.group_name, ranks.workspaces[0])
        x, weight, given = torch.ones(2, 32).bfloat16(), torch.ones(32).bfloat16(), torch.ones(1)
        for _ in range(2):  # late, and after a rank was late
            out, scale = Results("all_reduce_rms_norm", problem, -1).completed(x, (2, 32), None, None)
            added = torch.zeros_like(x)
            adapter.launch(x, x, weight, 1e-5, out, added, GROUP, 3e-6, given, scale)
            assert bool(added.isnan().all())
            assert bool((scale if form["format"] == "nvfp4" else out).float().isnan().all())
            ranks.workspaces[0].missing.zero_()

    def test_calls_that_were_captured_do_not_wait_again(self) -> None:
        ranks = Ranks(2, MESSAGE_BYTES[MESSAGE])
        adapter = adapters(2, 0, ranks.workspaces[0], torch.float32)[0]
        x, out = torch.ones(100), torch.ones(100)
        adapter.launch(x, out, GROUP, 3e-6)
        ranks.workspaces[0].missing.zero_()  # a replay does not look at it
        sent = ranks.memories[1].clone()
        out.zero_()
        adapter.launch(x, out, GROUP, 1e3)
        assert bool(out.isnan().all())
        assert torch.equal(ranks.memories[1], sent)


def test_a_group_that_no_plan_has_connected_is_refused() -> None:
    adapter = OneShot(AllReduceProblem(**FACETS, dtype="float32", world_size=2))
    with pytest.raises(KernelUnavailable, match="call the op's prepare on every rank"):
        adapter.launch(torch.ones(1), torch.ones(1), SimpleNamespace(group_name="another"), TIMEOUT_S)


def test_a_later_group_of_the_same_name_is_another_one() -> None:
    """torch gives the names of destroyed groups again, to groups of other ranks."""
    ranks, first, later = Ranks(2, 1 << 14), Group(group_name="of both"), Group(group_name="of both")
    ranks.workspaces[0].owner = weakref.ref(first)
    adapter = OneShot(AllReduceProblem(**FACETS, dtype="float32", world_size=2))
    adapter.attach(first.group_name, ranks.workspaces[0])
    with pytest.raises(KernelUnavailable, match="call the op's prepare on every rank"):
        adapter.launch(torch.ones(1), torch.ones(1), later, TIMEOUT_S)
    assert adapter.repeated(torch.ones(1), torch.ones(1), later, TIMEOUT_S) is None


def test_a_nan_of_the_bits_of_an_empty_slot_arrives_as_a_nan() -> None:
    ranks = Ranks(2, 1024)

    def act(rank: int) -> list[bool]:
        found = []
        for dtype, bits in ((torch.float16, torch.int16), (torch.float32, torch.int32)):
            x = torch.zeros(4, dtype=dtype)
            x[rank] = torch.full((), -1, dtype=bits).view(dtype)
            adapters(2, rank, ranks.workspaces[rank], dtype)[0].launch(x, x, GROUP, TIMEOUT_S)
            found += x.isnan().tolist()
        return found

    assert run_ranks(act, 2) == [[True, True, False, False] * 2] * 2
