"""Ranks on CPUs: what they give to a call is compared before any of it is sent, and a wait for them ends.

gloo ends the process of a rank that receives a message of another size than it expects. So each call first gathers one
line of fixed length from every rank, which takes about as long as a message of a few kilobytes.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from kernelhub.errors import RanksDisagree
from kernelhub.ops.comm.group import in_world
from kernelhub.ops.comm.lost import who_is_lost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BYTES = 512  # of a line
_REFUSED = "\x01"  # begins the line of a rank that cannot make the call


def compare(op: str, given: str, group: ProcessGroup, timeout_s: float) -> None:
    """Compare with the other ranks what this one gives to a call. Every rank calls it before it sends anything else.

    Args:
        op: the op that this rank calls.
        given: in words, what must be equal on all ranks.
        group: the group, whose backend for CPUs is gloo.
        timeout_s: longest wait.

    Raises:
        RanksDisagree: a rank calls another op, gives something else, or cannot make its call; on every rank. The group
            can be used again.
        RuntimeError: a rank is dead, or did not join within `timeout_s`.
    """
    if group.size() == 1:
        return
    calls = _gathered(op, _line(f"{op}({given})"), group, timeout_s)
    for rank, call in enumerate(calls):
        if call.startswith(_REFUSED):
            message = f"{op}: rank {rank} cannot run it: {call.removeprefix(_REFUSED)}{in_world(group, (rank,))}"
            raise RanksDisagree("rank_failed", message, (rank,))
    for rank, call in enumerate(calls):
        if call != calls[0]:
            message = f"{op}: rank 0 calls {calls[0]} and rank {rank} {call}; give all ranks the same"
            raise RanksDisagree("arguments_differ", message + in_world(group, (0, rank)), (rank,))


def join_refused(op: str, reason: str, group: ProcessGroup, timeout_s: float) -> None:
    """Join the comparison of a call that this rank cannot make, so that every other rank raises `reason`.

    Args:
        op: the op that this rank calls.
        reason: why it cannot.
        group: the group, whose backend for CPUs is gloo.
        timeout_s: longest wait.

    Raises:
        RuntimeError: a rank is dead, or did not join within `timeout_s`.
    """
    _gathered(op, _line(f"{_REFUSED}{reason}"), group, timeout_s)


def _gathered(op: str, line: bytes, group: ProcessGroup, timeout_s: float) -> list[str]:
    """The line of each rank."""
    size = group.size()
    own = torch.frombuffer(bytearray(line), dtype=torch.uint8)
    lines = torch.empty(size * _BYTES, dtype=torch.uint8, device="cpu")
    wait(op, group._allgather_base(lines, own), group, timeout_s)
    said = bytes(lines.tolist())
    return [said[rank * _BYTES : (rank + 1) * _BYTES].rstrip(b"\0").decode(errors="replace") for rank in range(size)]


def wait(op: str, work: Any, group: ProcessGroup, timeout_s: float) -> None:
    """Wait for the end of a collective.

    Raises:
        RuntimeError: it did not end within `timeout_s`, or a rank is dead; the message names the rank.
    """
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        lost = who_is_lost(op, group, timeout_s)
        raise RuntimeError(
            f"{op}: {lost}, after rank {group.rank()} waited up to {timeout_s:g} s "
            f"(KERNELHUB_COMM_TIMEOUT_S); restart all ranks: {error}"
        ) from error


def _line(call: str) -> bytes:
    """A call as a line of fixed length; a longer one ends with its digest."""
    data = call.encode()
    if len(data) > _BYTES:
        digest = hashlib.sha256(data).hexdigest()[:16]
        data = data[: _BYTES - 40] + f"... sha256 {digest}".encode()
    return data.ljust(_BYTES, b"\0")
