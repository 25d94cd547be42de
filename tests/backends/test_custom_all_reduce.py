"""vLLM's all-reduce over a workspace of kernelhub: ranks are threads, and the operators read what its kernels read."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.custom_all_reduce import adapter, libraries
from kernelhub.backends.custom_all_reduce.adapter import OfVllm, Workspace, bytes_for
from kernelhub.backends.shared import operators
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import KernelUnavailable
from kernelhub.ops.comm.problem import ATOMICS, MESSAGE_BYTES, NVLINK, AllReduceProblem
from kernelhub.probes.device import simulated
from tests.backends.fake.custom_all_reduce import Library
from tests.backends.simulated_ranks import Group
from tests.backends.threads_as_ranks import together

GROUP: Any = Group(group_name="threads", size=lambda: 2)
MESSAGE = "32KB"
FACETS = {"device": simulated("H100"), "link": NVLINK, "peers": ATOMICS, "message": MESSAGE}
MACHINE = SimulatedMachine({"vllm": "0.33.0", "sgl_kernel": "0.4.10"})
NAMES = ("custom_all_reduce.vllm", "custom_all_reduce.sgl_kernel")


@pytest.fixture(params=[8, 16], ids=["rows of 8", "rows of 16"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library(request.param, [])
    functions = libraries.Operators(*(getattr(made, name) for name in libraries.Operators._fields))
    monkeypatch.setattr(adapter, "operators_of", lambda library, capability: functions)
    monkeypatch.setattr(adapter, "TABLE_BYTES", 1 << 14)
    return made


def connected(library: Library, world_size: int, dtype: torch.dtype) -> list[Any]:
    problem = AllReduceProblem(**FACETS, dtype=str(dtype)[6:], world_size=world_size)
    ranks = [OfVllm(problem) for _ in range(world_size)]
    size = bytes_for(ranks[0]._operators, MESSAGE_BYTES[MESSAGE])
    blocks = [torch.zeros(size + 128, dtype=torch.uint8) for _ in range(world_size)]
    library.memories[:] = [block[-block.data_ptr() % 128 :][:size] for block in blocks]
    addresses = [memory.data_ptr() for memory in library.memories]
    for rank, made in enumerate(ranks):
        made._connected.keep(GROUP, Workspace(made._operators, rank, library.memories[rank], addresses))
    return ranks


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Integers, whose sums are exact in every order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums(library, world_size) -> None:
    check_sums(library, world_size, torch.bfloat16)


@pytest.mark.parametrize(("world_size", "dtype"), [(8, torch.bfloat16), (2, torch.float32), (4, torch.float16)])
def test_sums_of_more_ranks_and_dtypes(library, world_size, dtype) -> None:
    check_sums(library, world_size, dtype)


def check_sums(library: Library, world_size: int, dtype: torch.dtype) -> None:
    """In captures, too, whose calls take further rows of the table."""
    ranks = connected(library, world_size, dtype)
    shapes = ((), (7,), (0, 8), (3, 5), (16, 256), (MESSAGE_BYTES[MESSAGE] // dtype.itemsize - 1,), (8, 1024), (1, 1))
    parts = {shape: [values(rank, shape, dtype) for rank in range(world_size)] for shape in shapes}
    counted = [rank._connected.get(GROUP) for rank in ranks]

    def act(rank: int) -> None:
        for shape in shapes:
            want = torch.stack(parts[shape]).sum(0).to(dtype)
            out = torch.full(shape, torch.nan, dtype=dtype)
            ranks[rank].launch(parts[shape][rank], out, GROUP, 1.0)
            assert torch.equal(out, want), shape
        x, want = parts[16, 256][rank].t(), torch.stack(parts[16, 256]).sum(0).t()
        wide = torch.full((256, 33), torch.nan, dtype=dtype)
        ranks[rank].launch(x, wide[:, 1::2], GROUP, 1.0)
        assert torch.equal(wide[:, 1::2], want)
        assert wide[:, ::2].isnan().all()
        shifted = torch.empty(16 * 256 + 1, dtype=dtype)[1:].view(16, 256)
        for place in (shifted.copy_(parts[16, 256][rank]), parts[16, 256][rank].clone()):
            ranks[rank].launch(place, place, GROUP, 1.0)
            assert torch.equal(place, want.t())

    together(act, world_size)
    library.capturing = True
    together(act, world_size)
    for workspace in counted:
        workspace.count_captured()


@pytest.mark.parametrize("works", [True, False])
def test_connected_ranks_try_the_kernel(library, works, monkeypatch) -> None:
    """An operator says nothing where its kernel did not start."""
    ranks = connected(library, 2, torch.bfloat16)
    made: list[Any] = [type("Shared", (), {})() for _ in ranks]
    for rank, shared in enumerate(made):
        shared.rank, shared.buffer = rank, library.memories[rank]
        shared.handle = SimpleNamespace(buffer_ptrs=[memory.data_ptr() for memory in library.memories])
    groups: list[Any] = [Group(group_name="threads", size=lambda: 2, rank=lambda rank=rank: rank) for rank in (0, 1)]
    monkeypatch.setattr(adapter.symmetric, "rendezvoused", lambda group, *args: made[group.rank()])
    monkeypatch.setattr(adapter, "meet", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    if not works:
        library.summed = lambda state, addresses, count, dtype: torch.ones(count, dtype=dtype)  # type: ignore[method-assign]
    x = torch.zeros(3, dtype=torch.bfloat16)

    def act(rank: int) -> None:
        if works:
            ranks[rank].connect(x, groups[rank], 1.0)
            ranks[rank].connect(x, groups[rank], 1.0)  # another plan of the group
            return
        with pytest.raises(KernelUnavailable, match=r"gave 1\.0 as the sum of 2 ones"):
            ranks[rank].connect(x, groups[rank], 1.0)

    together(act, 2)
    assert len(library.states) == 4


def test_captures_end_before_the_table_does(library, monkeypatch) -> None:
    monkeypatch.setattr(adapter, "MOST_CAPTURED", 3)
    workspace = connected(library, 2, torch.bfloat16)[0]._connected.get(GROUP)
    for _ in range(3):
        workspace.count_captured()
    with pytest.raises(KernelUnavailable, match="captured 3 sums"):
        workspace.count_captured()


def test_the_limit_is_the_end_of_the_table() -> None:
    rows = adapter.TABLE_BYTES // (16 * 8)  # of the longest rows
    assert rows == 1 + adapter.MOST_CAPTURED


def test_a_state_ends_with_its_workspace(library) -> None:
    ranks = connected(library, 2, torch.bfloat16)
    assert not library.disposed
    del ranks
    gc.collect()
    assert sorted(library.disposed) == [1, 2]


def test_a_call_without_a_workspace_names_prepare(library) -> None:
    made = OfVllm(AllReduceProblem(**FACETS, world_size=2))
    x = torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(KernelUnavailable, match="prepare"):
        made.launch(x, x, GROUP, 1.0)


@pytest.mark.parametrize("library", [libraries.VLLM, libraries.SGL], ids=lambda library: library.package)
def test_operators_are_found_as_the_library_declares_them(library, monkeypatch) -> None:
    """A library without some of the declarations, as SGLang's is; torch infers them."""
    namespace = f"declared_{library.package}"
    made = torch.library.Library(namespace, "DEF")
    try:
        for name, schema in libraries.SCHEMAS[library].items():
            made.define(f"{name}{schema}")
        renamed = type(library)(library.package, namespace, library.install, library.files, library.files_on)
        monkeypatch.setitem(libraries.SCHEMAS, renamed, libraries.SCHEMAS[library])
        found = libraries.operators_of(renamed, (9, 0))
        assert [item._schema.name for item in found] == [f"{namespace}::{name}" for name in found._fields]
        broken = {**libraries.SCHEMAS[library], "all_reduce": "(int fa, Tensor inp, Tensor! out) -> ()"}
        monkeypatch.setitem(libraries.SCHEMAS, renamed, broken)
        with pytest.raises(ImportError, match="also requires reg_buffer"):
            libraries.operators_of(renamed, (9, 0))
    finally:
        made._destroy()
        assert namespace not in operators._files


