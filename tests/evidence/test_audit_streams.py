"""What an audit does on a GPU, with streams and events that a test moves on by hand; `tests/gpu` has a real one."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

import kernelhub
from kernelhub.dispatch.audits import AUDITS, AuditSettings
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import DeviceLost
from kernelhub.evidence.audit import findings, watching
from kernelhub.ops import graph_memory
from kernelhub.ops.attention.adapter import DenseStep
from kernelhub.ops.attention.arguments import Values


class Device:
    """A GPU whose streams run only as far as `reached` says."""

    def __init__(self) -> None:
        self.reached = 0
        self.done: list[str] = []
        self.capturing = False
        self.free_bytes = 1 << 40
        self.current = self.caller = self.stream("caller")

    def stream(self, name):
        return SimpleNamespace(name=name, wait_event=lambda event: self.done.append(f"{name} waits for {event.number}"))

    def event(self):
        number = sum(entry.startswith("event") for entry in self.done)
        event = SimpleNamespace(number=number, query=lambda: self.reached > number)
        event.record = lambda stream: self.done.append(f"event {number} behind {stream.name}")
        return event

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield stream
        finally:
            self.current = before

    def refuse(self, *_):
        raise AssertionError("the audit waits for the device")


@pytest.fixture
def device(monkeypatch) -> Device:
    made, cuda = Device(), torch.cuda
    monkeypatch.setattr(graph_memory, "_captures", lambda: made.capturing)
    monkeypatch.setattr(cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(cuda, "Event", made.event)
    monkeypatch.setattr(cuda, "Stream", lambda device: made.stream("side"))
    monkeypatch.setattr(cuda, "stream", made.on)
    monkeypatch.setattr(cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (made.free_bytes, 0))
    monkeypatch.setattr(cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(cuda, "synchronize", made.refuse)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: made.done.append(f"kept for {stream.name}")
    )
    monkeypatch.setattr(watching, "PENDING", watching.Pending())
    findings.forget_reported()
    yield made
    AUDITS.settle = None


class Kernel:
    """An adapter of `attention` whose launches run at once, as if on GPU 0."""

    def __init__(self, factor: float = 1.0, share: float = 1.0) -> None:
        operands = [torch.randn(1, 4, heads, 16) for heads in (2, 1, 1)]
        plan = kernelhub.attention.prepare(*operands)
        self.launches = 0
        launch = plan.adapter.launch

        def counted(*given):
            self.launches += 1
            launch(*given)
            given[5].mul_(factor)

        self.adapter = plan.adapter
        self.adapter.launch = counted
        self.kernel = plan.kernel
        watching.watch(self.adapter, plan.selection, 0, AuditSettings(share))

    def run(self, spoil: bool = False):
        """One call, whose operands and result are overwritten when it has returned."""
        q, k, v = (torch.randn(1, 4, heads, 16) for heads in (2, 1, 1))
        out = torch.empty_like(q)
        self.adapter.launch(q, k, v, DenseStep(), Values(0.25), out, None)
        for tensor in (q, k, v, out):
            tensor.fill_(torch.nan)

    @property
    def audit(self):
        return next(item for item in kernelhub.report().audits if item.kernel == self.kernel)


def test_a_call_returns_before_it_is_compared_and_a_later_one_compares_its_copies(device) -> None:
    kernel = Kernel()
    kernel.run()
    assert kernelhub.report().audits == (), "the device has not come so far"
    assert device.done == ["event 0 behind caller"]
    device.reached = 1
    kernel.run()
    kept = device.done.count("kept for side")
    assert device.done[:2] == ["event 0 behind caller", "side waits for 0"], "before the copies are read"
    assert kept == 4, "memory of the caller's stream: q, k, v and out"
    assert device.done[2:] == ["kept for side"] * kept + ["event 1 behind caller"]
    assert (kernel.audit.checked, kernel.audit.wrong, kernel.audit.skipped) == (1, 0, {})
    assert device.current is device.caller


def test_a_wrong_call_is_found_once_the_device_has_come_so_far(device) -> None:
    kernel = Kernel(factor=1.3)
    kernel.run()
    device.reached = 1
    assert kernel.audit.wrong == 1, "the report looks, too"
    assert kernelhub.health().wrong_in_service


def test_no_more_than_a_few_calls_wait(device) -> None:
    kernel = Kernel()
    for _ in range(watching.MOST_PENDING + 3):
        kernel.run()
    assert kernel.audit.skipped == {"pending": 3}
    device.reached = 100
    assert kernel.audit.checked == watching.MOST_PENDING
    assert watching.PENDING.num_bytes == 0


def test_what_waits_is_looked_at_before_the_next_call_that_is_due(device) -> None:
    kernel = Kernel(share=1e-4)
    for _ in range(10):
        kernel.run()
    device.reached = 100
    for _ in range(70):
        kernel.run()
    assert AUDITS.counts()[0].checked >= 5


def test_a_captured_call_is_launched_and_nothing_else(device) -> None:
    kernel = Kernel()
    kernel.run()
    device.reached, device.capturing = 1, True
    kernel.run()
    assert kernel.launches == 2
    assert kernel.audit.skipped == {"capture": 1}
    assert kernel.audit.checked == 0, "nor is an event asked, which would end the capture"
    assert device.done == ["event 0 behind caller"]


def test_a_call_in_the_memory_pool_of_a_compiled_graph_is_not_copied(device, monkeypatch) -> None:
    manager = SimpleNamespace(in_warmup=True, in_recording=False)
    of_thread = SimpleNamespace(tree_manager_containers={})
    trees = SimpleNamespace(local=of_thread, get_manager=lambda device, create_if_none_exists: manager)
    monkeypatch.setitem(__import__("sys").modules, "torch._inductor.cudagraph_trees", trees)
    kernel = Kernel()
    kernel.run()
    assert kernel.audit.skipped == {"capture": 1}
    manager.in_warmup = False
    kernel.run()
    device.reached = 1
    assert kernel.audit.checked == 1


def test_on_a_lost_device_nothing_is_copied_and_nothing_asked(device) -> None:
    kernel = Kernel()
    kernel.run()
    device.reached = 1
    GATE.lost[0] = DeviceLost(0, "attention", kernel.kernel, "CUDA error", 0.0, ())
    kernel.run()
    assert kernel.audit.skipped == {"lost": 1}
    assert device.done == ["event 0 behind caller"]
    assert HUB.report().audits[0].checked == 0


def test_a_device_with_too_little_free_memory_is_left_alone(device) -> None:
    device.free_bytes = 100
    kernel = Kernel()
    kernel.run()
    assert kernel.audit.skipped == {"memory": 1}


def test_a_child_that_was_forked_has_nothing_that_waits(device) -> None:
    kernel = Kernel()
    kernel.run()
    watching.PENDING.renew()
    device.reached = 1
    assert kernelhub.report().audits == ()
