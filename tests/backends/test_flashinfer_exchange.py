"""FlashInfer's one-sided exchange of tokens: ranks are threads over one memory, by the protocol of the kernels."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.flashinfer.comm.experts.window import Window
from kernelhub.backends.shared import arrange
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import KernelUnavailable
from kernelhub.ops.comm.experts.adapter import Outgoing
from kernelhub.ops.comm.experts.cases import by_expert
from kernelhub.ops.comm.experts.problem import FORMATS, CombineProblem, DispatchProblem
from kernelhub.ops.comm.experts.received import Handle, Header, header_of, is_handle
from kernelhub.ops.comm.problem import ATOMICS, NVLINK
from kernelhub.ops.formats import E4M3
from kernelhub.probes.device import simulated
from tests.backends import flashinfer_fake as library
from tests.backends.fake import flashinfer_exchange as fake
from tests.backends.simulated_ranks import Group
from tests.backends.threads_as_ranks import together
from tests.conftest import HAS_GPU
from tests.runtime.expert_scenes import EXPERTS, own, results, same, tokens_of, wanted_by_expert

WIDTH, MOST = 144, 9
FACETS: dict[str, Any] = {
    "device": simulated("H100"),
    "hidden_size": WIDTH,
    "num_experts": EXPERTS,
    "link": NVLINK,
    "peers": ATOMICS,
}
GROUP: Any = Group(group_name="threads", size=lambda: 2)
MACHINE = SimulatedMachine({"flashinfer": "0.7.2", "cuda": "13.0.0", "triton": "3.6.0"})
NAME = "flashinfer.moe_a2a"
KEYS = ("topk_ids", "topk_weights")
WAYS = (
    (FORMATS[0], "some twice, some none", torch.bfloat16, 3),
    (FORMATS[1], "random", E4M3, 2),
    (FORMATS[2], "some twice, some none", torch.bfloat16, 3),
    (FORMATS[0], "random", E4M3, 2),
    (FORMATS[1], "all to one", torch.float16, 4),
    (FORMATS[2], "none", torch.float32, 1),
)


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with library.installed():
        from kernelhub.backends.flashinfer.comm.experts import adapter, rows, workspace

        for kernels in (rows, arrange):
            for name in [name for name in vars(kernels) if name.endswith("_kernel")]:
                monkeypatch.setattr(kernels, name, OneAtATime(getattr(kernels, name)))
        yield SimpleNamespace(adapter=adapter, workspace=workspace)
    fake.PACKED.clear()


class OneAtATime:
    """A kernel in the interpreter, which threads cannot share; a launch waits for no other rank."""

    guard = threading.Lock()

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            with self.guard:
                self.kernel[grid](*given, **named)

        return launch


class World:
    """Workspaces of an op for all ranks, over memory that held garbage."""

    def __init__(self, modules: Any, size: int, row_bytes: int) -> None:
        self.modules = modules
        self.barrier = threading.Barrier(size)
        num_bytes = modules.workspace._bytes(size, MOST, row_bytes)
        self.memory = torch.full((size, num_bytes + 128), 0x55, dtype=torch.uint8)[:, :num_bytes]
        self.exchanges = [
            modules.workspace.Exchange(self.memory, rank, 256, lambda limit_s: self.barrier.wait(20.0))
            for rank in range(size)
        ]

    def serve(self, adapter: Any, rank: int) -> Any:
        adapter._connected.keep(GROUP, self.exchanges[rank], MOST)
        return adapter


def gapped(tensor: Tensor) -> Tensor:
    """The tensor, not contiguous."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def off_by_bytes(tensor: Tensor) -> Tensor:
    """The tensor, at an address that vectors cannot be loaded from."""
    place = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    place.copy_(tensor)
    return place


def check(modules: Any, size: int, ways: Sequence[Any]) -> None:
    for way in ways:
        check_layer(modules, size, *way)