def test_a_library_beside_vllms_is_named(monkeypatch) -> None:
    names = ["_C::of_another_engine"]
    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", lambda: names)
    with pytest.raises(ImportError, match="_C::of_another_engine"):
        libraries._check_beside(libraries.VLLM)
    libraries._check_beside(libraries.SGL)
    names.append("_C_custom_ar::all_reduce")
    libraries._check_beside(libraries.VLLM)


@pytest.mark.parametrize(
    ("facets", "codes"),
    [
        ({"message": "256KB"}, ("supported", "supported")),
        ({"message": "32MB"}, ("message", "message")),
        ({"message": "32KB", "world_size": 3}, ("world_size", "world_size")),
        ({"message": "32KB", "link": "pcie", "peers": ATOMICS}, ("link", "link")),
        ({"message": "32KB", "device": "A100"}, ("untrusted", "capability")),
        ({"message": "32KB", "machine": SimulatedMachine({"vllm": "0.34.0"})}, ("package_version", "package_missing")),
    ],
)
def test_limits(facets, codes) -> None:
    asked = {"device": "H200", "machine": MACHINE, "link": NVLINK, "world_size": 6} | facets
    found = {decision.kernel: decision for decision in kernelhub.explain("all_reduce", **asked).decisions}
    assert tuple(found[name].code for name in NAMES) == codes


def test_faster_ones_are_selected_before_them() -> None:
    asked = {"device": "H200", "machine": MACHINE, "link": NVLINK, "world_size": 2, "message": "32KB"}
    assert kernelhub.explain("all_reduce", **asked).selected not in NAMES
    for name in NAMES:
        assert kernelhub.explain("all_reduce", **asked, backend=name).selected == name
