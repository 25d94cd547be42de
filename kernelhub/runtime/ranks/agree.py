"""`kernelhub.agree`: all ranks of a process group run one plan, or none."""

from __future__ import annotations

import contextvars
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from kernelhub.dispatch.explain import DeviceLike, device_facts
from kernelhub.dispatch.fingerprint import digest
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.plan import Plan
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import ConfigurationError, KernelhubError, RanksDisagree
from kernelhub.ops.models.description import Description
from kernelhub.ops.models.problems import Need, problems_of
from kernelhub.probes.device import DeviceFacts
from kernelhub.runtime.ranks.agreed import AgreedKernel, agreed_on, sizes_of, stop, stop_other_sizes
from kernelhub.runtime.ranks.meeting import Clock, Ended, Meeting, this_process
from kernelhub.runtime.ranks.rounds import alone, follow, lead
from kernelhub.runtime.ranks.settle import LEAD, Failure, Outcome
from kernelhub.runtime.ranks.statement import Stated, state, statement_of, table_digest

T = TypeVar("T")
What = Plan | Need | Selection[Any]
_LOOK_S = 0.5  # how often the waiting thread checks whether the process runs
_STOOD_S = 1.0  # a longer pause than a busy machine causes means that the process was stopped
_LONGEST_S = 86400.0  # longer times overflow the wait of a thread
_LAST_BREATH_S = 0.5  # a killed process closes its connections shortly before it ends


@dataclass(frozen=True)
class Agreement:
    """The kernels that every rank of a group runs until `kernelhub.reload()`.

    Attributes:
        rank, size: rank of this process, and size of the group.
        choices: one for each problem class.
        digest: equal on all ranks.
        tuned: rank 0's results of tuning.
        stale: given plans that no longer run, since the ranks agreed on another kernel; prepare them again.
        elapsed_s: time of the agreement.
    """

    rank: int
    size: int
    choices: tuple[AgreedKernel, ...]
    digest: str
    tuned: Mapping[str, Any] = field(default_factory=dict)
    stale: tuple[Plan, ...] = ()
    elapsed_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rank": self.rank,
            "size": self.size,
            "digest": self.digest,
            "choices": [choice.to_dict() for choice in self.choices],
            "stale": [repr(plan) for plan in self.stale],
            "elapsed_s": self.elapsed_s,
        }

    def __str__(self) -> str:
        lines = [f"{self.size} ranks agree on {len(self.choices)} problem classes ({self.digest})"]
        lines += [f"  {choice}" for choice in self.choices]
        return "\n".join(lines)


