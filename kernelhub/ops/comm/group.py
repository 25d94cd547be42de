"""Process groups as arguments: by object or registered name, checked before a launch, and met through their store.

Ranks that prepare a collective exchange what each would run through the store of the group, not through a collective:
waiting for the store can end at any time, and names the ranks that are missing.
"""

from __future__ import annotations

import functools
import json
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from kernelhub.dispatch.fingerprint import own_version
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.whole_calls import not_learned
from kernelhub.errors import RanksDisagree
from kernelhub.ops.arguments import refuse
from kernelhub.ops.comm.problem import OTHER, USUAL

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FIX = "give a ProcessGroup of torch.distributed that this process is in, or its group_name"
_USUAL = {"cuda": "nccl", "cpu": "gloo"}
_LOOKS_S = (0.0002, 0.005)  # how long a rank that waits does not read the store: first, doubled each time, and at most
_KEYS = "kernelhub/comm"
_GONE = "gave up waiting for"
KeptT = TypeVar("KeptT")


class OfGroups(Generic[KeptT]):
    """What an adapter keeps for groups, each under its name.

    What is kept outlives the group, since captured graphs may use it. A later group may have the name of one that was
    destroyed, with other ranks; nothing is found for it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, ...], tuple[Callable[[], Any], KeptT]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Keep nothing any more."""
        self._kept.clear()

    def keep(self, group: Any, kept: KeptT, *more: Hashable) -> KeptT:
        """Keep this for a group; under other values of `more` other things."""
        key = (group.group_name, *more)
        self._kept[key] = weakref.ref(group), kept
        return kept

    def get(self, group: Any, *more: Hashable) -> KeptT | None:
        """What was kept last."""
        owner, kept = self._kept.get((group.group_name, *more), (None, None))
        return kept if owner is not None and owner() is group else None


def resolved(op: str, group: Any) -> ProcessGroup:
    """The process group that an argument means.

    Raises:
        InvalidArgument: it is no process group and no name of one, or this process is not in it.
    """
    groups, named = _distributed()
    if named is None:
        refuse(op, "group", "cannot exist", "this build of torch has no torch.distributed")
    if isinstance(group, str):
        not_learned()  # the name may be another group's later
        try:
            return named(group)
        except RuntimeError:
            refuse(op, "group", f"is {group!r}, which is not registered", _FIX)
    if not isinstance(group, groups):
        outside = group is torch.distributed.GroupMember.NON_GROUP_MEMBER
        refuse(op, "group", "excludes this process" if outside else f"is {type(group).__name__}", _FIX)
    made: ProcessGroup = group
    return made


@functools.cache
def _distributed() -> tuple[Any, Callable[[str], ProcessGroup] | None]:
    """The type of process groups, and what finds one by its name. Nothing is of the type in a torch without groups."""
    from torch import distributed as dist

    if not dist.is_available():
        return _NoGroup, None
    from torch._C import _distributed_c10d as c10d

    return dist.ProcessGroup, cast(Any, c10d)._resolve_process_group


class _NoGroup:
    """The type of process groups in a torch that has none."""


def backend_kind(op: str, group: ProcessGroup, device: torch.device) -> str:
    """Whether the group's backend for a device is the usual one: the facet `group_backend`.

    Raises:
        InvalidArgument: the group has no backend for the device.
    """
    try:
        name = group._get_backend(device).name()
    except RuntimeError:
        fix = "create it with one, e.g. init_process_group('cpu:gloo,cuda:nccl'), or move the tensor"
        refuse(op, "group", f"has no backend for {device.type}", fix)
    return USUAL if name == _USUAL.get(device.type) else OTHER


def libraries_of(kernels: Iterable[Kernel | None]) -> str:
    """Versions of kernelhub, torch and the libraries of kernels, as ranks compare them."""
    found = {"kernelhub": own_version(), "torch": str(torch.__version__)}
    for kernel in kernels:
        found |= {} if kernel is None else HUB.versions_of(kernel)
    return ", ".join(f"{name} {version}" for name, version in sorted(found.items()))


