"""Gather and reduce-scatter in Triton over memory of all ranks, in the interpreter: ranks are processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.comm.parts import AllGather, ReduceScatter
from kernelhub.errors import KernelUnavailable, RanksDisagree
from kernelhub.ops.comm.problem import AllGatherProblem, ReduceScatterProblem
from tests.backends.simulated_ranks import GROUP, Ranks, run_ranks
from tests.backends.test_triton_comm import DTYPES, FACETS, TIMEOUT_S, sum_of, values
from tests.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the interpreter is off; tests/gpu runs these kernels on GPUs")
SLOT_BYTES = 32 << 10
interpreter.repair()


def gather(size: int, workspace: Any, dtype: torch.dtype) -> AllGather:
    made = AllGather(AllGatherProblem(**FACETS, dtype=str(dtype)[6:], world_size=size))
    made.parts.attach(GROUP.group_name, workspace)
    return made


def scatter(size: int, workspace: Any, dtype: torch.dtype) -> ReduceScatter:
    made = ReduceScatter(ReduceScatterProblem(**FACETS, dtype=str(dtype)[6:], world_size=size))
    made.parts.attach(GROUP.group_name, workspace)
    return made


def exchanges(rank: int, size: int, workspace: Any) -> list[str]:
    """What is wrong of several sizes, both ops in turn, so that the sets of slots alternate."""
    wrong = []
    for dtype in DTYPES:
        of_all, of_part = gather(size, workspace, dtype), scatter(size, workspace, dtype)
        for rows, columns in ((1, 8), (3, 5), (2, 605), (0, 4)):
            parts = [values(other, (rows, columns), dtype) for other in range(size)]
            wide = torch.full((size * rows, columns, 2), torch.nan, dtype=dtype)
            out = wide[..., 0] if columns == 8 else torch.full((size * rows, columns), torch.nan, dtype=dtype)
            of_all.launch(parts[rank], out, GROUP, TIMEOUT_S)
            wrong += [] if torch.equal(out, torch.cat(parts)) else [f"gather {dtype} {rows} x {columns}"]
            whole = [values(other, (size * rows, columns), dtype) for other in range(size)]
            want = sum_of(whole).to(dtype)[rank * rows : (rank + 1) * rows]
            x = torch.stack([whole[rank], whole[rank]], -1)[..., 1] if columns == 8 else whole[rank]
            out = torch.full((rows, columns), torch.nan, dtype=dtype)
            of_part.launch(x, out, GROUP, TIMEOUT_S)
            wrong += [] if torch.equal(out, want) else [f"scatter {dtype} {rows} x {columns}"]
            if not wide[..., 1].isnan().all():
                wrong.append("written beside the result")
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_get_the_rows_and_sums_of_all(size: int) -> None:
    ranks = Ranks(size, SLOT_BYTES)
    assert run_ranks(lambda rank: exchanges(rank, size, ranks.workspaces[rank]), size) == [[]] * size
    assert all(bool((memory == 0xFF).all()) for memory in ranks.memories), "slots that are not empty"


@pytest.mark.parametrize("kind", [gather, scatter])
def test_a_missing_rank_leaves_nan_and_is_named_by_the_next_call(kind: Any) -> None:
    ranks = Ranks(2, SLOT_BYTES)
    adapter = kind(2, ranks.workspaces[0], torch.float32)
    x = torch.ones(4, 4)
    out = torch.zeros((8, 4) if kind is gather else (2, 4))
    adapter.launch(x, out, GROUP, 3e-6)
    assert out[-1].isnan().all()
    with pytest.raises(RanksDisagree, match="waited in vain for rank 1") as error:
        adapter.launch(x, out, GROUP, 3e-6)
    assert error.value.ranks == (1,)


def test_a_call_without_a_workspace_names_prepare() -> None:
    adapter = AllGather(AllGatherProblem(**FACETS, dtype="float32", world_size=2))
    with pytest.raises(KernelUnavailable, match="prepare"):
        adapter.launch(torch.ones(4), torch.ones(8), GROUP, 1.0)
