"""Verification of a kernel on one problem class, in a child process, so that a crash ends only that process.

If it passes, the result is stored (`trust`), and selection accepts the kernel for that class; a wrong kernel is
quarantined.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.problem_class import unpacked_facets
from kernelhub.dispatch.reasons import flags_of
from kernelhub.evidence import trust
from kernelhub.evidence.apart import Child, Ended, can_go_apart, goes_apart
from kernelhub.evidence.call import OutOfMemory, Unavailable
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.checks import NOT_REPRESENTED, DeviceUnusable, Subject
from kernelhub.evidence.here import Here
from kernelhub.evidence.quarantine import begun, changing, keep, kept_of, now
from kernelhub.evidence.results import RIGHT, Check, Result, is_of_serving
from kernelhub.evidence.serving import ServingCall, mark_of, serving_calls
from kernelhub.ops.models.problems import Need
from kernelhub.ops.serving import SCALE_BITS
from kernelhub.probes.device import facts

CONTEXT_LEN = 1024
TOKEN_COUNTS = (1, 2, 3, 7, 16, 33, 64, 65, 128, 200, 512, 1025, 2048, 4096)
BUDGET_S = 120.0  # of one kernel on one problem class
_SMALL = 64  # tokens on a CPU, where a larger reference takes seconds


@dataclass(frozen=True)
class Earned:
    """The result of verifying a kernel on one problem class.

    Attributes:
        result: the checks; `Result.status` is ``"right"`` if selection now accepts the kernel for the class.
        unwritten: why that applies to this process only; empty if it is on disk.
    """

    result: Result
    unwritten: str = ""

    @property
    def ok(self) -> bool:
        return self.result.status == RIGHT and not self.result.why_not


def earn(
    kernel: Kernel,
    need: Need,
    device: torch.device,
    tokens: Sequence[int] | None = None,
    *,
    context_len: int = CONTEXT_LEN,
    budget_s: float = BUDGET_S,
    child: Child | None = None,
    apart: bool | None = None,
    step: Callable[[str], None] = lambda label: None,
) -> Earned:
    """Verify a kernel for a problem class, and store the result.

    Args:
        kernel: its record; its only rejections for the class may be trust, quarantine and weights that it must pack.
        need: the problem class, weights as in a checkpoint.
        device: device of the calls.
        tokens: token counts of serving, up to the largest that will be served; `TOKEN_COUNTS` by default.
        context_len: tokens of a sequence in a paged cache.
        budget_s: time limit in seconds; if some calls are left by then, the kernel is not verified.
        child: the child process to use; a new one by default.
        apart: as of `kernelhub.verify`.
        step: called with each call as it begins.
    """
    begin = time.monotonic()
    wanted = tokens or [count for count in TOKEN_COUNTS if device.type != "cpu" or count <= _SMALL]
    calls = serving_calls(need, wanted, context_len)
    process, here = child or Child(), Here()
    try:
        with begun(kernel, facts(device)) as note:
            elsewhere = goes_apart(kernel) if apart is None else apart and can_go_apart(kernel)
            asking = _Asking(kernel, need, device, process if elsewhere else here, begin + budget_s)
            asking.ask(calls, step)
            seconds = time.monotonic() - begin
            result = Result(kernel.op, kernel.name, tuple(asking.checks), asking.left_out, asking.why_not, seconds)
            earned = Earned(result)
            if result.failures or earned.ok:
                note.ended = True
                with changing:
                    unwritten = _keep(kernel, need, device, result)
                if earned.ok:
                    covered = unpacked_facets(need.problem(device))
                    unwritten = trust.keep(kernel, facts(device), covered, asking.passed, seconds) or unwritten
                earned = Earned(result, unwritten)
    finally:
        here.close()
        if child is None:
            process.close()
    return earned


class _Asking:
    """The calls of one problem class, checked one after the other until one fails."""

    def __init__(self, kernel: Kernel, need: Need, device: torch.device, asked_in: Child | Here, until: float) -> None:
        self.checks: list[Check] = []
        self.passed: list[str] = []
        self.left_out, self.why_not = 0, ""
        self._scale_bits: int | None = None
        self._subject = Subject(HUB.function(kernel.op), kernel, CASES[kernel.op], device)
        schema = HUB.registry.contracts[kernel.op].schema
        self._class = " ".join(flags_of(schema, need.problem(device)))
        self._asked_in = asked_in
        self._until = until

    def ask(self, calls: Sequence[ServingCall], step: Callable[[str], None]) -> None:
        if not calls:
            self.why_not = "the class has no call with these token counts"
        for place, asked in enumerate(calls):
            call = replace(asked, scale_bits=self._scale_bits)
            if self.checks and time.monotonic() > self._until:
                self.left_out = len(calls) - place
                self.why_not = f"{self.left_out} of {len(calls)} calls were left out for lack of time"
                return
            step(f"call {place + 1} of {len(calls)}, {call.tokens} tokens")
            try:
                found = self._check(call)
            except Unavailable as error:
                self.why_not = str(error)
                return
            except OutOfMemory:
                self.left_out += 1
                self.passed.append(f"left out for lack of memory: {call.label}")
                continue
            except (DeviceUnusable, Ended) as error:
                found = error.check
            if isinstance(found, str):
                self.why_not = f"its record refuses a call of the class: {found}"
                return
            self.checks.append(replace(found, problem=self._class))
            if not found.ok:
                return
            self.passed.append(replace(call, scale_bits=self._scale_bits).label)

    def _check(self, call: ServingCall) -> Check | str:
        """Check one call; if the kernel's layout rounds scales, use scales that it can represent from then on."""
        found = self._asked_in.check(self._subject, call.case())
        for bits in SCALE_BITS[SCALE_BITS.index(self._scale_bits) + 1 :]:
            if not isinstance(found, str) or not found.startswith(NOT_REPRESENTED):
                break
            self._scale_bits = bits
            found = self._asked_in.check(self._subject, replace(call, scale_bits=bits).case())
        return found


def _keep(kernel: Kernel, need: Need, device: torch.device, result: Result) -> str:
    """Replace the stored results of the class by the failures; keep the other results."""
    before = kept_of(kernel, facts(device))
    known = before.result.checks if before is not None else ()
    others = tuple(check for check in known if not is_of_serving(check) or not check.case.startswith(mark_of(need)))
    if result.failures:
        trust.withdraw(kernel, facts(device))
    earlier = before.result if before is not None else Result(kernel.op, kernel.name)
    kept = replace(result, checks=(*others, *result.failures), left_out=earlier.left_out, covers=earlier.covers)
    return keep(kernel, facts(device), kept, before.date if before is not None and not result.failures else now())
