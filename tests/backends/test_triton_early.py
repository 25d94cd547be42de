"""Launches over memory of all ranks that begin early: the order of their code, and every interleaving of their grids.

The code is compiled for an H200 in a child process, since this one interprets kernels. That nothing of global memory
comes before the wait leaves one question, which no test on a GPU answers: whether programs that wait can take the
places of programs that another rank needs. A small model of two ranks, their streams and their places tries all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any, NamedTuple

import pytest

from kernelhub.backends.triton.comm.early import BEGUN, COME
from tests.backends.early_ahead import KINDS

NAMES = tuple(kind.__name__ for kind in KINDS)
WITHOUT = "received_rms_norm_kernel"  # of results in place, which never begins early


@cache
def launches() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.early_ahead"]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return [json.loads(line) for line in answer.stdout.splitlines()]


def of(kind: str, early: int) -> list[dict[str, Any]]:
    rows = [row for row in launches() if (row["kind"], row["early"]) == (kind, early) and row["kernel"] != WITHOUT]
    assert rows
    return rows


@pytest.mark.xdist_group("early")
class TestCompiled:
    @pytest.mark.parametrize("kind", NAMES)
    @pytest.mark.parametrize("early", [BEGUN, COME])
    def test_nothing_of_global_memory_comes_before_the_wait(self, kind: str, early: int) -> None:
        for row in of(kind, early):
            assert (row["programmatic"], row["ptx"]["waits"], row["ptx"]["nexts"]) == (True, 1, 1)
            assert row["ptx"]["before_wait"] == []
            if row["sass"] is not None:
                assert (row["sass"]["waits"], row["sass"]["nexts"], row["sass"]["without_wait"]) == (1, 1, [])

    @pytest.mark.parametrize("kind", NAMES)
    def test_the_next_launch_begins_behind_the_wait_or_behind_the_last_look(self, kind: str) -> None:
        for row in of(kind, BEGUN):
            assert row["ptx"]["between"] == 0
        for row in of(kind, COME):
            assert row["ptx"]["between"] > 0
            assert row["sass"] is None or "look" not in row["sass"]["after_next"]

    @pytest.mark.parametrize("kind", NAMES)
    def test_without_it_a_kernel_neither_waits_nor_lets_another_begin(self, kind: str) -> None:
        for row in (*of(kind, 0), *(row for row in launches() if row["kernel"] == WITHOUT)):
            assert (row["programmatic"], row["ptx"]["waits"], row["ptx"]["nexts"]) == (False, 0, 0)
            # The report finds what it looks for: this code reads and looks without a wait.
            assert row["sass"] is None or row["sass"]["without_wait"] == ["look", "memory"]


class Rules(NamedTuple):
    """Streams of a rank are groups of their own, whose calls follow each other.

    Attributes:
        early: of `early.py`; 0: launches follow each other.
        streams: of each rank.
        places: programs that a GPU holds.
        calls: of each stream.
        programs: of each call.
        waits: programs wait for the kernel before; a model without that is wrong.
    """

    early: int
    streams: int
    places: int
    calls: int = 3
    programs: int = 2
    waits: bool = True


# A program is not there, waits for the kernel before, has sent and waits for the other rank, has its values, has ended.
ABSENT, RESIDENT, SENT, COMPLETE, ENDED = range(5)
RANKS = 2
Grid = tuple[int, ...]  # how many of its programs are in each state
State = tuple[tuple[tuple[Grid, ...], ...], ...]  # by rank, stream and call


def moves(state: State, rules: Rules) -> list[State]:
    """What one program of any rank can do next."""
    found = []
    for rank in range(RANKS):
        grids = state[rank]
        held = sum(sum(grid[RESIDENT:ENDED]) for stream in grids for grid in stream)
        for stream, calls in enumerate(grids):
            for call, grid in enumerate(calls):
                before = calls[call - 1] if call else None
                over = before is None or before[ENDED] == rules.programs
                # All programs of the kernel before have let the next begin, or have ended.
                passed = {0: ENDED, BEGUN: SENT, COME: COMPLETE}[rules.early]
                let = before is None or sum(before[passed:]) == rules.programs
                other = state[1 - rank][stream][call]
                have_sent = sum(other[SENT:]) == rules.programs  # a row is read whole
                for at, may in (
                    (ABSENT, held < rules.places and let),
                    (RESIDENT, over or not rules.waits),
                    (SENT, have_sent),
                    (COMPLETE, True),
                ):
                    if grid[at] and may:
                        moved = list(grid)
                        moved[at] -= 1
                        moved[at + 1] += 1
                        of_stream = (*calls[:call], tuple(moved), *calls[call + 1 :])
                        of_rank = (*grids[:stream], of_stream, *grids[stream + 1 :])
                        found.append((*state[:rank], of_rank, *state[rank + 1 :]))
    return found


def explored(rules: Rules) -> dict[str, bool]:
    """Over all interleavings: whether all can stand still before they end, and what two kernels of a stream do."""
    grid = (rules.programs, 0, 0, 0, 0)
    first: State = (((grid,) * rules.calls,) * rules.streams,) * RANKS
    last: State = ((((0, 0, 0, 0, rules.programs),) * rules.calls,) * rules.streams,) * RANKS
    seen, ahead = {first}, [first]
    found = {"stuck": False, "beside": False, "third": False, "overlap": False, "ends": False}
    while ahead:
        state = ahead.pop()
        after = moves(state, rules)
        found["ends"] |= state == last
        found["stuck"] |= not after and state != last
        for calls in (stream for rank in state for stream in rank):
            working = [sum(grid[SENT:ENDED]) > 0 for grid in calls]
            present = [at for at, grid in enumerate(calls) if sum(grid[RESIDENT:ENDED])]
            found["beside"] |= sum(working) > 1
            found["overlap"] |= len(present) > 1
            found["third"] |= bool(present) and present[-1] - present[0] > 1
        for one in after:
            if one not in seen:
                seen.add(one)
                ahead.append(one)
    return found


class TestInterleavings:
    @pytest.mark.parametrize("early", [0, BEGUN, COME])
    @pytest.mark.parametrize("places", [2, 3, 4, 6])
    def test_calls_of_a_group_end_on_a_gpu_that_holds_one(self, early: int, places: int) -> None:
        found = explored(Rules(early, streams=1, places=places, calls=4))
        assert found == {"stuck": False, "beside": False, "third": False, "overlap": bool(early), "ends": True}

    def test_calls_of_two_groups_need_a_gpu_that_holds_those_that_wait_too(self) -> None:
        """With COME no programs wait while a rank is waited for, so both groups need no more than their calls."""
        held = {
            (early, places): explored(Rules(early, streams=2, places=places, programs=1))
            for early in (0, BEGUN, COME)
            for places in (2, 4)
        }
        assert [key for key, found in held.items() if found["stuck"]] == [(BEGUN, 2)]
        assert all(found["ends"] and not found["beside"] for found in held.values())

    def test_the_model_finds_kernels_that_do_not_wait(self) -> None:
        assert explored(Rules(BEGUN, streams=1, places=4, waits=False))["beside"]
        assert explored(Rules(0, streams=1, places=1))["stuck"]  # programs of a row that are not there
