"""A meeting of ranks in one store, seen by threads of one process: what is damaged on the way, and who decides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from typing import Any

import pytest
import torch.distributed as dist

from kernelhub.runtime.ranks.meeting import Clock, Ended, Meeting, Process, this_process
from kernelhub.runtime.ranks.rounds import follow
from kernelhub.runtime.ranks.settle import Failure
from kernelhub.runtime.ranks.statement import Stated


def meetings(size: int = 2, timeout_s: float = 5.0, store: Any = None) -> list[Meeting]:
    store = dist.HashStore() if store is None else store
    made = [Meeting(store, rank, size, Clock(timeout_s, time.monotonic())) for rank in range(size)]
    for meeting in made:
        meeting.arrive()
    return made


def ending(work: Any) -> Failure:
    with pytest.raises(Ended) as caught:
        work()
    return caught.value.failure


@pytest.mark.parametrize("kind", ["file", "tcp", "prefix"])
def test_any_store_of_a_group_will_do(kind, tmp_path):
    """Those of ``file://`` and ``tcp://``, and those that groups make of them."""
    store: Any = dist.FileStore(str(tmp_path / "store"), 2) if kind == "file" else dist.HashStore()
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    if kind == "prefix":
        store = dist.PrefixStore("group", dist.PrefixStore("default", store))
    lead, other = meetings(store=store)
    with lead.beating(), other.beating():
        lead.say("said", "lead")
        other.say("said", {"long": "x" * (3 << 20)})
        assert lead.hear_all("said") == ["lead", {"long": "x" * (3 << 20)}]
        lead.conclude()
        assert other.hear_lead("more") is None
    other.leave(None)
    lead.leave(None)


def test_a_connection_that_takes_long_holds_nobody_up():
    class Slow(dist.HashStore):  # type: ignore[misc]
        def clone(self) -> Any:
            time.sleep(1.0)
            return self

    lead, other = meetings(store=Slow())
    begun = time.monotonic()
    with lead.beating(), other.beating():
        lead.say("word", 1)
        assert other.hear_lead("word") == 1
        assert time.monotonic() - begun < 0.9
        while not lead._has("beat/1") and time.monotonic() - begun < 10:
            time.sleep(0.05)
        assert lead._has("beat/1"), "it beats as soon as it is connected"


class TestWords:
    @pytest.mark.parametrize("value", [{}, {"x": [1, None, "ä"]}, {"long": os.urandom(3 << 20).hex()}], ids=len)
    def test_a_value_arrives_as_it_was_said(self, value):
        lead, other = meetings()
        lead.say("word", value)
        assert other.hear_lead("word") == value

    def test_a_value_that_is_damaged_ends_the_meeting_for_all(self):
        lead, other = meetings()
        lead.say("word", {"x": 1})
        lead.store.set(lead._key("word/0"), b"1 " + b"\0" * 8)
        assert ending(lambda: other.hear_lead("word")).code == "message_damaged"
        assert ending(lambda: lead.hear_all("word")).code == "message_damaged"

    def test_a_table_that_is_another_than_the_lead_sent_is_reported(self):
        lead, other = meetings()
        lead.say("tuned", {"tile": 64})
        lead.say("outcome0", {"settled": {}, "tuned": "another digest"})
        failure = ending(lambda: follow(other, Stated({}, {}), {}, {}))
        assert (failure.code, failure.ranks) == ("table_differs", (1,))
        assert "as rank 0 sent it" in failure.message


class TestDecision:
    def test_who_gives_up_after_all_have_agreed_agrees(self):
        lead, other = meetings(timeout_s=0.3)
        threading.Timer(0.1, lead.conclude).start()
        assert other.hear_lead("more") is None

    def test_the_lead_cannot_conclude_after_somebody_gave_up(self):
        lead, other = meetings()
        first = Failure("rank_slow", "too slow", (1,))
        assert ending(lambda: other.give_up(first)) == first
        assert ending(lead.conclude) == first

    def test_of_two_that_give_up_the_first_is_reported_by_both(self):
        one, other = meetings()
        first = Failure("rank_dead", "first", (0,))
        assert ending(lambda: one.give_up(first)) == first
        assert ending(lambda: other.give_up(Failure("rank_slow", "second", (1,)))) == first

    @pytest.mark.parametrize(
        ("said", "word", "after", "ranks", "missing"),
        [
            ((0, 2), "outcome0", "said", (1,), "said"),
            ((2,), "outcome0", "said", (0, 1), "said"),
            ((0, 1, 2), "outcome0", "said", (0,), "outcome0"),
            ((0, 1, 2), "tuned", "", (0,), "tuned"),
        ],
    )
    def test_the_first_whose_time_is_over_names_those_that_all_wait_for(self, said, word, after, ranks, missing):
        ranks_here = meetings(size=3, timeout_s=0.2)
        for rank in said:
            ranks_here[rank].say("said", {})
        failure = ending(lambda: ranks_here[2].hear_lead(word, after))
        assert (failure.code, failure.ranks) == ("rank_slow", ranks)
        assert f"({missing} is missing)" in failure.message
        if len(said) < 3:
            assert ending(lambda: ranks_here[0].hear_all("said")) == failure

    def test_what_comes_after_the_time_is_not_said(self):
        lead, other = meetings(timeout_s=0.05)
        time.sleep(0.1)
        assert ending(lambda: other.say("said", {})).code == "rank_slow"
        assert not lead._has("said/1")

    def test_each_meeting_of_a_store_is_its_own(self):
        store = dist.HashStore()
        first, second = (Meeting(store, 0, 1, Clock(1.0, time.monotonic())) for _ in range(2))
        first.say("word", 1)
        assert not second._has("word/0")

    def test_a_decision_is_plain_json(self):
        lead, _ = meetings()
        lead.conclude()
        assert json.loads(lead.store.get(lead._key("decision")))["code"] == "agreed"
        assert json.loads(zlib.decompress(bytes(lead.store.get(lead._key("hello/0"))).partition(b" ")[2]))["pid"]


class TestProcess:
    def test_this_one_lives(self):
        me = this_process()
        assert (me.pid, me.gone(), me.stopped()) == (os.getpid(), "", False)

    def test_one_that_was_killed_is_gone_before_and_after_its_parent_looks(self):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        process = self._process(child.pid)
        child.send_signal(signal.SIGSTOP)
        self._until(process.stopped)
        assert process.gone() == ""
        child.kill()
        self._until(lambda: process.gone() == "was killed or has ended")
        child.wait()
        assert process.gone() == "has ended"

    def test_a_number_that_was_given_again_is_not_the_same_process(self):
        me = this_process()
        assert Process(me.host, me.namespace, me.pid, me.started + 1).gone() == "has ended"

    def test_a_process_of_another_machine_is_not_judged(self):
        assert Process("elsewhere", "another boot pid:[1]", 1 << 30, 1).gone() == ""

    def _process(self, pid: int) -> Process:
        from kernelhub.runtime.ranks.meeting import _state_of

        me = this_process()
        return Process(me.host, me.namespace, pid, _state_of(pid)[1])

    def _until(self, holds: Any) -> None:
        until = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < until
            time.sleep(0.01)