def agree(
    process_group: Any = None,
    what: str | Path | Description | What | Iterable[What] | None = None,
    *,
    tp: int | None = None,
    timeout_s: float = 120.0,
    tuned: Mapping[str, Any] | None = None,
    device: DeviceLike = None,
    packing: bool = False,
) -> Agreement:
    """Make all ranks run one plan, or none. Every rank of the group calls it, with the same problem classes.

    For each problem class, the kernel that rank 0 ranks first among those that every rank can run is selected. A kernel
    that one rank rejects, or whose adapter it cannot load, is rejected on all ranks: `explain` shows it as
    ``refused_by_rank``, with the rank and its reason. The agreement is in force until `kernelhub.reload()`; a call that
    would run another kernel for such a problem raises. The group's collectives are not used: ranks exchange messages
    through its store, so that a dead or slow rank is named within the time-out.

    Args:
        process_group: group of torch.distributed; by default the default group. Without any, this process is the only
            rank.
        what: plans, selections or needs (`kernelhub.problems_of`), one or several; a model, as of `problems_of`; or
            nothing, for all selections of this process so far.
        tp: for a model, ranks that share every layer; by default the size of the group.
        timeout_s: longest wait for all ranks together, in seconds.
        tuned: results of tuning, plain JSON values; all ranks use those of rank 0. By default the valid measurements of
            `kernelhub.tune` on rank 0: every rank then ranks and sizes kernels by these alone, until
            `kernelhub.reload()`.
        device: device of needs and models: as of `explain`, by default the current GPU, else the CPU.
        packing: as of ``prepare``, the same on all ranks: for needs and models, kernels for packed weights are ranked
            with the others.

    Raises:
        RanksDisagree: nothing changes on any rank; `code` is the cause, and `ranks` the ranks concerned. docs/ranks.md
            lists the codes.
        ConfigurationError: this process is not in the group, `what` has an unsupported type, or kernelhub is sealed.

    Example:
        >>> import kernelhub
        >>> needs = kernelhub.problems_of("llama-3.1-8b", tp=8)
        >>> agreement = kernelhub.agree(what=needs, device="cpu")
        >>> agreement.size, len(agreement.choices) == len(needs)
        (1, True)
        >>> kernelhub.reload()
    """
    if not 0 < timeout_s <= _LONGEST_S:
        raise ConfigurationError(f"agree: timeout_s is {timeout_s!r}; give seconds, more than 0, at most a day")
    GATE.check_change("agree")
    store, rank, size = _group(process_group)
    items = _items(what, tp or size)
    where = device_facts(torch.device("cuda", torch.cuda.current_device()) if _on_gpu(device) else device)
    clock = Clock(timeout_s, time.monotonic())
    given = None if tuned is None else _plain_table(tuned)

    def meet() -> tuple[Stated, Outcome, Mapping[str, Any]]:
        if store is None:
            return alone(state(items, where, packing), _own_table(given, where))
        meeting, failure = Meeting(store, rank, size, clock), None
        try:
            meeting.arrive()
            with meeting.beating():
                return _held_with_others(meeting, items, where, given, packing)
        except Ended as ended:
            failure = ended.failure
            raise
        finally:
            meeting.leave(failure)

    try:
        stated, outcome, tuned_there = _bounded(meet, clock, rank)
    except Ended as ended:
        raise RanksDisagree(ended.failure.code, f"agree: {ended.failure.message}", ended.failure.ranks) from None
    by_op, choices = agreed_on(stated, outcome, rank, size, table_digest(tuned_there))
    before = sizes_of(stated)
    if size > 1 or tuned is not None:
        HUB.machine.give_tuned(tuned_there)
    HUB.agree(by_op)
    stale = (*stop(stated, outcome, size), *stop_other_sizes(stated, before, size))
    marks = digest([choice.fingerprint for choice in choices])
    return Agreement(rank, size, choices, marks, tuned_there, stale, clock.elapsed_s)


def _group(process_group: Any) -> tuple[Any, int, int]:
    """Store, rank and size of a group; no store if this process is alone."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise ConfigurationError("agree: a process group is given, but torch.distributed is not initialised")
        return None, LEAD, 1
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ConfigurationError("agree: this process is not in the group; only its ranks may call this")
    store_of = getattr(c10d, "_get_process_group_store", None)  # torch has no public function for a group's store
    if store_of is None:
        raise ConfigurationError(f"agree: torch {torch.__version__} does not expose the store of a process group")
    return store_of(process_group or dist.group.WORLD), rank, size


def _items(what: Any, tp: int) -> list[What]:
    if what is None:
        return list(HUB.selections())
    if isinstance(what, str | Path | Description):
        return list(problems_of(what, tp=tp))
    items = [what] if isinstance(what, Plan | Need | Selection) or not isinstance(what, Iterable) else list(what)
    for item in items:
        if not isinstance(item, Plan | Need | Selection):
            raise ConfigurationError(
                f"agree: {item!r} is not a plan, a selection of explain or a need; problems_of(model) returns needs"
            )
    return items


def _own_table(given: dict[str, Any] | None, where: DeviceFacts) -> dict[str, Any]:
    """This rank's table: the given one, else the measurements of this machine."""
    return _plain_table(HUB.machine.tuned(where).plain()) if given is None else given


def _plain_table(tuned: Mapping[str, Any]) -> dict[str, Any]:
    try:
        table: dict[str, Any] = json.loads(json.dumps(dict(tuned)))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"agree: tuned has values that JSON does not support: {error}") from None
    if table != dict(tuned):
        raise ConfigurationError("agree: JSON would change tuned; use str for names, and lists for tuples")
    if table.get("entries"):
        HUB.part("evidence").check(table)
    return table


def _on_gpu(device: DeviceLike) -> bool:
    return device is None and torch.cuda.is_available()


