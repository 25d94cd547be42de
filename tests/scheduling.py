"""Which worker of a parallel run gets which tests: as ``--dist loadgroup``, in time linear in their number.

pytest-xdist's own scheduler goes through every finished test of a worker whenever one ends, and hands out tests one by
one, for which the worker waits: 4 ms of each of 11,500 tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

from tests.going_on import BEFORE, expected_seconds

# Tests that wait in a worker while there are enough for all, and when there are not.
_MOST_WAITING, _LEAST_WAITING = 24, 2
_MOST_SECONDS = 2.0  # of tests that wait, where those that take long are known


class Scheduling(LoadGroupScheduling):
    """Groups of tests by worker. Finished groups are forgotten, and the places of tests are looked up."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._places: dict[Any, dict[str, int]] = {}
        self._seconds: dict[str, float] = {}

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        self._places[node] = {nodeid: place for place, nodeid in enumerate(collection)}
        if BEFORE in self.config.stash and not self._seconds:
            self._seconds = dict(zip(collection, expected_seconds(collection), strict=True))

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        nodeid = self.registered_collections[node][item_index]
        scope = self._split_scope(nodeid)
        unit = self.assigned_work[node][scope]
        unit[nodeid] = True
        if all(unit.values()):
            del self.assigned_work[node][scope]
        self._reschedule(node)

    def _assign_work_unit(self, node: Any) -> None:
        scope, unit = self.workqueue.popitem(last=False)
        self.assigned_work.setdefault(node, {})[scope] = unit
        places = self._places[node]
        node.send_runtest_some([places[nodeid] for nodeid, finished in unit.items() if not finished])

    def _reschedule(self, node: Any) -> None:
        if node.shutting_down:
            return
        share = len(self.workqueue) // (8 * max(1, len(self.assigned_work)))  # at the end the workers finish together
        waiting = self._pending_of(self.assigned_work[node])
        most = max(_LEAST_WAITING, min(_MOST_WAITING, share))
        while self.workqueue and waiting <= most and not self._has_long_ones(node, waiting):
            self._assign_work_unit(node)
            waiting = self._pending_of(self.assigned_work[node])
        if not self.workqueue and waiting <= _LEAST_WAITING:
            node.shutdown()

    def _has_long_ones(self, node: Any, waiting: int) -> bool:
        """The worker has one test to run, another that waits, and they take long."""
        if not self._seconds or waiting < _LEAST_WAITING:
            return False
        units = self.assigned_work[node].values()
        pending = (nodeid for unit in units for nodeid, finished in unit.items() if not finished)
        return sum(self._seconds.get(nodeid, 0.0) for nodeid in pending) >= _MOST_SECONDS
