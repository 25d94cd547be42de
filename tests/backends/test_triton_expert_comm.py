"""The Triton dispatch and combine of tokens over memory of all ranks, in the interpreter: ranks are processes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.comm.experts import adapter as adapter_module
from kernelhub.backends.triton.comm.experts import exact as exact_module
from kernelhub.backends.triton.comm.experts.adapter import PushRows, PushSums
from kernelhub.backends.triton.comm.experts.exact import PushRowsExact, PushSumsExact
from kernelhub.errors import KernelUnavailable, RanksDisagree
from kernelhub.ops.comm.experts.adapter import Outgoing
from kernelhub.ops.comm.experts.cases import by_expert
from kernelhub.ops.comm.experts.problem import FORMATS, TOKENS, CombineProblem, DispatchProblem
from kernelhub.ops.comm.experts.received import Dispatched, Handle, header_of
from kernelhub.ops.comm.experts.results import outputs_of
from kernelhub.ops.comm.problem import ATOMICS, NVLINK
from kernelhub.ops.formats import E4M3
from kernelhub.probes.device import simulated
from tests.backends.simulated_ranks import GROUP, Ranks, run_ranks
from tests.conftest import HAS_GPU
from tests.runtime.expert_scenes import EXPERTS, own, results, same, tokens_of, wanted_by_expert

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the interpreter is off; tests/gpu runs these kernels on GPUs")
WIDTH = 160  # two scales, and more than one block of no size
SLOT_BYTES = 1 << 14
FACETS: dict[str, Any] = {
    "device": simulated("H100"),
    "hidden_size": WIDTH,
    "num_experts": EXPERTS,
    "link": NVLINK,
    "peers": ATOMICS,
}
TIMEOUT_S = 10.0  # polls in the interpreter, which has no clock: 10 million
interpreter.repair()

WAYS = (
    *((format, "some twice, some none", torch.bfloat16, 3) for format in FORMATS),
    *((format, "random", E4M3, 2) for format in FORMATS[::-1]),
    (FORMATS[0], "to one rank", torch.float32, 1),
    (FORMATS[1], "all to one", torch.float16, 4),
    (FORMATS[2], "none", torch.float32, 5),
    *((FORMATS[top_k % 3], "random", torch.bfloat16, top_k) for top_k in (6, 7, 8)),
)


def gapped(tensor: Tensor) -> Tensor:
    """The tensor, not contiguous."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def push_rows(size: int, workspace: Any, format: str, given: dict[str, Tensor], most: int) -> PushRows:
    """`triton.push`, or without `most` `triton.push_exact`."""
    scales = given.get("scales")
    problem = DispatchProblem(
        **FACETS,
        dtype=str(given["x"].dtype)[6:],
        top_k=given["topk_ids"].shape[1],
        world_size=size,
        format=format,
        scales=scales is not None,
        capacity="few" if most else "exact",
    )
    adapter = (PushRows if most else PushRowsExact)(problem)
    adapter.attach(GROUP.group_name, workspace)
    return adapter


def dispatched(size: int, workspace: Any, format: str, given: dict[str, Tensor], most: int) -> Dispatched:
    adapter = push_rows(size, workspace, format, given, most)
    outgoing = Outgoing(given["x"], given.get("scales"), given["topk_ids"], given["topk_weights"], most)
    return adapter.launch(outgoing, GROUP, TIMEOUT_S)


def combined(size: int, workspace: Any, sent: Dispatched, y: Tensor, out: Tensor, timeout_s: float = TIMEOUT_S) -> None:
    handle, header = Handle(*sent.handle), header_of(sent.handle)
    exact = not header.max_tokens
    facets = {**FACETS, "dtype": str(y.dtype)[6:], "top_k": handle.topk_ids.shape[1], "format": sent.format}
    of_rows = {"rows": "all", "capacity": "exact"} if exact else {}
    adapter = (PushSumsExact if exact else PushSums)(CombineProblem(**facets, **of_rows, world_size=size))
    adapter.attach(GROUP.group_name, workspace)
    adapter.launch(y, handle, header, out, GROUP, timeout_s)