def check_layer(modules: Any, size: int, format: str, routing: str, dtype: torch.dtype, top_k: int) -> None:
    """The handle of a dispatch is combined after another dispatch."""
    of_y = torch.float32 if dtype is torch.float32 else torch.bfloat16
    parts = [tokens_of(rank, routing, top_k, dtype, WIDTH) for rank in range(size)]
    facets = {**FACETS, "top_k": top_k, "world_size": size, "format": format}
    sends = DispatchProblem(**facets, dtype=str(dtype)[6:], scales="scales" in parts[0])
    sums = CombineProblem(**facets, dtype=str(of_y)[6:])
    of_tokens = World(modules, size, modules.adapter.Dispatch(sends)._row_bytes)
    of_sums = World(modules, size, modules.adapter.Combine(sums)._row_bytes)

    def act(rank: int) -> None:
        given, want = parts[rank], wanted_by_expert(rank, size, format, parts)
        dispatch = of_tokens.serve(modules.adapter.Dispatch(sends), rank)
        combine = of_sums.serve(modules.adapter.Combine(sums), rank)
        moved, odd = (gapped, off_by_bytes)[top_k % 2], top_k % 2
        scales = gapped(given["scales"]) if "scales" in given else None
        outgoing = Outgoing(moved(given["x"]), scales, *(given[name] for name in KEYS), MOST)
        sent = dispatch.launch(outgoing, GROUP, 1.0)
        got = by_expert(sent)
        got["rows"] = got["rows"].view(torch.uint8)
        assert [name for name in want if not same(got[name].contiguous(), want[name])] == []
        assert is_handle(sent.handle)
        dispatch.launch(Outgoing(*(part if part is None else part[:rank] for part in outgoing[:4]), MOST), GROUP, 1)
        y = results(sent, rank, size, of_y)
        wide = torch.full((len(given["x"]), WIDTH, 2), torch.nan, dtype=of_y)
        rows, out = (y, wide[..., 1]) if odd else (gapped(y), torch.full_like(wide[..., 0], torch.nan))
        combine.launch(rows, Handle(*sent.handle), header_of(sent.handle), out, GROUP, 1.0)
        assert torch.equal(out, own(given, of_y))
        assert bool(wide[..., 0].isnan().all())

    together(act, size)


interpreted = pytest.mark.skipif(HAS_GPU, reason="the interpreter is off; tests/gpu runs these kernels on GPUs")


@interpreted
def test_two_ranks_exchange_every_bit(modules) -> None:
    check(modules, 2, WAYS[:1])


@interpreted
def test_two_ranks_exchange_all_formats_and_dtypes(modules) -> None:
    check(modules, 2, WAYS[1:])


@interpreted
def test_four_ranks_exchange_every_bit(modules) -> None:
    check(modules, 4, WAYS[1:2])


@interpreted
def test_it_combines_what_another_kernel_with_a_capacity_dispatched(modules) -> None:
    """The handle of `torch.gather_fixed`, on one rank: no state is needed."""
    from kernelhub.ops.comm.inputs import alone

    given = tokens_of(0, "some twice, some none", 3, torch.bfloat16, WIDTH)
    group = alone(torch.device("cpu"))
    sent = kernelhub.moe_dispatch(
        **given, group=group, num_experts=EXPERTS, max_tokens=MOST, backend="torch.gather_fixed"
    )
    combine = modules.adapter.Combine(CombineProblem(**FACETS, dtype="bfloat16", top_k=3, world_size=1))
    World(modules, 1, combine._row_bytes).serve(combine, 0)
    out = torch.full((len(given["x"]), WIDTH), torch.nan, dtype=torch.bfloat16)
    y = results(sent, 0, 1, torch.bfloat16)
    combine.launch(y, Handle(*sent.handle), header_of(sent.handle), out, GROUP, 1.0)
    assert torch.equal(out, own(given, torch.bfloat16))


