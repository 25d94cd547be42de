"""Kernels of csrc/cuda that pass values between ranks, in whatever order blocks run and stores arrive."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.comm.total import OneShot
from kernelhub.backends.cuda.nvrtc import SOURCES
from kernelhub.backends.shared.slot_memory import SETS
from kernelhub.errors import RanksDisagree
from kernelhub.ops.comm.problem import ATOMICS, NVLINK, AllReduceProblem
from kernelhub.probes.device import simulated
from tests.cuda.emulated import COMPILER
from tests.cuda.ranks import FAULTS, Kernel, Launch, Ranks

pytestmark = pytest.mark.skipif(not COMPILER.ok, reason=COMPILER.reason)

TIMEOUT_S = 1000.0
GROUP: Any = SimpleNamespace(group_name="emulated")


class Emulated:
    """Adapters of all ranks, whose launches are noted and then made at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int, sources: Path = SOURCES) -> None:
        self.ranks, self.sources, self.world_size = Ranks(world_size), sources, world_size
        self.rank, self.noted, self.kernel = 0, list[Launch](), None
        monkeypatch.setattr(library, "library", self.library)

    def library(self, source: str, constants: dict[str, Any], device: Any) -> Any:
        def kernel(name: str, packing: str) -> Callable[..., None]:
            def note(device: int, blocks: int, threads: int, *values: Any) -> None:
                self.kernel = Kernel(source, name, constants, packing, threads, self.sources)
                self.noted.append(Launch(self.rank, blocks, values))

            return note

        return SimpleNamespace(kernel=kernel, function=lambda name, device: None)

    def attached(self, dtype: torch.dtype, looks: int = 2) -> list[Any]:
        """An adapter for each rank, with blocks of a warp."""
        of = {"device": simulated("H200"), "link": NVLINK, "peers": ATOMICS, "message": "32KB"}
        problem = AllReduceProblem(**of, dtype=str(dtype)[6:], world_size=self.world_size)
        kind = type("Emulated", (OneShot,), {"threads": 32, "looks": looks})
        made = [kind(problem) for _ in range(self.world_size)]
        for adapter, workspace in zip(made, self.ranks.workspaces, strict=True):
            adapter.attach(GROUP.group_name, workspace)
        return made

    def run(self, lots: int, **more: Any) -> str:
        """What went wrong in the launches that were noted."""
        assert self.kernel is not None
        noted, self.noted = self.noted, []
        return self.kernel.run(noted, self.world_size, 2, lots, **more)

    def are_empty(self) -> bool:
        """Whether slots are empty but for one set, and all counters of a rank are equal."""
        for workspace, memory in zip(self.ranks.workspaces, self.ranks.memories, strict=True):
            behind = workspace.turn_slots[0] - workspace.slots[0]
            used = [bool((part != 0xFF).any()) for part in memory[behind:].chunk(SETS)]
            counters = workspace.turn_counters
            if sum(used) > 1 or not bool((memory[:behind] == 0xFF).all()) or bool((counters != counters[0]).any()):
                return False
        return True


