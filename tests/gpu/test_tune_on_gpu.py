"""Timing on a GPU: graphs where a kernel can be captured, events where not, operands out of the cache, one answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.evidence.tuning.operands import Room, bytes_of
from kernelhub.evidence.tuning.timers import Timer, race
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.models.calls import need_of

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path))
    kernelhub.reload()


def need(n: int = 4096, k: int = 4096, rows: str = "few") -> Any:
    problem = kernelhub.explain("fp8_gemm", device=GPU, n=n, k=k, rows=rows).problem
    return need_of("fp8_gemm", problem)


def test_a_product_takes_as_long_as_the_device_allows():
    a = torch.randn(4096, 4096, device=GPU, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    timer = Timer([lambda: torch.mm(a, a, out=out)], GPU, capture=True)
    (timing,) = race([timer], 20, 1.0)
    assert timer.how == "graph"
    assert 2 * 4096**3 / 3e15 < timing.median_s < 2 * 4096**3 / 1e12, "between 1 and 3000 TFLOP/s"
    assert timing.noise_s < 0.2 * timing.median_s


def test_a_call_that_waits_for_the_device_is_timed_by_events():
    x = torch.ones(1 << 20, device=GPU)
    timer = Timer([lambda: x.sum().item()], GPU, capture=True)
    (timing,) = race([timer], 5, 0.5)
    assert timer.how == "events"
    assert timing.median_s > 1e-6
    assert float(x.sum()) == 1 << 20, "the failed capture leaves the stream usable"
    assert torch.isfinite(torch.randn(8, device=GPU)).all(), "and random numbers"
    side = torch.cuda.Stream()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    for _ in range(8):
        torch.empty(64 << 20, dtype=torch.uint8, device=GPU).record_stream(side)
        torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == held, "and memory that two streams have used is given back"


def test_a_small_product_is_timed_with_operands_from_memory():
    """16 MiB of weights: read from memory they take at least as long as memory is wide."""
    call = fp8_gemm_inputs(tokens=1, n=4096, k=4096, device=GPU)
    copies = Room(GPU).copies(bytes_of(call))
    cache_bytes = torch.cuda.get_device_properties(GPU).L2_cache_size
    assert copies * bytes_of(call) > cache_bytes


def test_the_selection_is_made_kept_and_read():
    found = kernelhub.tune(need(), token_counts=[1, 16], device=GPU, configurations=False)
    assert found.ok, str(found)
    (entry,) = found.entries
    assert {item.how for size in entry.sizes for item in size.times.values()} <= {"graph", "events"}
    assert any(item.how == "graph" for size in entry.sizes for item in size.times.values())
    kernelhub.reload()
    now = kernelhub.explain("fp8_gemm", device=GPU)
    assert (now.selected, now.source) == (entry.chosen, "tuned")


def test_two_runs_agree_within_the_margin():
    first, second = (
        kernelhub.tune(need(), token_counts=[16], device=GPU, configurations=False, samples=50) for _ in range(2)
    )
    chosen, again = first.entries[0], second.entries[0]
    other = again.sizes[0].times[chosen.chosen]
    assert other.us < 1.15 * again.sizes[0].times[again.chosen].us


@pytest.mark.parametrize("rows", ["few", "many"])
def test_tiles_are_tried_and_those_taken_are_right(rows):
    tokens = 16 if rows == "few" else 512
    found = kernelhub.tune(need(rows=rows), token_counts=[tokens], device=GPU, backend="triton", budget_s=240)
    assert found.ok, str(found)
    measured = found.entries[0].sizes[0].times["triton.fp8_gemm"]
    call = fp8_gemm_inputs(tokens=tokens, n=4096, k=4096, device=GPU)
    plan = kernelhub.fp8_gemm.prepare(**call, backend="triton")
    if measured.configuration is not None:
        assert measured.us < measured.own_us
        assert plan.adapter._measured == {tokens: measured.configuration}
    got = plan.run(**{name: call[name] for name in ("a", "b", "a_scale", "b_scale")}).float()
    want = kernelhub.fp8_gemm.reference(**call).float()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def test_lack_of_memory_is_reported_and_the_process_lives():
    found = kernelhub.tune(need(), token_counts=[16], device=GPU, memory_bytes=1 << 20)
    assert not found.entries
    assert "may be used on cuda:0" in found.left_out[0].why
    assert kernelhub.tune(need(), token_counts=[16], device=GPU, configurations=False).ok
