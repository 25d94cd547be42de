"""Launches of a call that are watched, and the sequence that makes them again.

A backend's launcher notes each launch in `WATCHED`, and gives a `Step` for one: its kernel in kernelhub's own launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kernelhub.runtime import launch


class Step(NamedTuple):
    """One launch of a `kernelhub._launch.Sequence`: the launcher's kernel, its grid and all its arguments."""

    kernel: Any
    programs: int | tuple[int, ...]
    arguments: tuple[Any, ...]


class Shared(NamedTuple):
    """Memory that the launches of a call share with other ranks and calls, and in it what must hold for a launch.

    Attributes:
        tensors: those that are no operands of a call; each is the same in every call.
        zero: the address of eight bytes of the host that must be zero.
        stream: the address of eight bytes of the host that must be the current stream; 0 where there is none.
        owner: keeps all of it.
    """

    tensors: tuple[Tensor, ...]
    zero: int
    stream: int
    owner: Any


class Launcher(Protocol):
    """What launches a kernel."""

    def step(self, programs: Any, variant: Hashable | None, *arguments: Any) -> Step | None:
        """A launch like one that was made, to be repeated with other tensors; None if kernelhub's launcher cannot."""


class Launch(NamedTuple):
    """A launch that was made: by which launcher, with what."""

    launcher: Launcher
    programs: int | tuple[int, ...]
    variant: Hashable | None
    arguments: tuple[Any, ...]


class _Watched(threading.local):
    """Of this thread's call, if it is watched: its launches, and what would repeat its parts. See `repeat`."""

    launches: list[Launch] | None = None
    parts: list[Any] | None = None


WATCHED = _Watched()


def name_of(kernel: Any) -> str:
    """The name of a jitted kernel, compiled or interpreted."""
    function = getattr(kernel, "fn", kernel)
    return getattr(function, "__name__", type(function).__name__)


def sequence(
    steps: Sequence[Step | None],
    places: Sequence[Sequence[tuple[int, ...] | None]],
    operands: int,
    aligned: Sequence[int],
    room: int = 0,
    counted: bool = False,
    shared: Shared | None = None,
) -> Any:
    """A `kernelhub._launch.Sequence` of these launches; None if the launcher cannot make one of them.

    Args:
        steps: the launches, in order.
        places: for each launch, where its arguments are among the operands of the call: a number, and bytes beyond the
            operand's address; None for an argument that stays the same, () for such a tensor. Those at the end may be
            left out.
        operands: how many tensors, addresses or None the call takes.
        aligned: those that have to begin at a multiple of 16 bytes; for others the call launches nothing, and is False.
        room: bytes of temporaries, whose memory is the operand after the last.
        counted: the stream's counters are the operand after that.
        shared: memory in which tensors of () are.
    """
    native = launch.native()
    if native is None or any(step is None for step in steps):
        return None
    if (room and not native.allocates) or (counted and not native.counts):
        return None
    total = operands + (room > 0) + counted
    if len(steps) > native.module.MAX_STEPS or total > native.module.MAX_OPERANDS:
        return None
    launches = tuple((*step, tuple(of)) for step, of in zip(steps, places, strict=True) if step is not None)
    words = () if shared is None else (shared.zero, shared.stream, shared.owner)
    return native.module.Sequence(launches, total, tuple(aligned), room, counted, *words)
