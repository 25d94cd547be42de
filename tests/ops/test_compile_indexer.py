"""The indexer under torch.compile: at most two graphs over sizes, the same numbers, destinations written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelhub
from kernelhub.ops.indexer.inputs import logits_inputs, paged_logits_inputs, topk_inputs
from kernelhub.ops.models.shapes import IndexerModel
from tests.conftest import DEVICE
from tests.ops.test_compile import compiled

SMALL = IndexerModel("small", 4, 16, 8)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def arguments_of(op: str, size: int) -> dict[str, Any]:
    if op == "mqa_logits":
        return logits_inputs(SMALL, tokens=size, keys=40 + size, device=DEVICE)
    if op == "paged_mqa_logits":
        lengths = tuple(range(3, 3 + size))
        return paged_logits_inputs(SMALL, seq_lens=lengths, page_size=4, max_seq_len=30, fused=True, device=DEVICE)
    return topk_inputs(tokens=size, keys=60 + size, k=8, device=DEVICE)


@pytest.mark.parametrize("op", ["mqa_logits", "paged_mqa_logits", "topk_indices"])
class TestCompiled:
    def test_at_most_two_graphs_over_sizes(self, op: str) -> None:
        function = getattr(kernelhub, op)
        run, counter = compiled(lambda arguments: function(**arguments) * 1)
        for size in (2, 3, 9, 17):
            arguments = arguments_of(op, size)
            assert torch.equal(run(arguments), function(**arguments))
        assert counter.frame_count <= 2

    def test_a_destination_is_written(self, op: str) -> None:
        function = getattr(kernelhub, op)
        run, counter = compiled(lambda arguments, out: function(**arguments, out=out) * 1)
        arguments = arguments_of(op, 5)
        want = function(**arguments)
        out = torch.full_like(want, -5)
        assert torch.equal(run(arguments, out), want)
        assert torch.equal(out, want)
        assert counter.frame_count == 1

    def test_a_plan_runs_inside(self, op: str) -> None:
        arguments = arguments_of(op, 5)
        plan = getattr(kernelhub, op).prepare(**arguments)
        run, _ = compiled(lambda arguments: plan.run(**arguments) * 1)
        assert torch.equal(run(arguments), plan.run(**arguments))

    def test_fake_tensors_give_the_shape(self, op: str) -> None:
        arguments = arguments_of(op, 5)
        want = getattr(kernelhub, op)(**arguments)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            faked = {
                name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for name, value in arguments.items()
            }
            got = getattr(kernelhub, op)(**faked)
        assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
