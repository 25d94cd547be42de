"""DeepEP's kernels for high throughput: ranks are threads, and the library computes as its kernels do."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import sys
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.deep_ep import requirements
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import InvalidArgument, KernelUnavailable
from kernelhub.ops.comm.experts.adapter import Outgoing
from kernelhub.ops.comm.experts.problem import EXACT, FEW, FORMATS, KEPT, TOKENS, CombineProblem, DispatchProblem
from kernelhub.ops.comm.experts.received import Dispatched, Handle, header_of, is_handle
from kernelhub.ops.comm.experts.traced import TracedDispatch
from kernelhub.ops.comm.inputs import alone
from kernelhub.ops.comm.problem import ATOMICS, NVLINK
from kernelhub.ops.formats import E4M3
from kernelhub.probes.device import simulated
from kernelhub.probes.signature import Header, mismatch
from tests.backends.fake import deep_ep as library
from tests.backends.threads_as_ranks import together

EXPERTS, WIDTH, TOP_K = 8, 128, 3
FACTS: dict[str, Any] = {
    "device": simulated("H100"),
    "hidden_size": WIDTH,
    "num_experts": EXPERTS,
    "link": NVLINK,
    "peers": ATOMICS,
}
MACHINE = SimulatedMachine({"deep_ep": "1.2.1", "deep_ep_cpp": "1.2.1"})


class Group:
    """One rank of a group whose ranks are threads."""

    def __init__(self, world: library.World, rank: int) -> None:
        self.world, self.group_name, self._rank = world, f"threads, rank {rank}", rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.world.size


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the adapters, loaded beside a DeepEP that computes on a CPU."""
    monkeypatch.setitem(sys.modules, "deep_ep", library.module())
    for name in ("buffers", "normal"):
        monkeypatch.delitem(sys.modules, f"kernelhub.backends.deep_ep.{name}", raising=False)
    buffers = importlib.import_module("kernelhub.backends.deep_ep.buffers")
    monkeypatch.setattr(buffers, "meet", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    made = importlib.import_module("kernelhub.backends.deep_ep.normal")
    yield made
    for name in ("buffers", "normal"):
        sys.modules.pop(f"kernelhub.backends.deep_ep.{name}", None)


def routed(rank: int, tokens: int, top_k: int = TOP_K) -> tuple[Tensor, Tensor]:
    """Choices with ids of no expert, and experts that repeat; weights 1/2 and 1."""
    random = torch.Generator().manual_seed(100 + rank)
    ids = torch.randint(-2, EXPERTS + 2, (tokens, top_k), generator=random).int()
    return ids, torch.randint(1, 3, (tokens, top_k), generator=random) / 2.0


def tokens_of(rank: int, tokens: int) -> Tensor:
    random = torch.Generator().manual_seed(200 + rank)
    return torch.randint(-2, 3, (tokens, WIDTH), generator=random).bfloat16()


def outgoing(rank: int, tokens: int, dtype: torch.dtype, most: int = 0, strided: bool = False) -> Outgoing:
    ids, weights = routed(rank, tokens)
    x, scales = tokens_of(rank, tokens).to(dtype), None
    if dtype is E4M3:
        scales = torch.full((tokens, WIDTH // 128), 1.0 + rank)
    elif strided:
        x = torch.full((WIDTH, tokens), torch.nan, dtype=dtype).t().copy_(x)
    return Outgoing(x, scales, ids, weights, most)


def factor(expert: int) -> int:
    """What an expert multiplies by."""
    return expert % 3 + 1


def wanted(rank: int, tokens: int) -> Tensor:
    """The result of a layer whose experts multiply."""
    ids, weights = routed(rank, tokens)
    by = torch.zeros(tokens)
    for expert in range(EXPERTS):
        by += torch.where(ids == expert, weights, 0.0).sum(1) * factor(expert)
    return (by[:, None] * tokens_of(rank, tokens).float()).bfloat16()


def computed(sent: Dispatched, rank: int, local: int) -> Tensor:
    """What the experts of a rank give, NaN in rows of no expert."""
    x = sent.x.float()
    if sent.topk_ids is not None:
        assert sent.topk_weights is not None
        by = torch.zeros(len(x))
        for expert in range(local):
            weights = torch.where(sent.topk_ids == expert, sent.topk_weights, 0.0)
            by += weights.sum(1) * factor(rank * local + expert)
        here = (sent.topk_ids >= 0).any(1, keepdim=True)
        return torch.where(here, by[:, None] * x, torch.nan).bfloat16()
    y = torch.full(x.shape, torch.nan, dtype=torch.bfloat16)
    begin = 0
    for expert, count in enumerate(sent.counts.tolist()):
        where = (expert, slice(count)) if sent.offsets is None else slice(begin, begin + count)
        y[where] = (x[where] * factor(rank * local + expert)).bfloat16()
        begin += count
    return y


@pytest.mark.parametrize("most", [0, 6], ids=["exact", "with a capacity"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_a_layer_on_two_ranks(adapters: Any, dtype: torch.dtype, format: str, most: int) -> None:
    check_layer(adapters, dtype, format, (5, 0), most)


@pytest.mark.parametrize("counts", [(7, 1, 0, 4), (1, 2, 3, 4, 5, 0, 7, 2)], ids=["4 ranks", "8 ranks"])
def test_a_layer_on_more_ranks(adapters: Any, counts: tuple[int, ...]) -> None:
    for format, most in itertools.product(FORMATS, (0, 7)):
        check_layer(adapters, torch.bfloat16, format, counts, most)


def check_layer(adapters: Any, dtype: torch.dtype, format: str, counts: tuple[int, ...], most: int) -> None:
    size = len(counts)
    world, local = library.World(size), EXPERTS // size
    facts = {**FACTS, "world_size": size, "top_k": TOP_K, "format": format, "capacity": FEW if most else EXACT}
    fp8 = dtype is E4M3
    dispatch = DispatchProblem(**facts, dtype="float8_e4m3fn" if fp8 else "bfloat16", scales=fp8)
    combine = CombineProblem(**facts, dtype="bfloat16", rows=KEPT)

    def act(rank: int) -> None:
        group, tokens = Group(world, rank), counts[rank]
        given = outgoing(rank, tokens, dtype, most, strided=True)
        sends, sums = adapters.Dispatch(dispatch), adapters.Combine(combine)
        sends.connect(given, group, 1.0)
        sent = sends.launch(given, group, 1.0)
        check_received(sent, rank, counts, dtype, format, most)
        assert is_handle(sent.handle)
        other = sends.launch(given, group, 1.0)  # the handle outlives it
        header, handle = header_of(sent.handle), Handle(*sent.handle)
        y = computed(sent, rank, local)
        sums.connect(y, handle, header, group, 1.0)
        wide = torch.full((*y.shape, 2), torch.nan, dtype=y.dtype)
        wide[..., 0] = y
        for _ in range(2):  # a handle may be used more than once
            for rows in (y, wide[..., 0]):
                out = torch.full((tokens, WIDTH), torch.nan, dtype=torch.bfloat16)
                sums.launch(rows, handle, header, out, group, 1.0)
                assert torch.equal(out, wanted(rank, tokens)), (rank, format)
        assert torch.equal(other.x.view(torch.uint8), sent.x.view(torch.uint8)) or format == FORMATS[2]

    together(act, size)


def check_received(
    sent: Dispatched, rank: int, counts: tuple[int, ...], dtype: torch.dtype, format: str, most: int
) -> None:
    """Tokens that need this rank's experts, in the order of ranks, then of their tokens; what a handle says of them."""
    size, handle = len(counts), Handle(*sent.handle)
    local = EXPERTS // size
    chosen = [routed(other, count)[0] for other, count in enumerate(counts)]

    def needed(ids: Tensor, by: int) -> Tensor:
        return (ids >= by * local) & (ids < (by + 1) * local)

    rows = [needed(ids, rank).any(1).nonzero()[:, 0] for ids in chosen]
    count = sum(len(one) for one in rows)
    if most:
        assert handle.slots.shape == (size * most, TOP_K)
        assert bool((handle.slots[count:] == -1).all())
        assert header_of(sent.handle).max_tokens == most
        assert handle.splits.numel() == handle.sent.numel() == 0
    to_each = [needed(chosen[rank], other).any(1).nonzero()[:, 0] for other in range(size)]
    if not most:
        assert handle.splits.tolist() == [len(one) for one in (*to_each, *rows)]
        assert torch.equal(handle.sent, torch.cat(to_each))
    if format == TOKENS:
        assert sent.topk_ids is not None
        x = torch.cat([tokens_of(other, counts[other])[at] for other, at in enumerate(rows)])
        assert torch.equal(sent.x[:count].float(), x.to(dtype).float())
        ids = torch.cat([chosen[other][at] for other, at in enumerate(rows)])
        assert torch.equal(sent.topk_ids[:count], torch.where(needed(ids, rank), ids - rank * local, -1))
        if sent.scales is not None:
            assert sent.scales[:count, 0].tolist() == [1.0 + other for other, at in enumerate(rows) for _ in at]


class TestBuffers:
    """One buffer for each group, for the largest rows of its plans."""

    def test_a_larger_plan_makes_a_larger_buffer_and_a_smaller_one_uses_it(self, adapters: Any) -> None:
        world = library.World(2)

        def act(rank: int) -> None:
            group = Group(world, rank)
            device = torch.device("cpu")
            small = adapters.connected(group, device, 1024, 1.0)
            assert adapters.connected(group, device, 512, 1.0) is small
            large = adapters.connected(group, device, 4096, 1.0)
            assert large.buffer.num_bytes > small.buffer.num_bytes
            assert adapters.exchange_of(group, 1024) is large

        together(act, 2)

    def test_a_group_that_no_plan_has_connected_is_refused(self, adapters: Any) -> None:
        made = adapters.Dispatch(DispatchProblem(**FACTS, world_size=2, top_k=TOP_K, capacity=EXACT))
        with pytest.raises(KernelUnavailable, match="call the op's prepare on every rank"):
            made.launch(outgoing(0, 2, torch.bfloat16), Group(library.World(2), 0), 1.0)

    def test_another_number_of_sms_is_named(self, adapters: Any) -> None:
        state = adapters.State(*(torch.zeros(shape, dtype=torch.int32) for shape in ((2, 2), (2, 3), (4,), (5, 2))))
        again = adapters.state_of(state.flat(), 2, 4, 5, 3)
        assert [part.shape for part in again] == [part.shape for part in state]
        with pytest.raises(KernelUnavailable, match="set_num_sms"):
            adapters.state_of(state.flat(), 2, 4, 5, 10)


@pytest.mark.parametrize("call", [value for value in vars(requirements).values() if hasattr(value, "target")])
def test_the_calls_are_those_of_the_library(call: Any) -> None:
    """The signatures of the fake are those of release 1.2.1."""
    *_, method = call.target.split(".")
    parameters = inspect.signature(getattr(library.Buffer, method)).parameters
    names = tuple(name for name in parameters if name != "self")
    required = frozenset(name for name in names if parameters[name].default is inspect.Parameter.empty)
    assert mismatch(call, Header(names, (), required, False, False)) is None


class TestSelection:
    ASKED: ClassVar[dict[str, Any]] = {"device": "H100", "world_size": 4, "link": "nvlink", "capacity": "exact"}

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"world_size": 16}, "world_size"),
            ({"link": "pcie", "peers": "access"}, "link"),
            ({"dtype": "float16"}, "dtype"),
            ({"top_k": 33}, "range"),
            ({"hidden_size": 7160}, "hidden_size"),
            ({"hidden_size": 8192}, "hidden_size"),
            ({"num_experts": 1024}, "num_experts"),
            ({"device": "B200"}, "capability"),
            ({"dtype": "float8_e4m3fn", "hidden_size": 2880}, "hidden_size"),
        ],
    )
    def test_limits_of_a_dispatch(self, changes: dict[str, Any], code: str) -> None:
        told = kernelhub.explain("moe_dispatch", machine=MACHINE, **self.ASKED | changes, backend="deep_ep")
        (decision,) = (one for one in told.decisions if one.kernel == "deep_ep.normal")
        assert code in [rejection.code for rejection in decision.rejections]

    def test_it_is_selected_on_request_and_its_combine_takes_its_rows(self) -> None:
        for op, more in (("moe_dispatch", {}), ("moe_combine", {"rows": KEPT})):
            selected = kernelhub.explain(op, machine=MACHINE, **self.ASKED, **more, backend="deep_ep").selected
            assert selected == "deep_ep.normal"
            usual = kernelhub.explain(op, machine=MACHINE, **self.ASKED, **more).selected
            assert usual == "torch.all_to_all"
            asked = {**self.ASKED, **more, "capacity": "many"}
            fixed = kernelhub.explain(op, machine=MACHINE, **asked, backend="deep_ep")
            assert fixed.selected == "deep_ep.normal_fixed"
        for rows in ("needed", "all"):
            refused = kernelhub.explain("moe_combine", machine=MACHINE, **self.ASKED, rows=rows, backend="deep_ep")
            assert refused.selected is None

    def test_nothing_of_the_library_is_imported(self) -> None:
        told = kernelhub.explain("moe_dispatch", **self.ASKED, backend="deep_ep")
        (decision,) = (one for one in told.decisions if one.kernel == "deep_ep.normal")
        assert "package_missing" in [rejection.code for rejection in decision.rejections]
        assert "deep_ep" not in sys.modules


def test_a_graph_refuses_a_handle_with_state() -> None:
    """Its size is that of the library's launch, which no graph knows."""

    @functools.wraps(kernelhub.moe_dispatch)
    def dispatch_with_state(*args: Any, **named: Any) -> Dispatched:
        sent = kernelhub.moe_dispatch(*args, **named)
        return sent._replace(handle=[*sent.handle[:-1], torch.ones(3, dtype=torch.int32)])

    dispatch_with_state.__name__ = "dispatch_with_state"
    traced = TracedDispatch().of(dispatch_with_state)
    ids, weights = routed(0, 2)
    with pytest.raises(InvalidArgument, match="handles have state"):
        traced(tokens_of(0, 2), ids, weights, alone(torch.device("cpu")), EXPERTS, max_tokens=4)
