"""Ranks of one group as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable


def together(act: Callable[[int], None], world_size: int) -> None:
    """Act as each rank, in a thread of its own; raise the first error."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            act(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