def meet(
    op: str,
    group: ProcessGroup,
    statement: Mapping[str, Any],
    timeout_s: float,
    own: Any = None,
    *,
    of_call: bool = False,
) -> list[Any]:
    """Compare what each rank of a group would run. Every rank calls it, as often as the others.

    Args:
        op: for messages.
        group: the group.
        statement: plain values that must be equal on all ranks. ``"error"`` is the reason why this rank cannot run.
        timeout_s: longest wait for the other ranks.
        own: what else this rank states to the others, as plain values.
        of_call: whether the ranks call the op, not its `prepare`.

    Returns:
        `own` of each rank.

    Raises:
        RanksDisagree: a rank is missing (``rank_missing``), cannot run (``rank_failed``), or would run something else
            (``arguments_differ``); on every rank that called, with the same message. A rank that comes too late raises
            ``rank_missing`` at once, so that ranks that call again meet each other.
    """
    rank, size = group.rank(), group.size()
    if size == 1:
        return [own]
    store = _store_of(op, group)
    where, same = (op, "make the same calls") if of_call else (f"{op}.prepare", "prepare the same plans")
    try:
        turn = store.add(f"{_KEYS}/turn/{rank}", 1)
        store.set(f"{_KEYS}/{turn}/{rank}", json.dumps([dict(statement), own]))
        missing = _wait(store, turn, size, timeout_s)
        if missing:
            store.set(f"{_KEYS}/{turn}/{rank}", json.dumps([{_GONE: missing, "after_s": timeout_s}, None]))
            names = ", ".join(map(str, missing))
            raise RanksDisagree(
                "rank_missing",
                f"{where}: rank {names} of {size} did not call it within {timeout_s:g} s; all ranks of a group "
                f"{same} in the same order: see the log of that rank, or raise KERNELHUB_COMM_TIMEOUT_S"
                f"{in_world(group, missing)}",
                tuple(missing),
            )
        said = [json.loads(store.get(f"{_KEYS}/{turn}/{other}")) for other in range(size)]
        if turn > 1:  # whoever has posted this turn has read the one before
            store.delete_key(f"{_KEYS}/{turn - 1}/{rank}")
    except RanksDisagree:
        raise
    except RuntimeError as error:  # torch's errors of a connection are RuntimeErrors
        reason = str(error).splitlines()[0]
        raise RanksDisagree("store_lost", f"{where}: the group's store is gone: {reason}", (0,)) from error
    _compare(where, group, [statement for statement, _ in said])
    return [own for _, own in said]


def _wait(store: Any, turn: int, size: int, timeout_s: float) -> list[int]:
    """The ranks that have not posted their statement when the time is over."""
    until = time.monotonic() + timeout_s
    pause, longest = _LOOKS_S
    missing = list(range(size))
    while True:
        missing = [other for other in missing if not store.check([f"{_KEYS}/{turn}/{other}"])]
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(pause)
        pause = min(2 * pause, longest)


def in_world(group: ProcessGroup, ranks: Iterable[int]) -> str:
    """Which ranks of the world those of a group are, as the end of a message; nothing where their numbers are equal."""
    from torch import distributed as dist

    try:
        world = dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):  # torch does not know the group
        return ""
    others = [(rank, world[rank]) for rank in ranks if world[rank] != rank]
    return "".join(f"; rank {rank} of the group is rank {other} of the world" for rank, other in others)


def _compare(where: str, group: ProcessGroup, said: list[dict[str, Any]]) -> None:
    for rank, statement in enumerate(said):
        if _GONE in statement:
            names, waited = ", ".join(map(str, statement[_GONE])), f"{statement['after_s']:g} s"
            raise RanksDisagree(
                "rank_missing",
                f"{where}: rank {rank} gave up after it waited {waited} for rank {names}; call it again on all "
                f"ranks, or raise KERNELHUB_COMM_TIMEOUT_S{in_world(group, statement[_GONE])}",
                tuple(statement[_GONE]),
            )
    for rank, statement in enumerate(said):
        if "error" in statement:
            message = f"{where}: rank {rank} cannot run it: {statement['error']}{in_world(group, (rank,))}"
            raise RanksDisagree("rank_failed", message, (rank,))
    for rank, statement in enumerate(said):
        # The op is first: what ranks state of different ops differs in the kernel and in most other values, too.
        for name in sorted({*said[0], *statement}, key=lambda stated: (stated != "op", stated)):
            first, here = said[0].get(name), statement.get(name)
            if first != here:
                message = (
                    f"{where}: {name} is {first} on rank 0 and {here} on rank {rank}; give all ranks the same"
                    f"{in_world(group, (0, rank))}"
                )
                raise RanksDisagree("arguments_differ", message, (rank,))


def _store_of(op: str, group: ProcessGroup) -> Any:
    from torch.distributed import distributed_c10d as c10d

    try:
        return c10d._get_process_group_store(group)
    except KeyError:
        refuse(op, "group", "is unknown to torch.distributed", "create it by init_process_group or new_group")
