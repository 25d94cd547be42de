"""Verification of every selected kernel on this machine: by stored evidence, or by a check against its reference."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.problem_class import unpacked_facets
from kernelhub.evidence.apart import Child, can_go_apart
from kernelhub.evidence.case_run import CaseRun, quick_run
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.quarantine import kept_of, was_interrupted
from kernelhub.evidence.results import NOT_RUN, WRONG, Result
from kernelhub.evidence.served import is_covered, names_of
from kernelhub.evidence.trust import covered
from kernelhub.evidence.verify import verify_served
from kernelhub.probes.device import facts
from kernelhub.runtime.progress import Heart
from kernelhub.warming.crew import Crew, room_for_children
from kernelhub.warming.wanted import Item

_CASES_OF_A_CHILD = 6  # a child starts in the time in which it compiles that many


@dataclass
class Proof:
    """The kernels that were checked, and the results.

    Attributes:
        asked: kernels that need no further check for a problem, as (op, kernel, name of the problem in evidence).
        verified: kernels that were verified in this warm-up.
        quarantined: kernels that are wrong, each with the reason.
        unverified: kernels that could not be verified, each with the reason.
        repeated: kernels whose interrupted verification was repeated, as (op, kernel).
    """

    asked: set[tuple[str, str, str]] = field(default_factory=set)
    verified: list[tuple[str, str]] = field(default_factory=list)
    quarantined: list[tuple[str, str, str]] = field(default_factory=list)
    unverified: list[tuple[str, str, str]] = field(default_factory=list)
    repeated: set[tuple[str, str]] = field(default_factory=set)

    def unknown(self, items: Sequence[Item], device: torch.device) -> dict[Kernel, list[Any]]:
        """The currently selected kernels without stored evidence for what they serve, and these problems.

        A kernel that `trusting` verified for exactly the class that selects it has evidence there.
        """
        found: dict[Kernel, list[Any]] = {}
        earned = {key: {one.facets for one in ones} for key, ones in covered(facts(device)).items()}
        for kernel, problem in chosen(items, device):
            if unpacked_facets(problem) in earned.get((kernel.op, kernel.name), ()):
                continue
            asked = _asked(kernel, [problem])
            if asked <= self.asked:
                continue
            kept = kept_of(kernel, facts(device))
            if kept is not None and not kept.result.failures and is_covered(kept.result, {name for *_, name in asked}):
                self.asked |= asked
            else:
                found.setdefault(kernel, []).append(problem)
        return found

    def settle(self, items: Sequence[Item], device: torch.device, heart: Heart, jobs: int | None = None) -> bool:
        """Verify selected kernels until all have evidence; return whether there was anything to verify.

        A wrong kernel is quarantined; the next best one is then selected and verified too. Several children verify at a
        time, if memory or `jobs` allows it, and share the cases of a kernel that has many: most of the time is
        compilation. Kernels whose last verification was interrupted come first.
        """
        any_asked = self._again(items, device, heart)
        while todo := self.unknown(items, device):
            any_asked = True
            heart.stage("verifying", len(todo))
            results = self._in_children(todo, device, heart, Crew(jobs or room_for_children(device)))
            for place, kernel in enumerate(todo):
                if kernel not in results:
                    heart.step(f"{kernel.op} {kernel.name}", place)
                    results[kernel] = verify_served(kernel, device, todo[kernel])
                self._note(kernel, results[kernel], todo[kernel])
        return any_asked

    def _again(self, items: Sequence[Item], device: torch.device, heart: Heart) -> bool:
        """Verify once more, in a child, the kernels that are quarantined since a process ended while it verified them.

        Return whether there were any. A process may have been ended by a scheduler or a user; a kernel that ends the
        child too stays quarantined.
        """
        todo = [each for each in interrupted(items, device) if (each.op, each.name) not in self.repeated]
        self.repeated.update((each.op, each.name) for each in todo)
        if todo:
            heart.stage("verifying", len(todo))
            with Child() as child:
                for place, kernel in enumerate(todo):
                    heart.step(f"{kernel.op} {kernel.name}, whose verification was interrupted", place)
                    served = [item.selection(device).problem for item in items if item.need and item.op == kernel.op]
                    self._note(kernel, quick_run(kernel, device, served).ask(child), served)
            HUB.forget_evidence()
        return bool(todo)

    def _in_children(
        self, todo: Mapping[Kernel, list[Any]], device: torch.device, heart: Heart, crew: Crew
    ) -> dict[Kernel, Result | None]:
        """Results of verifying with several children, without kernels that cannot run in one."""
        results: dict[Kernel, Result | None] = {}
        runs = [quick_run(kernel, device, served) for kernel, served in todo.items() if can_go_apart(kernel)]
        shares, begun = _shares(runs), itertools.count()
        if crew.processes < 2 or len(shares) < 2:
            return results
        steps = {run.kernel: (f"{run.kernel.op} {run.kernel.name}", next(begun)) for run in runs}

        def ask(run: CaseRun, child: Child) -> None:
            crew.check()
            if run.left:
                heart.step(*steps[run.kernel])
            result = run.ask(child)
            if result is not None and result.checks:
                results[run.kernel] = result

        crew.share_out(shares, ask)
        HUB.forget_evidence()
        return results

    def _note(self, kernel: Kernel, result: Result | None, served: Sequence[Any]) -> None:
        key = (kernel.op, kernel.name)
        self.asked |= _asked(kernel, served)
        if result is None or result.status == NOT_RUN:
            self.unverified.append((*key, result.why_not if result is not None else "its record supports no case here"))
            return
        self.verified.append(key)
        if result.status == WRONG:
            self.quarantined.append((*key, result.reason))


def _asked(kernel: Kernel, problems: Sequence[Any]) -> set[tuple[str, str, str]]:
    """A kernel with each name of the problems."""
    return {(kernel.op, kernel.name, name) for name in names_of(CASES[kernel.op], problems)}


def _shares(runs: Sequence[CaseRun]) -> list[CaseRun]:
    """Every run once, then those with many cases again, for as many children as are worth their start."""
    ordered = sorted(runs, key=lambda run: -run.left)
    more = [run for run in ordered for _ in range(1, -(-run.left // _CASES_OF_A_CHILD))]
    return [*ordered, *more]


def interrupted(items: Sequence[Item], device: torch.device) -> list[Kernel]:
    """The kernels that nothing but an interrupted verification keeps items from selecting."""
    found: dict[tuple[str, str], Kernel] = {}
    for item in items:
        if item.need is None:
            continue
        for decision in item.selection(device).decisions:
            key = (item.need.op, decision.kernel)
            if key in found or {rejection.code for rejection in decision.rejections} != {"quarantined"}:
                continue
            kernels = HUB.registry.candidates(item.need.op).kernels
            kernel = next(each for each in kernels if each.name == decision.kernel)
            kept = kept_of(kernel, facts(device))
            if kept is not None and was_interrupted(kept.result) and can_go_apart(kernel):
                found[key] = kernel
    return list(found.values())


def chosen(items: Sequence[Item], device: torch.device) -> list[tuple[Kernel, Any]]:
    """The kernels that items would run now, each with its problem."""
    kernels = []
    for item in items:
        if item.need is not None:
            selection = item.selection(device)
            if selection.kernel is not None:
                kernels.append((selection.kernel, selection.problem))
    return kernels