def exchanges(rank: int, size: int, workspace: Any, ways: Sequence[Any], exact: bool = False) -> list[str]:
    """What is wrong of dispatches and combines, one after the other, so that the sets of slots alternate."""
    wrong = []
    for format, routing, dtype, top_k in ways:
        parts = [tokens_of(other, routing, top_k, dtype, WIDTH) for other in range(size)]
        given = parts[rank] if top_k % 2 else {name: gapped(part) for name, part in parts[rank].items()}
        given = {name: part.contiguous() if name.startswith("topk") else part for name, part in given.items()}
        lengths = [len(part["x"]) for part in parts]
        sent = dispatched(size, workspace, format, given, 0 if exact else max(lengths))
        got, want = by_expert(sent), wanted_by_expert(rank, size, format, parts)
        if exact:
            rows = sent.counts.sum() if format == FORMATS[1] else sent.counts.max()
            assert sent.x.shape[-2] == (sum(lengths) if format == TOKENS else int(rows))
            assert sent.handle[4].tolist() == lengths
        got["rows"] = got["rows"].view(torch.uint8)
        label = f"{format} {routing} {dtype} top {top_k}"
        wrong += [f"{label}: {name}" for name in want if not same(got[name].contiguous(), want[name])]
        of_y = torch.float32 if dtype is torch.float32 else torch.bfloat16
        y = results(sent, rank, size, of_y)
        wide = torch.full((len(given["x"]), WIDTH, 2), torch.nan, dtype=of_y)
        out = torch.full_like(wide[..., 0], torch.nan) if top_k % 2 else wide[..., 1]
        combined(size, workspace, sent, y if top_k % 2 else gapped(y), out)
        if not torch.equal(out, own(parts[rank], of_y)):
            wrong.append(f"{label}: combine")
    return wrong


def check(size: int, ways: Sequence[Any], slot_bytes: int = SLOT_BYTES, exact: bool = False) -> None:
    ranks = Ranks(size, slot_bytes)
    assert run_ranks(lambda rank: exchanges(rank, size, ranks.workspaces[rank], ways, exact), size) == [[]] * size
    assert all(bool((memory == 0xFF).all()) for memory in ranks.memories), "slots that are not empty"


def test_two_ranks_exchange_every_bit_in_each_format() -> None:
    check(2, WAYS[:3])


def test_two_ranks_exchange_all_dtypes_routings_and_numbers_of_choices() -> None:
    check(2, WAYS[3:])


def test_four_ranks_exchange_every_bit() -> None:
    check(4, (WAYS[1], WAYS[3]))


