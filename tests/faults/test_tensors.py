"""FX6: tensors that the host must not read, since reading one that is on a device would wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import kernelhub
from tests.dispatch.backends import qkv
from tests.faults.record import NOTHING
from tests.faults.records import FAULTS

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


@contextlib.contextmanager
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A block in which every way for the host to read a tensor raises."""

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("the host read a tensor")

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, refuse)
        yield


@pytest.mark.fault("unreadable_tensors")
def test_calls_decide_and_run_without_reading_a_tensor(monkeypatch) -> None:
    q, k, v = qkv()
    want = kernelhub.attention.reference(q, k, v)
    kernelhub.reload()
    with unreadable(monkeypatch):
        first = kernelhub.attention(q, k, v)
        again = kernelhub.attention(q, k, v)
        plan = kernelhub.attention.prepare(q, k, v, causal=True)
        out = plan.run(q, k, v)
    torch.testing.assert_close(first, want, rtol=0, atol=1e-4)
    assert torch.equal(first, again)
    assert out.shape == q.shape
    assert FAULTS["unreadable_tensors"].code == NOTHING
