"""Verification of kernels that would rank first for a model's problem classes, until one of them is right."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.problem_class import unpacked_facets
from kernelhub.dispatch.selection import Decision
from kernelhub.evidence.apart import Child, goes_apart
from kernelhub.evidence.earn import BUDGET_S, earn
from kernelhub.ops.models.problems import Need
from kernelhub.runtime.progress import Heart
from kernelhub.warming.crew import Crew, room_for_children
from kernelhub.warming.outcome import Earning
from kernelhub.warming.wanted import Item

log = logging.getLogger("kernelhub.evidence")


@dataclass(frozen=True)
class _Class:
    """All items of one problem class."""

    need: Need
    tokens: tuple[int, ...]
    label: str
    packing: bool


@dataclass
class Trusting:
    """The verifications of one warm-up.

    Attributes:
        earnings: the result of each.
        left: kernels that would rank first and were not verified within the time, as (op, kernel, class).
        tried: kernels that need no further try, as (op, kernel, class).
    """

    earnings: list[Earning] = field(default_factory=list)
    left: list[tuple[str, str, str]] = field(default_factory=list)
    tried: set[tuple[str, str, Any]] = field(default_factory=set)

    def pending(self, items: Sequence[Item], device: torch.device) -> bool:
        """Whether a kernel would rank first for some class if it were verified."""
        return any(self.next_of(one, device) is not None for one in _classes(items))

    def settle(
        self,
        items: Sequence[Item],
        device: torch.device,
        heart: Heart,
        budget_s: float,
        context_len: int,
        jobs: int | None = None,
    ) -> None:
        """Verify kernels that would rank first, per class and best first, until one is right or the time is over.

        Each runs in a child process. A kernel that crashes, hangs or loses the device ends only that child, and is
        quarantined. Several children share the classes, `jobs` of them or as many as memory allows: compilation at the
        first call of a library takes longer than the checks.
        """
        classes = [one for one in _classes(items) if self.next_of(one, device) is not None]
        heart.stage("earning trust", len(classes), budget_s)
        crew = Crew(jobs or room_for_children(device))
        earning = _Verifiers(self, device, heart, time.monotonic() + budget_s, context_len, crew)
        self.earnings += earning.settle(classes)

    def next_of(self, one: _Class, device: torch.device) -> Decision | None:
        """The best untried kernel that would rank first for a class."""
        selection = HUB.function(one.need.op).op.select(one.need.problem(device), None, packing=one.packing)
        untried = (item for item in selection.faster if self.key_of(one, item, device) not in self.tried)
        return next(untried, None)

    def key_of(self, one: _Class, decision: Decision, device: torch.device) -> tuple[str, str, Any]:
        """The entry of `tried` for a kernel and a class."""
        return one.need.op, decision.kernel, unpacked_facets(one.need.problem(device))


class _Verifiers:
    """Shared state of the verifying threads."""

    def __init__(
        self, trusting: Trusting, device: torch.device, heart: Heart, until: float, context_len: int, crew: Crew
    ) -> None:
        self.trusting, self.device, self.heart, self.crew = trusting, device, heart, crew
        self.until, self.context_len = until, context_len
        self.tries = self.open = 0
        self.guard = threading.Lock()
        self.here = threading.Lock()  # kernels that cannot run in a child run in this process, one at a time

    def settle(self, classes: Sequence[_Class]) -> list[Earning]:
        """Verify kernels for every class; return the results, class by class."""
        self.open = len(classes)
        results: dict[int, list[Earning]] = {place: [] for place in range(len(classes))}

        def work(item: tuple[int, _Class], child: Child) -> None:
            place, one = item
            self._settle(one, results[place], child)
            with self.guard:
                self.open -= 1

        self.crew.share_out(list(enumerate(classes)), work)
        return [earning for earnings in results.values() for earning in earnings]

    def _settle(self, one: _Class, results: list[Earning], child: Child) -> None:
        """Verify kernels that would rank first for a class, best first, until one is right."""
        trusting = self.trusting
        while (decision := trusting.next_of(one, self.device)) is not None:
            op, name, label = one.need.op, decision.kernel, f"{one.need.op} {decision.kernel}: {one.label}"
            with self.guard:
                trusting.tried.add(trusting.key_of(one, decision, self.device))
                begun, self.tries = self.tries, self.tries + 1
                total = begun + self.open
            self._step(label, begun, total)
            rest = self.until - time.monotonic()
            if rest <= 0:
                trusting.left.append((op, name, one.label))
                continue
            results.append(self._ask(one, decision, child, min(rest, BUDGET_S), label))
            log.info("%s; %.0f s of the budget left", results[-1], max(0.0, self.until - time.monotonic()))

    def _ask(self, one: _Class, decision: Decision, child: Child, budget_s: float, label: str) -> Earning:
        op = one.need.op
        kernel = next(kernel for kernel in HUB.registry.candidates(op).kernels if kernel.name == decision.kernel)
        with contextlib.nullcontext() if goes_apart(kernel) else self.here:
            found = earn(
                kernel,
                one.need,
                self.device,
                one.tokens,
                context_len=self.context_len,
                budget_s=budget_s,
                child=child,
                step=lambda call: self._step(f"{label}, {call}"),
            )
        HUB.forget_evidence()
        result = found.result
        reason = "" if found.ok else result.why_not or result.reason
        return Earning(op, kernel.name, one.label, found.ok, result.seconds, reason)

    def _step(self, label: str, done: int | None = None, total: int | None = None) -> None:
        """Report the current step, unless another thread failed or was interrupted."""
        self.crew.check()
        self.heart.step(label, done, total)


def _classes(items: Sequence[Item]) -> Iterator[_Class]:
    """Each problem class of the items, with all its kinds of calls and token counts."""
    found: dict[Any, list[Item]] = {}
    for item in items:
        if item.need is not None and item.backend is None:
            found.setdefault((item.need.op, item.need.facets, item.packing), []).append(item)
    for same in found.values():
        first = same[0].need
        assert first is not None
        sizes = tuple(dict.fromkeys(kind for item in same if item.need is not None for kind in item.need.sizes))
        tokens = tuple(sorted({count for item in same for count in item.tokens}))
        yield _Class(replace(first, sizes=sizes), tokens, same[0].label, same[0].packing)
