"""Timing on the CPU: medians, noise, calls in turn, and those that are out of the race."""

from __future__ import annotations

import time

import pytest
import torch

from kernelhub.evidence.cases import CASES
from kernelhub.evidence.timing import timing_of
from kernelhub.evidence.tuning.operands import NoRoom, Room, bytes_of, out_of_memory, rotated
from kernelhub.evidence.tuning.timers import FEWEST_SAMPLES, Timer, race
from kernelhub.ops.merge.inputs import merge_inputs

CPU = torch.device("cpu")


def busy(seconds: float):
    def call() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    return call


def test_median_and_noise_ignore_an_outlier():
    timing = timing_of([1.0, 1.1, 0.9, 1.0, 50.0])
    assert (timing.median_s, timing.samples) == (1.0, 5)
    assert timing.noise_s == pytest.approx(0.14826)


def test_a_call_is_timed_by_the_clock():
    timer = Timer([busy(0.002)], CPU, capture=True)
    race([timer], 5, 0.0)
    assert timer.how == "clock"
    assert 0.002 <= timer.timing.median_s < 0.02


def test_calls_go_round_through_their_operands():
    seen: list[int] = []
    Timer([lambda place=place: seen.append(place) for place in range(3)], CPU, capture=False)
    assert seen[:6] == [0, 1, 2, 0, 1, 2]
    assert max(seen.count(place) for place in range(3)) == min(seen.count(place) for place in range(3))


def test_what_a_kernel_receives_before_a_sample_is_not_timed():
    told: list[int] = []

    def before() -> None:
        told.append(1)
        time.sleep(0.02)

    timer = Timer([busy(0.001)], CPU, capture=False, before=before)
    timer.sample()
    assert timer.samples[-1] < 0.015
    assert len(told) >= 2


def test_a_call_that_is_out_of_the_race_is_sampled_no_further():
    quick, slow = Timer([busy(0.0005)], CPU, capture=False), Timer([busy(0.02)], CPU, capture=False)
    race([quick, slow], 20, 100.0)
    assert len(slow.samples) == FEWEST_SAMPLES
    assert len(quick.samples) == 20


def test_time_ends_a_race_but_not_before_the_fewest_samples():
    timer = Timer([busy(0.003)], CPU, capture=False)
    race([timer], 1000, 0.0)
    assert len(timer.samples) == FEWEST_SAMPLES


class TestRoom:
    def test_copies_fill_the_cache_twice_but_no_more_than_there_is_room_for(self):
        assert Room(CPU).copies(64 << 20) == 2
        assert Room(CPU).copies(1 << 10) == 16
        assert Room(CPU, limit=20 << 20).copies(2 << 20) == 3
        assert Room(CPU, limit=1).copies(1 << 20) == 1

    def test_operands_that_leave_no_room_for_their_check_are_refused(self):
        Room(CPU, limit=3000).check(1000)
        with pytest.raises(NoRoom, match="give memory_bytes"):
            Room(CPU, limit=2999).check(1000)

    def test_memory_that_tensors_share_counts_once(self):
        one = torch.zeros(1000)
        assert bytes_of({"a": one, "b": one[:10], "c": [one, torch.zeros(10)], "d": 3}) == 4040

    def test_copies_are_apart_and_alike(self):
        call = merge_inputs(tokens=3)
        first, second = rotated(CASES["merge_attention_states"], call, 2, CPU)
        torch.testing.assert_close(first.arguments, second.arguments, rtol=0, atol=0, equal_nan=True)
        assert first.arguments["outs"][0].data_ptr() != second.arguments["outs"][0].data_ptr()
        assert first.destinations["out"].shape == call["outs"][0].shape

    @pytest.mark.parametrize(
        ("error", "answer"),
        [
            (torch.OutOfMemoryError("x"), True),
            (MemoryError(), True),
            (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
            (RuntimeError("illegal memory access"), False),
            (ValueError("out of memory"), False),
        ],
    )
    def test_lack_of_memory_is_distinguished_from_other_errors(self, error, answer):
        assert out_of_memory(error) is answer

    def test_real_lack_of_memory_is_recognised(self):
        with pytest.raises(RuntimeError) as caught:
            torch.empty(1 << 52, dtype=torch.uint8)
        assert out_of_memory(caught.value)
