"""Warm-up earns trust: kernels that would be first are verified for a model's problem classes, until one is right."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.reasons import class_of
from kernelhub.dispatch.selection import Decision
from kernelhub.evidence.apart import Child
from kernelhub.evidence.earn import BUDGET_S, earn
from kernelhub.ops.models.problems import Need
from kernelhub.warming.beat import Heart
from kernelhub.warming.outcome import Earning
from kernelhub.warming.wanted import Item


@dataclass(frozen=True)
class _Class:
    """The items of one problem class together."""

    need: Need
    tokens: tuple[int, ...]
    label: str
    packing: bool


@dataclass
class Trusting:
    """What was tried in one warm-up.

    Attributes:
        earnings: each try.
        left: kernels that would be first and were not tried for lack of time, as (op, kernel, class).
    """

    earnings: list[Earning] = field(default_factory=list)
    left: list[tuple[str, str, str]] = field(default_factory=list)
    _tried: set[tuple[str, str, Any]] = field(default_factory=set)

    def pending(self, items: Sequence[Item], device: torch.device) -> bool:
        """Whether a kernel would be first for some class, if it were verified."""
        return any(self._next(one, device) is not None for one in _classes(items))

    def settle(
        self, items: Sequence[Item], device: torch.device, heart: Heart, budget_s: float, context_len: int
    ) -> None:
        """Verify what would be first, class by class and best first, until one is right or the time is spent.

        Each runs in a child process: one that crashes, hangs or loses the device costs that child, and is quarantined.
        """
        until = time.monotonic() + budget_s
        classes = list(_classes(items))
        heart.stage("earning trust", len(classes))
        with Child() as child:
            for place, one in enumerate(classes):
                while (decision := self._next(one, device)) is not None:
                    heart.step(f"{one.need.op} {decision.kernel}", place)
                    self._tried.add(self._key(one, decision, device))
                    rest = until - time.monotonic()
                    if rest <= 0:
                        self.left.append((one.need.op, decision.kernel, one.label))
                        continue
                    if self._ask(one, decision, device, child, min(rest, BUDGET_S), context_len):
                        break

    def _ask(
        self, one: _Class, decision: Decision, device: torch.device, child: Child, budget_s: float, context_len: int
    ) -> bool:
        op = one.need.op
        kernel = next(kernel for kernel in HUB.registry.candidates(op).kernels if kernel.name == decision.kernel)
        found = earn(kernel, one.need, device, one.tokens, context_len=context_len, budget_s=budget_s, child=child)
        HUB.forget_evidence()
        result = found.result
        reason = "" if found.ok else result.why_not or result.reason
        self.earnings.append(Earning(op, kernel.name, one.label, found.ok, result.seconds, reason))
        return found.ok

    def _next(self, one: _Class, device: torch.device) -> Decision | None:
        selection = HUB.function(one.need.op).op.select(one.need.problem(device), None, packing=one.packing)
        untried = (item for item in selection.faster if self._key(one, item, device) not in self._tried)
        return next(untried, None)

    def _key(self, one: _Class, decision: Decision, device: torch.device) -> tuple[str, str, Any]:
        return one.need.op, decision.kernel, class_of(one.need.problem(device))


def _classes(items: Sequence[Item]) -> Iterator[_Class]:
    """Each problem class of the items once, with all its kinds of calls and token counts."""
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
