"""Which ranks did not survive a collective: those that fail ask each other through the store of the group."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kernelhub.ops.comm.group import _store_of, in_world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOOK_S = 0.01
_KEYS = "kernelhub/comm/failed"


def who_is_lost(op: str, group: ProcessGroup, timeout_s: float) -> str:
    """The ranks that do not say within `timeout_s` that a collective of theirs failed, too, as words for an error.

    After a collective failed, the group cannot be used any more, so that every living rank fails and calls this.
    """
    rank, size = group.rank(), group.size()
    if size == 1:
        return "it failed"
    try:
        store: Any = _store_of(op, group)
        store.set(f"{_KEYS}/{rank}", "1")
        until = time.monotonic() + timeout_s
        silent = [other for other in range(size) if other != rank]
        while silent and time.monotonic() < until:
            silent = [other for other in silent if not store.check([f"{_KEYS}/{other}"])]
            time.sleep(_LOOK_S)
    except RuntimeError:  # torch's errors of a connection are RuntimeErrors
        return "the process that holds the group's store is dead, usually rank 0"
    if not silent:
        return f"a rank of the group of {size} did not join in time"
    return f"rank {', '.join(map(str, silent))} of {size} is dead or did not join{in_world(group, silent)}"
