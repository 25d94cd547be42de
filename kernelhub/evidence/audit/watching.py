"""Counting of launches, and recomputation of some of them.

If a share is set while a kernel is prepared, counting methods replace the methods that launch it. Without a share this
module is not loaded, and calls are unchanged.

On a CPU a call is compared before it returns. On a GPU the operands are copied on the caller's stream before the launch
and the results after it, an event is recorded, and the call returns. Once the event has passed, a later sampled call
compares the copies on the audit's own stream. So neither the caller's stream nor its memory waits; the calling thread
waits for the recomputation.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.audits import AUDITS, PAUSED, AuditSettings, unaudited
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.making import at_fork
from kernelhub.dispatch.selection import Selection
from kernelhub.evidence.audit.comparing import DISPUTED, NO_NUMBERS, WRONG_NUMBERS, Comparison, Others, compared
from kernelhub.evidence.audit.copies import (
    bytes_of_copies,
    bytes_of_reference,
    copied,
    copied_results,
    takes_too_long,
    tensors_of,
)
from kernelhub.evidence.audit.findings import found_wrong
from kernelhub.evidence.audit.found import WrongCall
from kernelhub.evidence.audit.launches import METHODS, READERS, Arranged, NotAudited, Read, rearranges, size_of
from kernelhub.evidence.audit.schedule import Schedule
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.poison import same
from kernelhub.ops.attention.adapter import AttentionAdapter
from kernelhub.ops.case import Arguments
from kernelhub.ops.gemm.grouped.adapter import GroupedGemmAdapter
from kernelhub.ops.graph_memory import captures, of_graph

log = logging.getLogger("kernelhub.audit")

MOST_PENDING = 4  # calls whose copies wait to be compared
_LOOK_AGAIN = 64  # calls after which a pending comparison is tried again
_OWN_COMPUTE = (AttentionAdapter.compute, GroupedGemmAdapter.compute)  # these only launch


def watch(adapter: Any, selection: Selection[Any], device: int, settings: AuditSettings) -> None:
    """Count the launches of an adapter, and recompute a share of them."""
    AUDITS.settle = PENDING.settle_all
    one = LaunchAudit(selection, device, settings, Arranged(adapter) if rearranges(adapter) else None)
    for name in METHODS:
        method = getattr(type(adapter), name, None)
        if method is None or method in _OWN_COMPUTE:
            continue
        setattr(adapter, name, one.watched(adapter, name))


class LaunchAudit:
    """The launches of one kernel for one problem.

    Args:
        selection: the selection of the kernel.
        device: index of the GPU, -1 for the CPU.
        settings: settings of the audit.
        arranged: original weights, for a kernel that rearranges them.
    """

    def __init__(
        self, selection: Selection[Any], device: int, settings: AuditSettings, arranged: Arranged | None = None
    ) -> None:
        self.arranged = arranged
        assert selection.kernel is not None
        self.selection, self.device, self.settings = selection, device, settings
        self.op, self.kernel = selection.op, selection.kernel.name
        self.cases = CASES[self.op]
        self.others = Others(selection)
        self.schedule = Schedule(settings.share, f"{self.op} {self.kernel} {selection.problem}")
        self._guard = threading.Lock()
        self._failure_told = False

    def watched(self, adapter: Any, name: str) -> Callable[..., Any]:
        """A counting version of an adapter's method that launches."""
        launch = getattr(adapter, name)
        count, schedule, size, look = itertools.count().__next__, self.schedule, size_of(self.op), self.look
        sizes = schedule.sizes

        def audited(*given: Any) -> Any:
            number = count()
            if number < schedule.due and size(given) in sizes:
                return launch(*given)
            return look(launch, number, size(given), given)

        return _of(adapter, audited)

    def look(self, launch: Callable[..., Any], number: int, size: Any, given: tuple[Any, ...]) -> Any:
        """Run a call that may be due; compare it now or later."""
        if PAUSED.now or torch.compiler.is_compiling():
            return launch(*given)
        with self._guard:
            taken = self.schedule.takes(number, size)
            if self.device >= 0 and PENDING.of(self.device):
                self.schedule.due = min(self.schedule.due, number + _LOOK_AGAIN)
        PENDING.settle(self.device)
        copy = self._begin(given) if taken else None
        if copy is None:
            return launch(*given)
        with unaudited():  # it may launch recursively
            returned = launch(*given)
        try:
            copy.end(returned)
        except torch.OutOfMemoryError:
            self.skip("memory")
        except Exception as error:  # an audit never fails a call
            self.failed(error)
        return returned

    def skip(self, why: str) -> None:
        """Count a call that is not compared, by a key of `SKIPPED`."""
        AUDITS.note_skipped(self.op, self.kernel, why)

    def failed(self, error: Exception) -> None:
        """Count a call whose audit raised, and log the first."""
        self.skip("failed")
        if not self._failure_told:
            self._failure_told = True
            log.warning("%s %s: a call could not be audited: %r", self.op, self.kernel, error, exc_info=error)

    def _begin(self, given: tuple[Any, ...]) -> _Copy | None:
        """Copies of a launch's operands; None, with a count, if it is not compared."""
        try:
            if self.device in GATE.lost:
                raise NotAudited("lost")
            if self.device >= 0 and of_graph(self.device):
                raise NotAudited("capture")
            if self.device >= 0 and len(PENDING.of(self.device)) >= MOST_PENDING:
                raise NotAudited("pending")
            with torch.inference_mode(False), torch.no_grad():
                asked = given if self.arranged is None else self.arranged.given_to(given)
                read = READERS[self.op](self.selection.problem, asked)
                affordable = self._check_room(read)
                return _Copy(self, read, copied(read.arguments), affordable)
        except NotAudited as why:
            self.skip(str(why))
        except torch.OutOfMemoryError:
            self.skip("memory")
        except Exception as error:  # an audit never fails a call
            self.failed(error)
        return None

    def _check_room(self, read: Read) -> bool:
        """Whether the reference may be computed too; raises if not even copies may be made."""
        if takes_too_long(self.op, read.arguments):
            raise NotAudited("time")
        copies, reference = bytes_of_copies(read), bytes_of_reference(self.op, read)
        most = self.settings.num_bytes - PENDING.num_bytes
        affordable = copies + reference <= most
        if not affordable and not (4 * copies <= most and self.others.names()):  # another kernel needs about a result
            raise NotAudited("bytes")
        if self.device >= 0 and copies + (reference if affordable else 2 * copies) > _free_bytes(self.device) // 2:
            raise NotAudited("memory")
        return affordable


