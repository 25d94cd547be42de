"""TensorRT-LLM's sums over ranks in FlashInfer: ranks are threads over one memory, by the protocol of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.flashinfer.comm import workspace
from kernelhub.backends.flashinfer.comm.requirements import threads_of_a_block, whole_warps
from kernelhub.backends.flashinfer.comm.rows import UNIT, rows_of
from kernelhub.backends.flashinfer.comm.workspace import ONE_SHOT, TWO_SHOT, Workspace, bytes_for
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import KernelUnavailable
from kernelhub.ops.comm.problem import ATOMICS, MESSAGE_BYTES, NVLINK, AllReduceProblem, AllReduceRmsNormProblem
from kernelhub.ops.comm.tolerance import normalised_error_allowed, sum_error_allowed
from kernelhub.probes.device import simulated
from tests.backends import flashinfer_fake as library
from tests.backends.fake import flashinfer_comm as fake
from tests.backends.simulated_ranks import Group
from tests.backends.threads_as_ranks import together

GROUP: Any = Group(group_name="threads", size=lambda: 2)
MESSAGE = "32KB"
FACETS = {"device": simulated("H100"), "link": NVLINK, "peers": ATOMICS, "message": MESSAGE}
MACHINE = SimulatedMachine({"flashinfer": "0.7.2", "cuda": "13.0.0", "triton": "3.6.0"})
KINDS = {"one_shot": ("OneShot", ONE_SHOT), "two_shot": ("TwoShot", TWO_SHOT)}


@pytest.fixture(autouse=True)
def adapters() -> Iterator[Any]:
    with library.installed():
        from kernelhub.backends.flashinfer.comm import adapter

        yield adapter
    fake.MEMORY.clear()


def connected(make: Callable[[], Any], purpose: str, world_size: int) -> list[Any]:
    """An adapter of each rank, over memory that held garbage."""
    made = [make() for _ in range(world_size)]
    size = bytes_for(purpose, world_size, made[0]._kernel.message_bytes)
    memories = [torch.full((size,), 0x55, dtype=torch.uint8) for _ in range(world_size)]
    fake.MEMORY[:] = memories
    addresses = [memory.data_ptr() for memory in memories]
    for rank, adapter in enumerate(made):
        adapter._kernel.connected.keep(GROUP, Workspace(purpose, rank, memories[rank], addresses))
    return made


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return torch.where(made.abs() < 0.1, torch.tensor(-0.0, dtype=dtype), made)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_sums(adapters, kind, world_size) -> None:
    check_sums(adapters, kind, world_size, torch.bfloat16)


@pytest.mark.parametrize(("world_size", "dtype"), [(8, torch.bfloat16), (2, torch.float16)])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_more_ranks_and_dtypes(adapters, kind, world_size, dtype) -> None:
    check_sums(adapters, kind, world_size, dtype)


def check_sums(adapters: Any, kind: str, world_size: int, dtype: torch.dtype) -> None:
    """Sizes in turn, so that slots are emptied and flags wrap: odd ones, whole rows, what fills the workspace."""
    name, purpose = KINDS[kind]
    problem = AllReduceProblem(**FACETS, dtype=str(dtype)[6:], world_size=world_size)
    ranks = connected(lambda: getattr(adapters, name)(problem), purpose, world_size)
    shapes = ((), (7,), (0, 8), (3, 5), (16, 512), (7, 360), (MESSAGE_BYTES[MESSAGE] // 2 - 1,), (8, 2048), (1, 1))
    parts = {shape: [values(rank, shape, dtype) for rank in range(world_size)] for shape in shapes}

    def act(rank: int) -> None:
        for shape in shapes:
            x, want = parts[shape][rank], fake.summed(parts[shape])
            out = torch.full(shape, torch.nan, dtype=dtype)
            ranks[rank].launch(x, out, GROUP, 1.0)
            assert torch.equal(out, want), shape
            assert not x.isnan().any()
        x, want = parts[16, 512][rank].t(), fake.summed(parts[16, 512]).t()
        wide = torch.full((512, 33), torch.nan, dtype=dtype)
        ranks[rank].launch(x, wide[:, 1::2], GROUP, 1.0)
        assert torch.equal(wide[:, 1::2], want)
        assert wide[:, ::2].isnan().all()
        for shape in ((3, 5), (16, 512)):
            shifted = torch.empty(parts[shape][0].numel() + 1, dtype=dtype)[1:].view(shape)
            for place in (shifted.copy_(parts[shape][rank]), parts[shape][rank].clone()):
                ranks[rank].launch(place, place, GROUP, 1.0)
                assert torch.equal(place, fake.summed(parts[shape]))

    together(act, world_size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "hidden_size"), [(2, 512), (4, 3584)])
def test_norms(adapters, kind, world_size, hidden_size) -> None:
    name, purpose = KINDS[kind]
    dtype = torch.bfloat16
    problem = AllReduceRmsNormProblem(**FACETS, world_size=world_size, hidden_size=hidden_size)
    ranks = connected(lambda: getattr(adapters, f"{name}RmsNorm")(problem), purpose, world_size)
    most = MESSAGE_BYTES[MESSAGE] // (2 * hidden_size)
    weight = values(99, (hidden_size,), dtype)

    def check(out: Tensor, residual_out: Tensor, parts: list[Tensor], residual: Tensor, eps: float) -> None:
        addends = [part.double() for part in (*parts, residual)]
        total = torch.stack(addends).sum(0)
        error = sum_error_allowed(addends, dtype)
        want = total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
        assert ((residual_out.double() - total).abs() <= error).all()
        allowed = normalised_error_allowed(want, total, weight.double(), eps, error, dtype)
        assert ((out.double() - want).abs() <= allowed).all()

    def act(rank: int) -> None:
        for rows in (1, world_size, 0, most, 1):
            shape = (rows, hidden_size)
            parts = [values(10 * rows + other, shape, dtype) for other in range(world_size)]
            x, residual = parts[rank].clone(), values(rows, shape, dtype)
            out, residual_out = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
            ranks[rank].launch(x, residual, weight, 1e-5, out, residual_out, GROUP, 1.0)
            check(out, residual_out, parts, residual, 1e-5)
            assert torch.equal(x, parts[rank])
            strided = torch.full((rows, 2 * hidden_size), torch.nan, dtype=dtype)[:, ::2]
            own = residual.clone()
            ranks[rank].launch(strided.copy_(x), own, weight, 0.5, strided, own, GROUP, 1.0)
            check(strided, own, parts, residual, 0.5)

    together(act, world_size)


def test_a_call_without_a_workspace_names_prepare(adapters) -> None:
    adapter = adapters.OneShot(AllReduceProblem(**FACETS, world_size=2))
    with pytest.raises(KernelUnavailable, match="prepare"):
        adapter.launch(torch.ones(8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16), GROUP, 1.0)


def test_the_code_is_loaded_before_ranks_wait_for_each_other(adapters, monkeypatch) -> None:
    """A rank that cannot compile it raises, and has made no workspace."""

    def fail() -> None:
        raise RuntimeError("nvcc fails")

    monkeypatch.setattr(adapters, "get_trtllm_comm_module", fail)
    monkeypatch.setattr(adapters, "workspace_for", lambda *args: pytest.fail("it met the others"))
    with pytest.raises(RuntimeError, match="nvcc fails"):
        adapters.TwoShot(AllReduceProblem(**FACETS, world_size=2)).connect(torch.ones(8), GROUP, 1.0)


def test_a_workspace_is_made_once_where_the_allocator_placed_it(monkeypatch) -> None:
    """Addresses of the ranks are those of blocks, in which the buffers of all ranks are at the same offset."""
    size = bytes_for(ONE_SHOT, 2, 1024)
    memory = torch.zeros(size + 256, dtype=torch.uint8)
    shared: Any = type("Shared", (), {})()
    shared.buffer, shared.rank = memory[256:], 1
    shared.handle = SimpleNamespace(buffer_ptrs=[4096, memory.data_ptr()])
    met: list[Any] = []
    monkeypatch.setattr(workspace.symmetric, "rendezvoused", lambda *args: shared)
    monkeypatch.setattr(workspace.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(workspace, "meet", lambda *args: met.append(args))
    made = workspace.workspace_for(ONE_SHOT, GROUP, torch.device("cpu"), 1024, 1.0)
    assert workspace.workspace_for(ONE_SHOT, GROUP, torch.device("cpu"), 1024, 1.0) is made
    assert len(met) == 1
    assert made.table.tolist()[:6] == [4096 + 256, memory.data_ptr() + 256] * 3
    assert not memory[:256].any()
    monkeypatch.setattr(workspace.symmetric, "workspace_of", lambda *args: shared)
    assert workspace.workspace_before(ONE_SHOT, GROUP, 1024) is made


@pytest.mark.parametrize("least_rows", [1, 3, 5, 9])
def test_every_message_has_rows_within_its_bucket(least_rows) -> None:
    for bound in (32 << 10, 1 << 20):
        for size in (2, 16, 1000, 5760, 9216, 20480, bound // 2 + 2, bound - 16, bound - 2, bound):
            rows, threads = rows_of(size, least_rows)
            assert size <= rows * threads * UNIT <= bound
            assert rows >= least_rows
            assert 64 <= threads <= 512


def test_rows_of_the_norm_are_whole_warps() -> None:
    assert [threads_of_a_block(size // 8) for size in (256, 2560, 3584, 4096, 8192, 16384)] == [
        32,
        160,
        224,
        128,
        128,
        256,
    ]
    refused = [size for size in (256, 1536, 2048, 2304, 2560, 2880, 3584, 4096, 4608, 5120, 7168) if whole_warps(size)]
    assert refused == [2304, 2880, 4608]


def decisions(op: str, **facets: Any) -> dict[str, Any]:
    told = kernelhub.explain(op, **{"device": "H200", "machine": MACHINE, "link": NVLINK, "world_size": 4} | facets)
    return {decision.kernel: decision for decision in told.decisions}


@pytest.mark.parametrize(
    ("op", "facets", "code"),
    [
        ("all_reduce", {"message": "256KB"}, "supported"),
        ("all_reduce", {"message": "8MB"}, "message"),
        ("all_reduce", {"message": "32KB", "world_size": 6}, "world_size"),
        ("all_reduce", {"message": "32KB", "link": "pcie", "peers": ATOMICS}, "link"),
        ("all_reduce", {"message": "32KB", "dtype": "float32"}, "dtype"),
        ("all_reduce", {"message": "32KB", "device": "A100"}, "capability"),
        ("all_reduce_rms_norm", {"message": "32KB", "hidden_size": 2560}, "supported"),
        ("all_reduce_rms_norm", {"message": "32KB", "hidden_size": 2880}, "hidden_size"),
        ("all_reduce_rms_norm", {"message": "32KB", "weight_dtype": "float32"}, "mismatch"),
    ],
)
def test_limits(op, facets, code) -> None:
    found = decisions(op, **facets)[ONE_SHOT]
    assert found.code == code


def test_others_are_selected_before_them() -> None:
    told = kernelhub.explain("all_reduce", device="H200", machine=MACHINE, link=NVLINK, world_size=4, message="32KB")
    assert told.selected not in (ONE_SHOT, TWO_SHOT)
    for name in (ONE_SHOT, TWO_SHOT):
        asked = kernelhub.explain(
            "all_reduce", device="H200", machine=MACHINE, link=NVLINK, world_size=4, message="32KB", backend=name
        )
        assert asked.selected == name
