"""Every test is handed to one worker once, those of a group to the same one, and those of a lost worker again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.scheduling import Scheduling

TESTS = [*(f"a.py::test_alone[{i}]" for i in range(300)), *(f"b.py::test_group[{i}]@group" for i in range(40))]


class Worker:
    """Runs what it is given."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.waiting, self.ran, self.shutting_down = [], [], False

    def send_runtest_some(self, places: list[int]) -> None:
        assert not self.shutting_down
        self.waiting += places

    def shutdown(self) -> None:
        self.shutting_down = True

    def finishes_one(self, scheduling: Scheduling) -> None:
        self.ran.append(TESTS[self.waiting[0]])
        scheduling.mark_test_complete(self, self.waiting.pop(0))


@pytest.fixture
def workers() -> list[Worker]:
    return [Worker("one"), Worker("other")]


@pytest.fixture
def scheduling(pytestconfig, workers, monkeypatch) -> Scheduling:
    monkeypatch.setattr("xdist.scheduler.loadscope.parse_tx_spec_config", lambda config: workers)
    made = Scheduling(pytestconfig)
    for worker in workers:
        made.add_node(worker)
        made.add_node_collection(worker, TESTS)
    made.schedule()
    return made


def test_each_is_handed_out_once_and_a_group_to_one_worker(scheduling, workers) -> None:
    while any(worker.waiting for worker in workers):
        for worker in workers:
            if worker.waiting:
                worker.finishes_one(scheduling)
    assert sorted(workers[0].ran + workers[1].ran) == sorted(TESTS)
    assert all(worker.shutting_down for worker in workers)
    grouped = [[name for name in worker.ran if "@" in name] for worker in workers]
    assert sorted(map(len, grouped)) == [0, 40]
    assert scheduling.tests_finished


def test_what_a_lost_worker_had_is_run_by_another(scheduling, workers) -> None:
    lost, other = workers
    for _ in range(5):
        lost.finishes_one(scheduling)
    assert scheduling.remove_node(lost) == TESTS[lost.waiting[0]]
    while other.waiting:
        other.finishes_one(scheduling)
    assert sorted(lost.ran + other.ran) == sorted(TESTS)
