"""Each kernel that is chosen is right on this machine: by stored evidence, or held against its reference now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.reasons import class_of
from kernelhub.evidence.quarantine import kept_of
from kernelhub.evidence.results import NOT_RUN, WRONG
from kernelhub.evidence.trust import covered
from kernelhub.evidence.verify import verify
from kernelhub.probes.device import facts
from kernelhub.warming.beat import Heart
from kernelhub.warming.wanted import Item


@dataclass
class Proof:
    """What was looked at, and found.

    Attributes:
        asked: kernels that need not be looked at again, as (op, kernel).
        verified: those that were verified in this warm-up.
        quarantined: those that are wrong, each with why.
        unverified: those that could not be verified, each with why.
    """

    asked: set[tuple[str, str]] = field(default_factory=set)
    verified: list[tuple[str, str]] = field(default_factory=list)
    quarantined: list[tuple[str, str, str]] = field(default_factory=list)
    unverified: list[tuple[str, str, str]] = field(default_factory=list)

    def unknown(self, items: Sequence[Item], device: torch.device) -> list[Kernel]:
        """The kernels that are chosen now and of which nothing is known, each once; stored evidence is taken.

        A kernel that was verified for the very class that it is chosen for (`trusting`) is known there.
        """
        found: dict[tuple[str, str], Kernel] = {}
        earned = {key: {one.facets for one in ones} for key, ones in covered(facts(device)).items()}
        for kernel, problem in chosen(items, device):
            key = (kernel.op, kernel.name)
            if key in self.asked or key in found or class_of(problem) in earned.get(key, ()):
                continue
            kept = kept_of(kernel, facts(device))
            if kept is not None and not kept.result.failures:
                self.asked.add(key)
            else:
                found[key] = kernel
        return list(found.values())

    def settle(self, items: Sequence[Item], device: torch.device, heart: Heart) -> bool:
        """Verify what is chosen until nothing unknown is; whether there was anything to verify.

        What is wrong is quarantined, the next best kernel is then chosen, and verified too.
        """
        any_asked = False
        while todo := self.unknown(items, device):
            any_asked = True
            heart.stage("verifying", len(todo))
            for place, kernel in enumerate(todo):
                heart.step(f"{kernel.op} {kernel.name}", place)
                self._ask(kernel, device)
        return any_asked

    def _ask(self, kernel: Kernel, device: torch.device) -> None:
        key = (kernel.op, kernel.name)
        self.asked.add(key)
        found = verify(kernel.op, backend=kernel.name, device=device, quick=True)
        result = next((item for item in found.results if item.kernel == kernel.name), None)
        if result is None or result.status == NOT_RUN:
            self.unverified.append((*key, result.why_not if result is not None else "its record takes no case here"))
            return
        self.verified.append(key)
        if result.status == WRONG:
            self.quarantined.append((*key, result.reason))


def chosen(items: Sequence[Item], device: torch.device) -> list[tuple[Kernel, Any]]:
    """The kernels that items would run now, each with the problem."""
    kernels = []
    for item in items:
        if item.need is not None:
            selection = item.selection(device)
            if selection.kernel is not None:
                kernels.append((selection.kernel, selection.problem))
    return kernels
