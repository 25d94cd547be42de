"""Who wants to know, or to forbid, that something is made: a warm-up that counts, an engine that is sealed."""

from __future__ import annotations

from collections.abc import Callable

_watchers: list[Callable[[str, str], object]] = []


def before_making(notify: Callable[[str, str], object]) -> Callable[[], None]:
    """Have `notify` called with kind and name before an entry is made or waited for; what it raises prevents it.

    Returns:
        A function that ends this.
    """
    _watchers.append(notify)
    return lambda: _watchers.remove(notify)


def announce(kind: str, name: str) -> None:
    """Tell all who asked that an entry is about to be made or waited for."""
    for notify in tuple(_watchers):
        notify(kind, name)