def _of(adapter: Any, launch: Callable[..., Any]) -> Callable[..., Any]:
    """A function with `__self__`, like a method of an adapter: error handling of a launch reads it."""
    launch.__self__ = adapter  # type: ignore[attr-defined]
    return launch


@dataclass
class _Copy:
    """A call under audit: its operands before the launch, and later its results."""

    watch: LaunchAudit
    read: Read
    arguments: Arguments
    affordable: bool

    def end(self, returned: Any) -> None:
        """Copy the results and compare now, or in a later call."""
        if isinstance(returned, Tensor) and not self.read.results:  # the result of a launch that allocates it
            self.read = self.read._replace(results={"out": returned})
        with torch.inference_mode(False), torch.no_grad():
            results = copied_results(self.read)
        device = self.watch.device
        if device >= 0:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))
            PENDING.add(_PendingCall(self, results, ready, bytes_of_copies(self.read)))
            return
        if self.compare(results):
            self._look_again(results)

    def compare(self, results: dict[str, Tensor]) -> bool:
        """Compare the results with the reference, and handle wrong ones; returns whether they are right."""
        watch = self.watch
        outcome = compared(watch.cases, results, self.arguments, watch.others, affordable=self.affordable)
        if outcome.outcome == NO_NUMBERS:
            watch.skip("no_numbers" if self.affordable else "bytes")
            return True
        AUDITS.note_checked(watch.op, watch.kernel)
        if outcome.outcome == DISPUTED:
            AUDITS.note_disputed(watch.op, watch.kernel)
            message = (
                "%s %s: the result of %s differs, and the reference would take more than KERNELHUB_AUDIT_BYTES: %s"
            )
            log.warning(message, watch.op, watch.kernel, outcome.by, outcome.figures)
        elif outcome.outcome == WRONG_NUMBERS:
            self._wrong(outcome, results)
            return False
        return True

    def _wrong(self, outcome: Comparison, results: dict[str, Tensor]) -> None:
        watch = self.watch
        AUDITS.note_wrong(watch.op, watch.kernel, outcome.figures)
        found_wrong(WrongCall(watch.selection, self.arguments, results, outcome), watch.settings)

    def _look_again(self, results: dict[str, Tensor]) -> None:
        """On a CPU only the kernel can have changed the results since the copy: a difference was written late."""
        with torch.inference_mode(False), torch.no_grad():
            now = copied_results(self.read)
        late = [name for name, tensor in results.items() if not same(now[name], tensor)]
        if late:
            figures = f"{' and '.join(late)} was written again after the launch had returned"
            self._wrong(Comparison(WRONG_NUMBERS, "wrong_numbers", math.inf, figures), now)