def _held_with_others(
    meeting: Meeting, items: list[What], where: DeviceFacts, given: dict[str, Any] | None, packing: bool
) -> tuple[Stated, Outcome, Mapping[str, Any]]:
    """Send what this rank would run, and settle with the others."""
    rank, clock = meeting.rank, meeting.clock
    try:
        clock.doing = "choosing"
        stated, table = state(items, where, packing), _own_table(given, where)
        mine = statement_of(stated, rank, str(this_process()), table_digest(table))
    except Exception as error:
        message = f"rank {rank} ({this_process()}) could not state its plans: {type(error).__name__}: {error}"
        return meeting.give_up(Failure("rank_failed", message, (rank,)))
    clock.doing = "waiting for ranks"
    outcome, tuned_there = (lead if rank == LEAD else follow)(meeting, stated, mine, table)
    return stated, outcome, tuned_there


def _bounded(work: Callable[[], T], clock: Clock, rank: int) -> T:
    """Run `work` in a thread, so that a store that hangs, or a slow selection, does not block the caller."""
    outcome: list[T | BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.append(context.run(work))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="kernelhub agree", daemon=True)
    thread.start()
    _join(thread, clock)
    if not outcome:
        if clock.stood_s:
            raise Ended(_stood(clock, rank))
        if clock.doing == "choosing":
            message = f"rank {rank} was still selecting kernels after {clock.timeout_s:g} s; give a longer timeout_s"
            raise Ended(Failure("rank_slow", message, (rank,)))
        clock.reported = _silent_store(clock, rank)
        raise Ended(clock.reported)
    result = outcome[0]
    if isinstance(result, Ended | KernelhubError):
        raise result
    if isinstance(result, RuntimeError | OSError):  # torch's errors of a connection are RuntimeErrors
        if clock.stood_s:  # the others ended the meeting in the meantime, and perhaps the store
            raise Ended(_stood(clock, rank)) from result
        raise Ended(_lost_store(clock, result)) from result
    if isinstance(result, BaseException):
        raise result
    return result


def _join(thread: threading.Thread, clock: Clock) -> None:
    """Wait for the work until the time-out; a process that was stopped in the meantime then reads the result."""
    ends = time.monotonic() + clock.timeout_s + clock.grace_s
    before = time.monotonic()
    while thread.is_alive() and before < ends:
        thread.join(min(_LOOK_S, ends - before))
        now = time.monotonic()
        stood_s = now - before - _LOOK_S
        if stood_s > _STOOD_S:
            clock.stood_s = max(clock.stood_s, stood_s)
            ends = max(ends, now + clock.grace_s)
        before = now


def _stood(clock: Clock, rank: int) -> Failure:
    """The failure of this rank, which did not run for longer than the others wait."""
    message = f"rank {rank} ({this_process()}) did not run for {clock.stood_s:.0f} s: it was stopped"
    code = "rank_silent" if clock.stood_long else "rank_slow"
    return Failure(code, f"{message}, and the others have ended without it; restart all ranks", (rank,))


def _silent_store(clock: Clock, rank: int) -> Failure:
    """The failure when the store does not answer."""
    message = f"the group's store, which rank {LEAD} usually holds, has not answered rank {rank}"
    message += f" while {clock.doing}, within {clock.timeout_s:g} s"
    if clock.lead is not None and clock.lead.stopped():
        message += f"; rank {LEAD} ({clock.lead}) is stopped"
    return Failure("store_silent", message, (LEAD,))


def _lost_store(clock: Clock, error: BaseException) -> Failure:
    """The failure when the store is no longer reachable."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    until = time.monotonic() + _LAST_BREATH_S
    while clock.lead is not None and not clock.lead.gone() and time.monotonic() < until:
        time.sleep(_LAST_BREATH_S / 20)
    if clock.lead is not None and clock.lead.gone():
        message = f"rank {LEAD} ({clock.lead}) {clock.lead.gone()} while ranks were agreeing; see its log"
        return Failure("rank_dead", f"{message}, and restart all ranks", (LEAD,))
    message = f"the group's store, which rank {LEAD} usually holds, is gone: {reason}; see the log of rank {LEAD}"
    return Failure("store_lost", message, (LEAD,))
