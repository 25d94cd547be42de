"""What is kept for later calls is memory of its own: no CUDA graph's, and no tensor without memory."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelhub.backends.flashinfer import steps
from kernelhub.backends.marlin.locks import Locks
from kernelhub.backends.torch.gemm.fp4 import dequantised
from kernelhub.ops import graph_memory
from kernelhub.ops.graph_memory import in_tree, may_keep, of_graph
from kernelhub.runtime.scratch import scratch

CUDA = torch.device("cuda", 0)


class Graphs:
    """Graphs on a machine without a GPU.

    Attributes:
        manager: of torch.compile's trees; None before there are any.
        capture: the number of the capture that this thread's launches go into; 0 outside of one.
    """

    manager: Any = None
    capture = 0


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    made = Graphs()
    trees = SimpleNamespace(
        local=SimpleNamespace(tree_manager_containers={}),
        get_manager=lambda device, create_if_none_exists: made.manager,
    )
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    monkeypatch.setattr(graph_memory, "_captures", lambda: made.capture > 0)
    return made


def test_a_capture_and_the_run_before_it_have_memory_of_their_graph(graphs: Graphs) -> None:
    assert not of_graph(0)
    graphs.capture = 1
    assert of_graph(0)
    assert not in_tree(0)
    graphs.capture = 0
    for warmup, recording in ((True, False), (False, True), (False, False)):
        graphs.manager = SimpleNamespace(in_warmup=warmup, in_recording=recording)
        assert in_tree(0) == of_graph(0) == (warmup or recording)


def test_threads_without_trees_are_in_none() -> None:
    pytest.importorskip("torch._inductor.cudagraph_trees")
    found: list[bool] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(in_tree(0)))
        thread.start()
        thread.join()
    assert found == [False, False]
    assert not in_tree(0)


def test_a_fake_tensor_is_not_kept() -> None:
    assert may_keep(torch.empty(1))
    dequantised._PAIRS.clear()
    with FakeTensorMode():
        assert not may_keep(torch.empty(1))
        scratch("a tag of its own", (4,), torch.float32, torch.device("cpu"))
        dequantised._pairs(torch.device("cpu"))
    assert type(scratch("a tag of its own", (4,), torch.float32, torch.device("cpu"))) is torch.Tensor
    pairs = dequantised._pairs(torch.device("cpu"))
    assert type(pairs) is torch.Tensor
    assert dequantised._pairs(torch.device("cpu")) is pairs


class TestScratchOfFlashInfer:
    """What a captured graph reads stays, and begins each replay as the kernels expect it."""

    @pytest.fixture(autouse=True)
    def on_the_cpu(self, monkeypatch: pytest.MonkeyPatch, graphs: Graphs) -> None:
        monkeypatch.setattr(steps, "_scratch", {})
        monkeypatch.setattr(steps, "captures", lambda: graphs.capture > 0)
        monkeypatch.setattr(steps, "capture_of", lambda stream: graphs.capture)
        monkeypatch.setattr(steps.torch, "zeros", lambda count, **_: torch.full((count,), 0, dtype=torch.uint8))

    @staticmethod
    def taken(num_bytes: int, stream: int = 7) -> torch.Tensor:
        return steps.workspace("xqa", CUDA, stream, num_bytes)

    def test_it_is_kept_when_a_larger_one_is_made(self) -> None:
        small = self.taken(64)
        assert self.taken(32) is small
        large = self.taken(128)
        assert large is not small
        assert self.taken(64) is large
        (kept,) = steps._scratch.values()
        assert any(one is small for one in kept.memory), "a graph may have its address"

    def test_each_graph_zeroes_the_semaphores_of_memory_that_eager_calls_do_not_have(self, graphs: Graphs) -> None:
        eager = self.taken(64)
        graphs.capture = 1
        first = self.taken(64)
        assert first is not eager
        first.fill_(3)
        assert self.taken(64) is first
        assert first.eq(3).all(), "once for each graph"
        graphs.capture = 2
        assert self.taken(64) is first
        assert not first.any(), "the graph in which it was made may never run"
        graphs.capture = 0
        assert self.taken(64) is eager

    def test_in_a_tree_each_call_has_its_own(self, graphs: Graphs) -> None:
        graphs.manager = SimpleNamespace(in_warmup=True, in_recording=False)
        assert self.taken(64) is not self.taken(64)
        assert not steps._scratch


def test_locks_of_a_tree_are_not_kept(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelhub.backends.marlin.locks._zeros", lambda device: torch.zeros(4, dtype=torch.int32))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    locks = Locks()
    graphs.manager = SimpleNamespace(in_warmup=True, in_recording=False)
    assert locks.on(CUDA) is not locks.on(CUDA)
    graphs.manager = None
    assert locks.on(CUDA) is locks.on(CUDA)
