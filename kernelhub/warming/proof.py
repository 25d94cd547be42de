"""Each kernel that is chosen is right on this machine: by stored evidence, or held against its reference now."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.problem_class import unpacked_facets
from kernelhub.evidence.apart import Child, can_go_apart
from kernelhub.evidence.quarantine import kept_of
from kernelhub.evidence.results import NOT_RUN, WRONG, Result
from kernelhub.evidence.trust import covered
from kernelhub.evidence.verify import verify, verify_in
from kernelhub.probes.device import facts
from kernelhub.warming.beat import Heart
from kernelhub.warming.crew import Crew, room_for_children
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
            if key in self.asked or key in found or unpacked_facets(problem) in earned.get(key, ()):
                continue
            kept = kept_of(kernel, facts(device))
            if kept is not None and not kept.result.failures:
                self.asked.add(key)
            else:
                found[key] = kernel
        return list(found.values())

    def settle(self, items: Sequence[Item], device: torch.device, heart: Heart, jobs: int | None = None) -> bool:
        """Verify what is chosen until nothing unknown is; whether there was anything to verify.

        What is wrong is quarantined, the next best kernel is then chosen, and verified too. Several kernels are
        verified at a time, each in a child, where there is room, or `jobs` says so: most of the time is compiling.
        """
        any_asked = False
        while todo := self.unknown(items, device):
            any_asked = True
            heart.stage("verifying", len(todo))
            results = self._in_children(todo, device, heart, Crew(jobs or room_for_children(device)))
            for place, kernel in enumerate(todo):
                if kernel not in results:
                    heart.step(f"{kernel.op} {kernel.name}", place)
                    found = verify(kernel.op, backend=kernel.name, device=device, quick=True)
                    results[kernel] = next((item for item in found.results if item.kernel == kernel.name), None)
                self._note(kernel, results[kernel])
        return any_asked

    def _in_children(
        self, todo: Sequence[Kernel], device: torch.device, heart: Heart, crew: Crew
    ) -> dict[Kernel, Result | None]:
        """What verifying several at a time gave; nothing of those that could not be asked so."""
        results: dict[Kernel, Result | None] = {}
        apart, begun = [kernel for kernel in todo if can_go_apart(kernel)], itertools.count()
        if crew.processes < 2 or len(apart) < 2:
            return results

        def ask(kernel: Kernel, child: Child) -> None:
            crew.check()
            heart.step(f"{kernel.op} {kernel.name}", next(begun))
            result = verify_in(child, kernel, device)
            if result.checks:
                results[kernel] = result

        crew.share_out(apart, ask)
        HUB.forget_evidence()
        return results

    def _note(self, kernel: Kernel, result: Result | None) -> None:
        key = (kernel.op, kernel.name)
        self.asked.add(key)
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
