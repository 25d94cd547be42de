"""Which cases of a kernel a warm-up runs: those that concern the problems that the kernel will serve.

All quick cases of `paged_attention` are 60, of two widths and every feature; a model has one width and few features,
and most of a verification's time is compilation. The evidence names the problems that it covers, so that another model
on the same machine adds what its own problems need.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from kernelhub.evidence.checks import Subject
from kernelhub.evidence.results import EVERY, Result
from kernelhub.ops.case import Case, OpCases

_MOST_EXACT = 3  # cases beyond the quick ones for formats that no quick case has


def names_of(cases: OpCases, problems: Sequence[Any]) -> tuple[str, ...]:
    """Names of problems in evidence, without repetitions: problems with one name need the same cases."""
    if not cases.read:
        return (EVERY,)
    found = (" ".join(f"{name}={getattr(each, name)}" for name in cases.read) for each in problems)
    return tuple(dict.fromkeys(found))


def is_covered(result: Result, names: Collection[str]) -> bool:
    """Whether stored evidence covers problems of these names."""
    return EVERY in result.covers or set(names) <= set(result.covers)


def cases_for(subject: Subject, cases: Sequence[Case], problems: Sequence[Any]) -> list[Case]:
    """The quick cases of a kernel that concern the problems, and others where no quick one has a problem's formats."""
    quick = [case for case in cases if case.quick]
    if not subject.cases.read:
        return quick
    left = {_formats(subject.cases, problem) for problem in problems}
    found = []
    for case in quick:
        formats = _concerning(subject, case, problems)
        if formats is not None:
            found.append(case)
            left.discard(formats)
    room = dict.fromkeys(left, _MOST_EXACT)
    for case in (case for case in cases if not case.quick):
        if not any(room.values()):
            break
        formats = _concerning(subject, case, problems)
        if formats is not None and room.get(formats):
            found.append(case)
            room[formats] -= 1
    return found or quick


def _concerning(subject: Subject, case: Case, problems: Sequence[Any]) -> tuple[Any, ...] | None:
    """The formats of a case that the kernel's record supports and that concerns one of the problems; else None."""
    try:
        selection = subject.function.explain(**case.make(subject.device))
    except (torch.OutOfMemoryError, MemoryError):  # it would be left out
        return None
    of_case = selection.problem
    if not any(subject.cases.concerns(of_case, served) for served in problems):
        return None
    return _formats(subject.cases, of_case) if subject.claims_of(selection).holds else None


def _formats(cases: OpCases, problem: Any) -> tuple[Any, ...]:
    return tuple(getattr(problem, name) for name in cases.formats)