def test_many_rows_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, of which one has no tokens; a row each, which is more than a set may have, and sums in parts."""
    monkeypatch.setattr(adapter_module, "_SET", 1)
    monkeypatch.setattr(adapter_module, "_OF_SUMS", (128, 64))
    check(2, WAYS[2:3], 1024)


def test_sums_of_several_parts_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_module, "_OF_SUMS", (128, 64))
    check(2, (WAYS[0], WAYS[1]))


def again(rank: int, size: int, workspace: Any, ways: Sequence[Any], shifted: bool = False) -> list[str]:
    """What is wrong of dispatches into results of earlier ones, whose memory holds anything, and of their combines."""
    wrong = []
    for format, routing, dtype, top_k in ways:
        adapter, out = None, None
        for turn in range(4):  # a rank has other numbers of tokens in turn
            parts = [tokens_of((other + turn) % size, routing, top_k, dtype, WIDTH) for other in range(size)]
            given, most = parts[rank], max(len(part["x"]) for part in parts)
            outgoing = Outgoing(given["x"], given.get("scales"), given["topk_ids"], given["topk_weights"], most, out)
            if adapter is None:
                adapter = push_rows(size, workspace, format, given, most)
            sent = adapter.launch(outgoing, GROUP, TIMEOUT_S)
            label = f"{format} {routing} {dtype}, turn {turn}"
            if out is not None and sent is not out:
                wrong.append(f"{label}: another result")
            got, want = by_expert(sent), wanted_by_expert(rank, size, format, parts)
            got["rows"] = got["rows"].view(torch.uint8)
            wrong += [f"{label}: {name}" for name in want if not same(got[name].contiguous(), want[name])]
            of_y = torch.float32 if dtype is torch.float32 else torch.bfloat16
            total = torch.full((len(given["x"]), WIDTH), torch.nan, dtype=of_y)
            combined(size, workspace, sent, results(sent, rank, size, of_y), total)
            if not torch.equal(total, own(parts[rank], of_y)):
                wrong.append(f"{label}: combine")
            out = moved(sent) if shifted else sent
            for place in outputs_of(out):
                place.view(torch.uint8).fill_(0xA5)
    return wrong


def moved(sent: Dispatched) -> Dispatched:
    """A result in memory that does not begin at multiples of 16 bytes."""

    def beside(part: Tensor | None) -> Any:
        return None if part is None else part.new_empty(part.numel() + 1)[1:].view(part.shape)

    parts = [beside(part) for part in sent[:-1]]
    slots = parts[2:4] if sent.topk_ids is not None else [beside(part) for part in sent.handle[2:4]]
    return Dispatched(*parts, handle=[*sent.handle[:2], *slots, *sent.handle[4:]])


def check_again(size: int, ways: Sequence[Any], shifted: bool = False) -> None:
    ranks = Ranks(size, SLOT_BYTES)
    assert run_ranks(lambda rank: again(rank, size, ranks.workspaces[rank], ways, shifted), size) == [[]] * size
    assert all(bool((memory == 0xFF).all()) for memory in ranks.memories), "slots that are not empty"


def test_two_ranks_write_into_earlier_results_in_each_format() -> None:
    check_again(2, (*WAYS[:3], WAYS[5]))


def test_three_ranks_write_into_earlier_results_that_are_not_aligned() -> None:
    check_again(3, WAYS[:1], shifted=True)


def test_counts_of_several_launches_into_an_earlier_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_module, "_SET", 1)
    check_again(2, WAYS[:1])


class TestExact:
    """Without a capacity: the ranks have 5 and no tokens."""

    @pytest.fixture(autouse=True)
    def small_sets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exact_module, "_SET", SLOT_BYTES)

    def test_two_ranks_exchange_every_bit_and_no_padding(self) -> None:
        check(2, WAYS[3:4], 2 * SLOT_BYTES, exact=True)

    def test_two_ranks_exchange_all_formats_dtypes_and_routings(self) -> None:
        check(2, (WAYS[0], WAYS[1], WAYS[5], WAYS[8]), 2 * SLOT_BYTES, exact=True)

    def test_rows_of_more_ranks_are_sent_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exact_module, "_SET", 4096)
        check(3, WAYS[4:5], 4096, exact=True)

    def test_nobody_has_tokens(self) -> None:
        ranks = Ranks(2, 2 * SLOT_BYTES)

        def act(rank: int) -> list[Any]:
            found: list[Any] = []
            for format in FORMATS:
                given = {name: part[:0] for name, part in tokens_of(rank, "random", 3, torch.bfloat16, WIDTH).items()}
                sent = dispatched(2, ranks.workspaces[rank], format, given, 0)
                out = torch.empty(0, WIDTH, dtype=torch.bfloat16)
                combined(2, ranks.workspaces[rank], sent, sent.x, out)
                found.append([list(sent.x.shape), sent.counts.tolist()])
            return found

        local = EXPERTS // 2
        shapes: list[list[int]] = [[0, WIDTH], [0, WIDTH], [local, 0, WIDTH]]
        assert run_ranks(act, 2) == [[[shape, [0] * local] for shape in shapes]] * 2

    def test_a_missing_rank_is_named_at_once(self) -> None:
        ranks = Ranks(2, 2 * SLOT_BYTES)
        adapter = PushRowsExact(DispatchProblem(**FACETS, dtype="float32", top_k=1, world_size=2, capacity="exact"))
        adapter.attach(GROUP.group_name, ranks.workspaces[0])
        given = tokens_of(0, "random", 1, torch.float32, WIDTH)
        outgoing = Outgoing(given["x"], None, given["topk_ids"], given["topk_weights"], 0)
        with pytest.raises(RanksDisagree, match="waited in vain for rank 1") as error:
            adapter.launch(outgoing, GROUP, 3e-6)
        assert error.value.ranks == (1,)


def all_ones(rank: int, workspace: Any) -> list[Any]:
    """Tokens, weights and ids that are all ones, as empty slots are, both ways."""
    found: list[Any] = []
    for dtype in (torch.bfloat16, E4M3):
        x = torch.full((1, 2 * WIDTH), 255, dtype=torch.uint8).view(dtype)[:, :WIDTH]
        given = {
            "x": x,
            "topk_ids": torch.tensor([[-1, 6 * (1 - rank)]], dtype=torch.int32),
            "topk_weights": torch.full((1, 2), -1, dtype=torch.int32).view(torch.float32),
        }
        if dtype is E4M3:
            given["scales"] = torch.full((1, 2), -1, dtype=torch.int32).view(torch.float32)
        sent = dispatched(2, workspace, TOKENS, given, 1)
        other = 1 - rank
        assert sent.topk_ids is not None
        assert sent.topk_weights is not None
        found += sent.topk_ids.tolist() + sent.topk_weights[other].isnan().tolist()
        found += [bool(part[other].float().isnan().all()) for part in (sent.x, sent.scales) if part is not None]
    return found


def test_bits_of_an_empty_slot_arrive_as_a_nan() -> None:
    ranks = Ranks(2, 4096)
    # Rank 1 has sent its token to rank 0, and the other way round.
    ids = [[-1, -1], [-1, 0]]
    want = [[*ids[::step], False, True, True, *ids[::step], False, True, True, True] for step in (1, -1)]
    assert run_ranks(lambda rank: all_ones(rank, ranks.workspaces[rank]), 2) == want


def test_words_that_count_are_as_old_as_the_slots() -> None:
    """A captured graph may outlive the adapter whose launch it has."""
    ranks = Ranks(2, 4096)
    problems = [DispatchProblem(**FACETS, dtype=dtype, top_k=2, world_size=2) for dtype in ("float32", "bfloat16")]
    first, second = (PushRows(problem).attach(GROUP.group_name, ranks.workspaces[0]).words for problem in problems)
    assert first is second
    assert first is ranks.workspaces[0].zeros(EXPERTS // 2 + 1)


class TestMissingRank:
    """Rank 0 of two, alone."""

    def given(self) -> dict[str, Tensor]:
        return {
            "x": torch.ones(1, WIDTH),
            "topk_ids": torch.tensor([[0, 11]], dtype=torch.int32),
            "topk_weights": torch.ones(1, 2),
        }

    def adapter(self, workspace: Any) -> PushRows:
        made = PushRows(DispatchProblem(**FACETS, dtype="float32", top_k=2, world_size=2))
        made.attach(GROUP.group_name, workspace)
        return made

    def outgoing(self) -> Outgoing:
        given = self.given()
        return Outgoing(given["x"], None, given["topk_ids"], given["topk_weights"], 1)

    def test_a_dispatch_ends_and_the_combine_names_the_rank(self) -> None:
        ranks = Ranks(2, 4096)
        workspace = ranks.workspaces[0]
        sent = self.adapter(workspace).launch(self.outgoing(), GROUP, 3e-6)
        assert sent.topk_ids is not None
        assert sent.topk_ids.tolist() == [[0, -1], [-1, -1]]
        message = "moe_combine: rank 0 of 2 waited in vain for rank 1 in an earlier call"
        with pytest.raises(RanksDisagree, match=message) as error:
            combined(2, workspace, sent, sent.x, torch.empty(1, WIDTH))
        assert error.value.ranks == (1,)

    def test_a_dispatch_into_an_earlier_result_counts_what_came(self) -> None:
        """Also a call that was captured, which neither sends nor waits afterwards."""
        ranks = Ranks(2, 4096)
        workspace = ranks.workspaces[0]
        adapter = self.adapter(workspace)
        out = adapter.launch(self.outgoing(), GROUP, 3e-6)
        workspace.missing.zero_()
        out.counts.fill_(7)
        found = adapter.launch(self.outgoing()._replace(out=out), GROUP, 1e3)
        assert found is out
        assert found.counts.tolist() == [0] * (EXPERTS // 2)
        assert found.topk_ids is not None
        assert found.topk_ids.tolist() == [[-1, -1]] * 2

    def test_a_combine_ends_with_nan(self) -> None:
        ranks = Ranks(2, 4096)
        workspace = ranks.workspaces[0]
        sent = self.adapter(workspace).launch(self.outgoing(), GROUP, 3e-6)
        workspace.missing.zero_()
        workspace.counters.zero_()
        out = torch.zeros(1, WIDTH)
        combined(2, workspace, sent, sent.x, out, 3e-6)
        assert bool(out.isnan().all())
        assert workspace.late() == [1]

    def test_calls_that_were_captured_do_not_wait_again(self) -> None:
        ranks = Ranks(2, 4096)
        workspace = ranks.workspaces[0]
        adapter = self.adapter(workspace)
        adapter.launch(self.outgoing(), GROUP, 3e-6)
        workspace.missing.zero_()  # a replay does not look at it
        sent_bytes = ranks.memories[1].clone()
        sent = adapter.launch(self.outgoing(), GROUP, 1e3)
        assert sent.topk_ids is not None
        assert sent.topk_ids.tolist() == [[-1, -1]] * 2
        out = torch.zeros(1, WIDTH)
        combined(2, workspace, sent, sent.x, out, 1e3)
        assert bool(out.isnan().all())
        assert torch.equal(ranks.memories[1], sent_bytes)


def test_a_group_that_no_plan_has_connected_is_refused() -> None:
    adapter = PushRows(DispatchProblem(**FACETS, dtype="float32", top_k=1, world_size=2))
    outgoing = Outgoing(torch.ones(1, WIDTH), None, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), 1)
    with pytest.raises(KernelUnavailable, match="call the op's prepare on every rank"):
        adapter.launch(outgoing, SimpleNamespace(group_name="another"), TIMEOUT_S)


@pytest.mark.parametrize("op", ["moe_dispatch", "moe_combine"])
def test_machines_without_proved_peers_say_why_it_is_not_selected(op: str) -> None:
    function = getattr(kernelhub, op)
    facets = {"device": "H100", "world_size": 2}
    for connection, reason in (
        ({}, "link is unknown"),
        ({"link": "pcie", "peers": "atomics"}, "link is pcie"),
        ({"link": "none"}, "link is none"),
        ({"link": "nvlink", "peers": "access", "hidden_size": 2888}, "hidden_size is 2888, not a multiple of 16"),
    ):
        decisions = function.explain(**facets, **connection).decisions
        assert reason in str(next(decision for decision in decisions if decision.kernel == "triton.push"))
    assert function.explain(**facets, link="nvlink", peers="access").selected == "triton.push"
    more = function.explain(**facets | {"world_size": 8}, link="nvlink", peers="access")
    assert more.selected != "triton.push"  # it has not run on eight


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3, torch.int32])
def test_rows_of_ranks_are_joined_under_autocast(dtype: torch.dtype, autocast: torch.dtype) -> None:
    rows = torch.arange(12).view(6, 2).to(dtype)
    want = rows.float()[[0, 3, 4]]
    with torch.autocast("cpu", autocast):
        made = exact_module._without_padding(rows, [1, 2])
    assert made is not None
    assert made.dtype is dtype
    assert torch.equal(made.float(), want)
