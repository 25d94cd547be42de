"""torch's kernels over symmetric memory, without a GPU: what a call stages, and the workspaces of a group.

torch's operators have their own schemas and an implementation of these tests for CPUs, in which the ranks are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelhub.backends.shared import symmetric as workspaces
from kernelhub.backends.torch.comm.symmetric import OneShot, TwoShot
from kernelhub.errors import KernelUnavailable
from kernelhub.ops.comm.problem import AllReduceProblem
from kernelhub.probes.device import simulated

RANKS = 2
BYTES = 32 << 10


class Group:
    """A group of equal ranks."""

    group_name = "group of a test"

    def size(self) -> int:
        return RANKS

    def rank(self) -> int:
        return 0


GROUP = Group()


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """Sums of equal ranks, by torch's operators."""
    pytest.importorskip("torch.distributed._symmetric_memory")
    library = torch.library.Library("symm_mem", "IMPL", "CPU")

    def one_shot(x: Tensor, op: str, name: str) -> Tensor:
        check(x, op, name, 16)
        return x * RANKS

    def one_shot_out(x: Tensor, op: str, name: str, out: Tensor) -> Tensor:
        check(x, op, name, 16)
        assert out.is_contiguous()
        assert out.shape == x.shape
        return out.copy_(x * RANKS)

    def two_shot(x: Tensor, op: str, name: str) -> Tensor:
        check(x, op, name, 16 * RANKS)
        return x.mul_(RANKS)

    def two_shot_out(x: Tensor, op: str, name: str, out: Tensor) -> Tensor:
        check(x, op, name, 16 * RANKS)
        assert out.is_contiguous()
        assert out.shape == x.shape
        return out.copy_(x * RANKS)

    def check(x: Tensor, op: str, name: str, share: int) -> None:
        assert (op, name) == ("sum", Group.group_name)
        assert x.is_contiguous()
        assert not x.nbytes % share
        assert not x.data_ptr() % 16

    library.impl("one_shot_all_reduce", one_shot)
    library.impl("one_shot_all_reduce_out", one_shot_out)
    library.impl("two_shot_all_reduce_", two_shot)
    library.impl("two_shot_all_reduce_out", two_shot_out)
    yield
    library._destroy()


@pytest.fixture(params=[OneShot, TwoShot])
def adapter(request: pytest.FixtureRequest) -> Any:
    """An adapter that is connected; its workspace has NaN in every element."""
    problem = AllReduceProblem(simulated("H100"), world_size=RANKS, link="nvlink", peers="atomics", message="32KB")
    made = request.param(problem)
    buffer = torch.full((BYTES // 4,), torch.nan, dtype=torch.float32).view(torch.uint8)
    made._connected.keep(GROUP, SimpleNamespace(buffer=buffer))
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (3, 5), (64, 64), (0, 4), (BYTES // 4,)])
def test_every_element_is_staged_and_nothing_else_is_read_back(adapter, shape, dtype) -> None:
    x = torch.randn(shape).to(dtype)
    for _ in range(2):
        out = torch.full_like(x, torch.nan)
        adapter.launch(x, out, GROUP, 1.0)
        assert torch.equal(out, x * RANKS)


def test_operands_with_strides_and_addresses_that_are_not_aligned(adapter) -> None:
    wide = torch.full((16, 33), torch.nan)
    x, out = torch.randn(16, 16), wide[:, 1::2]
    adapter.launch(x.t(), out, GROUP, 1.0)
    assert torch.equal(out, x.t() * RANKS)
    assert bool(wide[:, ::2].isnan().all())
    shifted = torch.full((257,), torch.nan)[1:].view(16, 16)
    adapter.launch(x, shifted, GROUP, 1.0)
    assert torch.equal(shifted, x * RANKS)


def test_in_place(adapter) -> None:
    x = torch.randn(16, 16)
    want = x * RANKS
    adapter.launch(x, x, GROUP, 1.0)
    assert torch.equal(x, want)


def test_a_call_in_a_group_without_a_workspace_names_prepare(adapter) -> None:
    another = Group()  # of the same name
    with pytest.raises(KernelUnavailable, match="call the op's prepare on every rank"):
        adapter.launch(torch.ones(3), torch.ones(3), another, 1.0)


def test_workspaces_end_with_their_group(monkeypatch) -> None:
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(workspaces, "_workspaces", kept)
    group = Group()
    large = SimpleNamespace(num_bytes=BYTES)
    kept[group.group_name, "kernel"] = (workspaces.weakref.ref(group), [large])
    assert workspaces.workspace_of(group, "kernel", BYTES) is large
    with pytest.raises(KernelUnavailable):
        workspaces.workspace_of(group, "kernel", BYTES + 1)
    with pytest.raises(KernelUnavailable):  # another group of the same name
        workspaces.workspace_of(Group(), "kernel")
    del group
    workspaces._forget_groups_that_are_gone()
    assert not kept