def values(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def total_of(parts: list[Tensor]) -> Tensor:
    """In float32, in the order of ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def sums(emulated: Emulated, dtype: torch.dtype, counts: Sequence[int], lots: int) -> list[str]:
    """Launches of several sizes one after the other, some in place: what is wrong."""
    world = emulated.world_size
    made = emulated.attached(dtype, looks=lots % 3 + 1)
    found, wanted = [], []
    for call, count in enumerate(counts):
        parts = [values(count, dtype, 100 * call + rank) for rank in range(world)]
        wanted.append(total_of(parts).to(dtype))
        for rank, adapter in enumerate(made):
            emulated.rank = rank
            x = parts[rank].clone()
            out = x if (call + rank) % 3 == 2 else torch.empty_like(x)
            adapter.launch(x, out, GROUP, TIMEOUT_S)
            found.append((call, rank, out))
    wrong = [fault] if (fault := emulated.run(lots)) else []
    wrong += [f"call {call}, rank {rank}" for call, rank, out in found if not torch.equal(out, wanted[call])]
    return wrong if wrong else [] if emulated.are_empty() else ["slots or counters"]


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        (2, torch.bfloat16),
        *(
            pytest.param(size, dtype, marks=pytest.mark.full)
            for size, dtype in itertools.product((2, 3, 4), (torch.bfloat16, torch.float16, torch.float32))
            if (size, dtype) != (2, torch.bfloat16)
        ),
    ],
    ids=str,
)
def test_sums_are_right_in_any_order(world_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for lots in range(3):  # of 1 to 3 looks
        emulated = Emulated(monkeypatch, world_size)
        assert sums(emulated, dtype, (8, 1000, 256, 24, 520, 264), lots) == []


def test_a_nan_of_the_bits_of_an_empty_slot_arrives_as_a_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = Emulated(monkeypatch, 2)
    made = emulated.attached(torch.bfloat16)
    x = torch.ones(64, dtype=torch.bfloat16)
    x.view(torch.int16)[5] = -1
    outs = [torch.empty_like(x) for _ in made]
    for rank, adapter in enumerate(made):
        emulated.rank = rank
        adapter.launch(x, outs[rank], GROUP, TIMEOUT_S)
    assert emulated.run(3) == ""
    assert all(out.isnan().nonzero().tolist() == [[5]] for out in outs)


def test_a_sum_that_lacks_a_rank_is_nan_and_the_next_call_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = Emulated(monkeypatch, 3)
    made = emulated.attached(torch.bfloat16)
    x, found = values(600, torch.bfloat16, 0), []
    for rank in (0, 1):
        emulated.rank = rank
        for _ in range(2):  # the second call was captured before the first ended
            found.append(torch.empty_like(x))
            made[rank].launch(x, found[-1], GROUP, 0.001)
    assert emulated.run(4) == ""
    assert all(bool(item.isnan().all()) for item in found)
    for rank in (0, 1):
        assert emulated.ranks.workspaces[rank].late() == [2]
        assert bool((emulated.ranks.workspaces[rank].turn_counters == -1).all())
        with pytest.raises(RanksDisagree, match="waited in vain for rank 2"):
            made[rank].launch(x, found[0], GROUP, 0.001)


SUM, SLOTS = "all_reduce.cu", "slots.h"
PLANTED = {
    "slots are not emptied": (SUM, "  turn.empty_last(", "  if (p.units < 0) turn.empty_last("),
    "what was used last is emptied one call late": (SLOTS, "((state & 3) + 2) % SETS", "((state & 3) + 1) % SETS"),
    "two sets take turns": (SLOTS, "((state & 3) + 1) % SETS + ", "((state & 3) + 1) % 2 + "),
    "an element that has come in part is taken": (SLOTS, "    any |= SIZE == 4", "    if (i == 0) any |= SIZE == 4"),
    "the order of ranks is that of arrival": (
        SLOTS,
        "rank == ranks.rank ? own.words[word] : rank < ranks.rank ? below : above",
        "rank == 0 ? own.words[word] : above",
    ),
    "a block advances no counter of those that the grid lacks": (
        SUM,
        "counter < COUNTERS; counter += THREADS * gridDim.x",
        "counter < gridDim.x; counter += THREADS * gridDim.x",
    ),
    "a counter is advanced before all threads have read it": (
        SUM,
        "  Turn turn(p.ranks, p.counters[blockIdx.x]);",
        "  Turn turn(p.ranks, p.counters[blockIdx.x]);\n"
        "  if (!threadIdx.x) p.counters[blockIdx.x] = turn.following(p.units);",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, line, wrong = PLANTED[fault]
    dtype = torch.float32 if "order" in fault else torch.bfloat16  # which seldom shows the order of a sum
    shutil.copytree(SOURCES, tmp_path / "cuda")
    text = (tmp_path / "cuda" / file).read_text()
    assert text.count(line) == 1
    (tmp_path / "cuda" / file).write_text(text.replace(line, wrong))
    found = []
    for lots in range(8):
        emulated = Emulated(monkeypatch, 3, tmp_path / "cuda")
        found += sums(emulated, dtype, (520, 1000, 256, 520, 8, 1000), lots)
        if found:
            break
    assert found


def test_ranks_that_wait_for_ever_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = Emulated(monkeypatch, 2)
    made = emulated.attached(torch.bfloat16)
    x = torch.ones(64, dtype=torch.bfloat16)
    made[0].launch(x, x.clone(), GROUP, TIMEOUT_S)
    assert emulated.run(0, patience=5000) == FAULTS[4]
