"""Received tokens by expert in Triton against those of torch: the same rows, in the same order, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernelhub.backends.shared import arrange as module
from kernelhub.backends.shared.arrange import Arrange
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.comm.experts.adapter import PushRows
from kernelhub.ops.comm.experts.formats import Arranged, arranged
from kernelhub.ops.comm.experts.problem import CONTIGUOUS, FORMATS, MASKED, DispatchProblem
from kernelhub.ops.formats import E4M3
from kernelhub.probes.device import simulated
from tests.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the interpreter is off; tests/gpu runs these kernels on GPUs")
interpreter.repair()
LOCAL = 5  # experts of a rank: no power of two
WIDTH = 144  # two scales
BOTH = FORMATS[1:]


def received(ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Tokens with these local ids, NaN in every row of no expert."""
    random = torch.Generator().manual_seed(len(ids))
    x = torch.randint(-8, 9, (len(ids), WIDTH), generator=random).float()
    x[(ids < 0).all(1)] = torch.nan
    weights = torch.rand(ids.shape, generator=random).where(ids >= 0, 0.0)
    scales = torch.rand(len(ids), 2, generator=random) if dtype is E4M3 else None
    return {"x": x.to(dtype), "scales": scales, "ids": ids.int(), "weights": weights}


def made(format: str, given: dict[str, Any]) -> Arranged:
    dtype, top_k = str(given["x"].dtype)[6:], given["ids"].shape[1]
    problem = DispatchProblem(
        device=simulated("H100"),
        dtype=dtype,
        hidden_size=WIDTH,
        top_k=top_k,
        num_experts=2 * LOCAL,
        world_size=2,
        format=format,
        scales=given["scales"] is not None,
    )
    arrange = PushRows(problem)._arrange
    assert isinstance(arrange, Arrange)
    operands = {name: None if part is None else part.clone() for name, part in given.items()}
    return arrange(**operands, ends=torch.zeros(LOCAL, dtype=torch.int32))


def check(format: str, given: dict[str, Any]) -> None:
    got, want = made(format, given), arranged(**given, num_experts=LOCAL, format=format, exact=False)
    assert got.x.shape == want.x.shape
    assert torch.equal(got.counts, want.counts)
    assert torch.equal(got.slots, want.slots)
    assert got.offsets is None if want.offsets is None else torch.equal(got.offsets, want.offsets)
    torch.testing.assert_close(got.weights, want.weights, rtol=1e-6, atol=0)  # torch adds in no stated order
    once = (given["ids"].unsqueeze(2) == given["ids"].unsqueeze(1)).sum(2) == 1
    assert torch.equal(got.weights[once], want.weights[once])
    named = want.slots[want.slots >= 0].long()
    for one, other in ((got.x, want.x), (got.scales, want.scales)):
        if other is not None:
            rows = [part.reshape(-1, part.shape[-1])[named].view(torch.uint8) for part in (one, other)]
            assert torch.equal(*rows)


def random_ids(tokens: int, top_k: int) -> Tensor:
    """Half of them on other ranks; experts repeat, and expert 2 has none."""
    ids = torch.randint(-LOCAL, LOCAL, (tokens, top_k), generator=torch.Generator().manual_seed(top_k))
    return ids.where((ids >= 0) & (ids != 2), -1)


@pytest.mark.parametrize("format", BOTH)
def test_repeated_missing_and_other_ranks_experts(format: str) -> None:
    ids = torch.tensor([[0, 1, 3], [3, -1, 3], [4, 4, 4], [-1, -1, -1], [-1, 0, 0], [4, 0, 4]])
    check(format, received(ids))


@pytest.mark.parametrize("format", BOTH)
def test_more_tokens_than_a_program_takes_in_one_step(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEPS", {True: (32, 1)})
    check(format, received(random_ids(70, 4), E4M3))


def test_the_most_choices() -> None:
    check(CONTIGUOUS, received(random_ids(9, 32), torch.float32))


@pytest.mark.parametrize("format", BOTH)
def test_no_token_has_an_expert(format: str) -> None:
    check(format, received(torch.full((3, 2), -1)))


def test_all_tokens_go_to_one_expert() -> None:
    check(MASKED, received(torch.full((7, 1), LOCAL - 1), torch.float16))