@dataclass(eq=False)
class _PendingCall:
    """A call whose copies wait for the device.

    Attributes:
        copy: copies of the operands.
        results: copies of the results.
        ready: event that is recorded after the copies.
        num_bytes: size of all copies.
    """

    copy: _Copy
    results: dict[str, Tensor]
    ready: Any
    num_bytes: int


class Pending:
    """The calls whose copies wait for their device, up to `MOST_PENDING`."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._queues: dict[int, deque[_PendingCall]] = {}
        self._streams: dict[int, Any] = {}

    def renew(self) -> None:
        """Reset after a fork: the child cannot use devices, and a thread of the parent may have held the lock."""
        self.__init__()  # type: ignore[misc]

    @property
    def num_bytes(self) -> int:
        """Bytes of all waiting copies."""
        return sum(one.num_bytes for queue in list(self._queues.values()) for one in list(queue))

    def of(self, device: int) -> tuple[_PendingCall, ...]:
        """Waiting calls of a device, oldest first."""
        return tuple(self._queues.get(device, ()))

    def add(self, one: _PendingCall) -> None:
        """Add a call to compare once its event has passed."""
        with self._guard:
            self._queues.setdefault(one.copy.watch.device, deque()).append(one)

    def settle(self, device: int) -> None:
        """Compare the calls of a device whose copies are complete, without waiting for others."""
        if not self._queues.get(device) or device in GATE.lost or captures():
            return
        while (one := self._next(device)) is not None:
            self._compare(one, device)

    def settle_all(self) -> None:
        """Compare completed calls of every device, from a thread that is not inside a call."""
        for device in list(self._queues):
            self.settle(device)

    def _next(self, device: int) -> _PendingCall | None:
        """Remove and return the oldest call of a device, if its event has passed."""
        with self._guard:
            queue = self._queues[device]
            return queue.popleft() if queue and queue[0].ready.query() else None

    def _compare(self, one: _PendingCall, device: int) -> None:
        watch = one.copy.watch
        try:
            with torch.cuda.device(device), torch.cuda.stream(self._stream(device)) as _:
                side = torch.cuda.current_stream(device)
                side.wait_event(one.ready)
                for tensor in (*tensors_of(one.copy.arguments), *one.results.values()):
                    tensor.record_stream(side)  # allocated on the caller's stream, used on this one
                one.copy.compare(one.results)
        except torch.OutOfMemoryError:
            watch.skip("memory")
        except Exception as error:  # an audit never fails a call
            watch.failed(error)

    def _stream(self, device: int) -> Any:
        """The audit's own stream."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


PENDING = Pending()
at_fork(PENDING.renew)


def _free_bytes(device: int) -> int:
    """Available GPU memory: free memory, and memory that torch caches without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