class TestWorkspaces:
    def test_a_call_without_one_names_prepare(self, modules) -> None:
        dispatch = modules.adapter.Dispatch(DispatchProblem(**FACETS, top_k=2, world_size=2))
        given = tokens_of(0, "random", 2, torch.bfloat16, WIDTH)
        with pytest.raises(KernelUnavailable, match="call the op's prepare on every rank"):
            dispatch.launch(Outgoing(given["x"], None, *(given[k] for k in KEYS), MOST), GROUP, 1.0)
        combine = modules.adapter.Combine(CombineProblem(**FACETS, top_k=2, world_size=2))
        header: Any = Header(0, 2, 2, EXPERTS, 5, MOST, 2 * MOST)
        with pytest.raises(KernelUnavailable, match="call the op's prepare on every rank"):
            combine.launch(given["x"], None, header, given["x"], GROUP, 1.0)

    def test_symmetric_memory_of_another_backend_is_named(self, modules, monkeypatch) -> None:
        """Its barriers do nothing."""
        from torch.distributed import _symmetric_memory

        monkeypatch.setattr(_symmetric_memory, "get_backend", lambda device: "NVSHMEM", raising=False)
        with pytest.raises(KernelUnavailable, match="symmetric memory is NVSHMEM, and it requires CUDA"):
            modules.workspace.exchange_for("moe_dispatch", GROUP, torch.device("cpu"), MOST, 64, 1.0)

    def test_more_than_the_kernels_count_is_refused(self, modules) -> None:
        with pytest.raises(KernelUnavailable, match=r"300000 tokens of 14336 bytes .* split the batch"):
            modules.workspace.exchange_for("moe_dispatch", GROUP, torch.device("cpu"), 300_000, 14336, 1.0)

    def test_it_is_made_once_where_the_allocator_placed_it(self, modules, monkeypatch) -> None:
        """Blocks of all ranks are mapped anew from their beginnings; the workspace begins where the buffer does."""
        made = modules.workspace
        size = made._bytes(2, MOST, 64)
        memory, device = torch.zeros(size + 256, dtype=torch.uint8), torch.device("cuda", 0)
        shared: Any = type("Shared", (), {})()
        shared.buffer, shared.num_bytes, shared.rank = memory[256:], size, 1
        waits: list[tuple[int, ...]] = []
        shared.handle = SimpleNamespace(
            buffer_ptrs=[4096, memory.data_ptr()], barrier=lambda *given: waits.append(given)
        )
        window = SimpleNamespace(address=1 << 30, stride=1 << 21)
        asked, met = [], []
        monkeypatch.setattr(made, "Window", lambda *args: asked.append(args) or window)
        monkeypatch.setattr(made.symmetric, "rendezvoused", lambda *args: shared)
        monkeypatch.setattr(made.symmetric, "workspace_of", lambda *args: shared)
        monkeypatch.setattr(made, "meet", lambda *args: met.append(args))
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        whole = torch.full((2, size), 7, dtype=torch.uint8)
        fake.PACKED[(1 << 30) + 256, size, 1 << 21, 2, torch.uint8, 0] = whole
        exchange = made.exchange_for("moe_combine", GROUP, device, MOST, 64, 1.0)
        assert made.exchange_for("moe_combine", GROUP, device, MOST, 64, 1.0) is exchange
        assert made.exchange_before("moe_combine", GROUP, MOST, 64) is exchange
        assert asked == [([4096, memory.data_ptr()], 256 + size, device)]
        assert len(met) == 1
        for limit_s in (2.5, 0.0):
            exchange.barrier(limit_s)
        assert waits == [(0, 2500), (0, 1)], "milliseconds, of which 0 are without limit"
        assert not whole[1].any()
        assert bool((whole[0] == 7).all()), "this clears the memory of its own rank only"

    def test_a_layout_has_room_for_a_power_of_two_of_tokens(self, modules) -> None:
        purposes = [modules.workspace._purpose("moe_dispatch", tokens) for tokens in (1, 256, 257, 512, 513)]
        assert [text.partition("up to ")[2] for text in purposes] == [
            *["256 tokens"] * 2,
            *["512 tokens"] * 2,
            "1024 tokens",
        ]


