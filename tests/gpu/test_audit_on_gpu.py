"""What only a GPU shows of audits: copies, streams and events that are real, and captures that go on."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.audit import findings
from kernelhub.evidence.cases import CASES
from kernelhub.ops.case import Arguments
from tests.evidence import liars

pytestmark = pytest.mark.gpu
_CYCLES = 200_000_000  # that a stream is kept busy for: about 0.1 s


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path))
    findings.forget_reported()


def operands(tokens: int = 64) -> tuple[torch.Tensor, ...]:
    shapes = ((1, tokens, 8, 64), (1, tokens, 2, 64), (1, tokens, 2, 64))
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)


def audits():
    torch.cuda.synchronize()
    return kernelhub.report().audits


def test_a_call_waits_for_nothing_and_its_operands_may_be_overwritten_at_once() -> None:
    kernelhub.configure(audit=1.0)
    given = operands()
    kernelhub.attention(*given, causal=True)  # compiles
    assert audits()[0].checked == 1
    torch.cuda._sleep(_CYCLES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = kernelhub.attention(*given, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for tensor in (*given, out):
        tensor.fill_(torch.nan)
    del given, out
    torch.randn(1 << 24, device="cuda").fill_(torch.nan)  # takes the memory that is free by now
    (audit,) = audits()
    assert (audit.checked, audit.wrong, audit.skipped) == (2, 0, {})


def test_calls_of_several_streams_are_compared_rightly() -> None:
    kernelhub.configure(audit=1.0)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for number in range(24):
        with torch.cuda.stream(streams[number % 3]):
            out = kernelhub.attention(*operands(64 + number), causal=True)
            out.fill_(torch.nan)
        if number % 4 == 3:
            audits()
    assert sum(item.checked for item in audits()) == 24
    assert [str(item) for item in audits() if item.wrong or item.skipped] == []


def test_a_kernel_that_is_wrong_is_found() -> None:
    liars.attention(liars.ThirtyPercentOff)
    kernelhub.configure(audit=1.0, attention="liar.k")
    kernelhub.attention(*operands())
    assert audits()[0].wrong == 1


def test_a_capture_goes_on_and_is_counted() -> None:
    kernelhub.configure(audit=1.0)
    given = operands()
    out = torch.empty_like(given[0])
    kernelhub.attention(*given, causal=True, out=out)
    before = audits()[0]
    torch.cuda._sleep(_CYCLES)
    kernelhub.attention(*given, causal=True, out=out)  # waits while the capture runs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernelhub.attention(*given, causal=True, out=out)
    want = out.clone()
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, want, rtol=0, atol=0)
    (after,) = audits()
    assert after.skipped == {"capture": 1}
    assert (after.checked, after.wrong) == (before.checked + 1, 0)


def test_a_compiled_graph_that_is_captured_keeps_running() -> None:
    kernelhub.configure(audit=1.0)
    given = operands()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def layer(q, k, v):
        return kernelhub.attention(q, k, v, causal=True) + 1

    want = kernelhub.attention.reference(*given, causal=True) + 1
    for _ in range(5):
        torch.testing.assert_close(layer(*given).float(), want.float(), rtol=2e-2, atol=2e-2)
    assert [str(item) for item in audits() if item.wrong or item.skipped.get("failed")] == []


@pytest.mark.parametrize("op", sorted(CASES))
def test_a_right_kernel_is_never_accused(op) -> None:
    kernelhub.configure(audit=1.0)
    function = HUB.function(op)
    cases = [case for case in CASES[op].cases() if case.quick][:12]
    for case in cases:
        arguments: Arguments = case.make(torch.device("cuda"))
        function(**arguments)
        audits()
    told = [item for item in audits() if item.op == op]
    # Those of experts need the tokens of all ranks, and are passed over.
    assert sum(item.checked + item.skipped.get("collective", 0) for item in told) > 0
    assert [str(item) for item in told if item.wrong or item.disputed or item.skipped.get("failed")] == []