class Driver(ModuleType):
    """The part of the CUDA driver that maps memory."""

    STEP = 4096
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="both")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="least")

    def __init__(self, refuses: str = "") -> None:
        super().__init__("cuda.bindings.driver")
        self.refuses, self.held, self.mapped, self.freed = refuses, 0, {}, []
        self.access: Any = None

    def CUmemAccessDesc(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace(type=None, id=None), flags=None)

    def cuMemRetainAllocationHandle(self, address: int) -> Any:
        if self.refuses == "retain":
            return (1, None)
        self.held += 1
        return 0, ("memory at", address)

    def cuMemRelease(self, handle: Any) -> Any:
        self.held -= 1
        return (0,)

    def cuMemGetAllocationPropertiesFromHandle(self, handle: Any) -> Any:
        return 0, "form"

    def cuMemGetAllocationGranularity(self, form: Any, which: str) -> Any:
        return 0, self.STEP

    def cuMemAddressReserve(self, size: int, step: int, address: int, flags: int) -> Any:
        assert size % step == 0
        return 0, 1 << 20

    def cuMemMap(self, address: int, size: int, offset: int, handle: Any, flags: int) -> Any:
        if self.refuses == "map" and self.mapped:
            return (1,)
        assert size % self.STEP == 0
        assert address % self.STEP == 0
        assert offset == 0
        self.mapped[address] = (size, handle)
        return (0,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> Any:
        self.access = (address, size, *((one.location.type, one.location.id, one.flags) for one in access))
        return (0,)

    def cuMemUnmap(self, address: int, size: int) -> Any:
        assert self.mapped.pop(address)[0] == size
        return (0,)

    def cuMemAddressFree(self, address: int, size: int) -> Any:
        self.freed.append((address, size))
        return (0,)


class TestWindow:
    @pytest.fixture
    def driver(self, request, monkeypatch) -> Driver:
        made = Driver(getattr(request, "param", ""))
        package = ModuleType("cuda.bindings")
        package.driver = made  # type: ignore[attr-defined]
        for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", package), (made.__name__, made)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        return made

    def test_the_memory_of_all_ranks_lies_at_equal_distances(self, driver) -> None:
        blocks = [7 << 30, 3 << 30, 5 << 30]
        window = Window(blocks, 5000, torch.device("cuda", 2))
        assert (window.address, window.stride) == (1 << 20, 8192)
        places = [(1 << 20) + rank * 8192 for rank in range(3)]
        assert driver.mapped == {
            place: (8192, ("memory at", block)) for place, block in zip(places, blocks, strict=True)
        }
        assert driver.access == (1 << 20, 3 * 8192, ("device", 2, "both"))
        assert driver.held == 0
        del window
        assert driver.mapped == {}
        assert driver.freed == [(1 << 20, 3 * 8192)]

    def test_within_a_capture_it_stays_mapped(self, driver, monkeypatch) -> None:
        """A capture that waited for the device would fail."""
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("it waited"))
        window = Window([1 << 30], 5000, torch.device("cuda", 0))
        del window
        assert len(driver.mapped) == 1

    @pytest.mark.parametrize("driver", ["retain", "map"], indirect=True)
    def test_a_driver_that_refuses_is_named_and_keeps_no_address(self, driver) -> None:
        with pytest.raises(KernelUnavailable, match=f"does not {driver.refuses} memory of other ranks"):
            Window([1 << 30, 2 << 30], 5000, torch.device("cuda", 0))
        assert driver.mapped == {}


class TestSelection:
    def decision(self, op: str, **facets: Any) -> Any:
        asked = {"device": "H200", "machine": MACHINE, "link": NVLINK, "world_size": 4, "capacity": "few"}
        told = kernelhub.explain(op, **asked | facets, backend=NAME)
        return told.selected, next(decision for decision in told.decisions if decision.kernel == NAME)

    @pytest.mark.parametrize(
        ("facets", "code"),
        [
            ({"world_size": 3, "num_experts": 48}, "world_size"),
            ({"link": "pcie", "peers": ATOMICS}, "link"),
            ({"hidden_size": 2888}, "divisibility"),
            ({"device": "A100"}, "capability"),
            ({"capacity": "exact"}, "value"),
        ],
    )
    def test_limits(self, facets, code) -> None:
        selected, decision = self.decision("moe_dispatch", **facets)
        assert selected is None
        assert code in [rejection.code for rejection in decision.rejections]

    def test_only_a_request_selects_it(self) -> None:
        for op in ("moe_dispatch", "moe_combine"):
            assert self.decision(op)[0] == NAME
            told = kernelhub.explain(op, device="H200", machine=MACHINE, link=NVLINK, world_size=4, capacity="few")
            assert told.selected != NAME
        assert self.decision("moe_combine", rows="kept")[0] is None
