"""Enforcement of an agreement in this process: overrides and rejections for selection, and an end to other plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from kernelhub.dispatch import fingerprint
from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.fingerprint import SelectionFingerprint
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.plan import Plan
from kernelhub.dispatch.policy import RANKS, Override, Pins
from kernelhub.dispatch.problem import CHECKPOINT, WEIGHT_LAYOUT
from kernelhub.dispatch.problem_class import Facets, ProblemClass, as_packed, facets_of
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import RanksDisagree
from kernelhub.runtime.ranks.settle import Outcome, Refusal
from kernelhub.runtime.ranks.statement import Stated, key_of

_UNDO = "call kernelhub.reload() on every rank, and agree again"


@dataclass(frozen=True)
class AgreedKernel:
    """The kernel that every rank runs for one problem class.

    Attributes:
        op: name of the op.
        facets: facets of the problem, without the device.
        kernel: the kernel that runs.
        because: why rank 0 ranks it first among those that all ranks can run.
        refused: kernels that one rank supports and another rejects, with that rank's number and reason.
        fingerprint: equal on all ranks.
    """

    op: str
    facets: Facets
    kernel: str
    because: str
    refused: Mapping[str, Refusal]
    fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        refused = {name: vars(refusal) for name, refusal in self.refused.items()}
        return {**vars(self), "facets": dict(self.facets), "refused": refused}

    def __str__(self) -> str:
        lines = [
            f"{self.op}: {self.kernel} ({self.because}), {self.fingerprint}",
            f"    {json.dumps(dict(self.facets))}",
        ]
        lines += [f"    rank {item.rank} refuses {name}: {item.reason}" for name, item in self.refused.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class AgreedOp:
    """The agreement for one op, which the hub checks at every selection.

    Attributes:
        pins: kernels and rejections by problem class.
        rank, size: rank of this process, and size of the group.
    """

    pins: Pins
    rank: int
    size: int

    def check(self, selection: Selection[Any]) -> None:
        """Refuse a selection that differs from the agreement.

        Raises:
            RanksDisagree: names both kernels.
        """
        override = self.pins.overrides.get(self.pins.key(selection.problem))
        if override is None or selection.selected in override.names:
            return
        raise RanksDisagree(
            "agreement_broken",
            f"{selection.op}: rank {self.rank} would run {selection.selected} ({selection.because}), but {self.size} "
            f"ranks agreed on {override.names[0]} for {selection.problem}; undo that, or {_UNDO}",
            (self.rank,),
        )


def try_all(stated: Stated, outcome: Outcome) -> dict[str, tuple[str, str, str, str]]:
    """Load the settled adapters; returns kernel, code, reason and remedy of those that fail, by class."""
    lacking = {}
    for key, settled in outcome.items():
        selection = stated.selections[key]
        if selection.problem.device.simulated or any(
            plan.kernel == settled.kernel for plan in stated.plans.get(key, ())
        ):
            continue
        kernel = _record(selection.op, settled.kernel)
        failure = HUB.try_load(selection.op, kernel, _as_read(kernel, selection.problem))
        if failure is not None:
            lacking[key] = (settled.kernel, *failure)
    return lacking


def fingerprints(stated: Stated, outcome: Outcome, tuned: str) -> list[SelectionFingerprint]:
    """The fingerprints of all settled kernels, in the order of problem classes."""
    return [_fingerprint(stated.selections[key], outcome[key].kernel, tuned) for key in sorted(outcome)]


def agreed_on(
    stated: Stated, outcome: Outcome, rank: int, size: int, tuned: str
) -> tuple[dict[str, AgreedOp], tuple[AgreedKernel, ...]]:
    """The additional state of the hub, and the choices for display."""
    by_op: dict[str, AgreedOp] = {}
    choices = []
    who = f"the agreement of {size} ranks" if size > 1 else "the agreement of this one rank"
    for key in sorted(outcome):
        selection, settled = stated.selections[key], outcome[key]
        op, facets = selection.op, facets_of(selection.problem)
        if op not in by_op:
            known = HUB.agreed.get(op)
            pins = known.pins if known is not None else Pins({})
            by_op[op] = AgreedOp(Pins(dict(pins.overrides), dict(pins.refusals), of_device=False), rank, size)
        overrides, refusals = _open(by_op[op].pins)
        rejections = {
            name: Rejection("refused_by_rank", f"rank {item.rank} refuses it: {item.code}: {item.reason}", _there(item))
            for name, item in settled.refused.items()
            if item.rank != rank
        }
        for same in (facets, *as_packed(facets, _record(op, settled.kernel).layouts)):
            overrides[ProblemClass(None, same)] = Override(op, (settled.kernel,), RANKS, who, undo=_UNDO)
            refusals[ProblemClass(None, same)] = rejections
        mark = str(_fingerprint(selection, settled.kernel, tuned))
        choices.append(AgreedKernel(op, facets, settled.kernel, settled.because, settled.refused, mark))
    return by_op, tuple(choices)


def stop(stated: Stated, outcome: Outcome, size: int) -> tuple[Plan, ...]:
    """Stop plans of other kernels than the agreed ones."""
    stale = []
    for plans in stated.plans.values():
        for plan in plans:
            ran = (plan.selection, *plan.selection.parts)
            other = next((one for one in ran if one.selected != outcome[key_of(one)].kernel), None)
            if other is not None:
                message = (
                    f"{other.op}: this plan runs {other.selected}, but {size} ranks agreed on "
                    f"{outcome[key_of(other)].kernel} since; prepare it again"
                )
                _stop(plan, message)
                stale.append(plan)
    return tuple(stale)


def sizes_of(stated: Stated) -> dict[Plan, Mapping[int, Any]]:
    """The measured sizes, such as tiles, that each plan's kernel would use if prepared now."""
    return {
        plan: fingerprint.sizes_of(HUB.machine, _record(plan.selection.op, plan.kernel), plan.selection.problem)
        for plans in stated.plans.values()
        for plan in plans
        if not isinstance(plan.adapter, _Stopped)
    }


def stop_other_sizes(stated: Stated, before: Mapping[Plan, Mapping[int, Any]], size: int) -> tuple[Plan, ...]:
    """Stop plans that were prepared with other sizes than those of rank 0's table: their bits may differ."""
    stale = []
    for plan, now in sizes_of(stated).items():
        if before[plan] != now:
            reason = f"{plan.selection.op}: this plan runs {plan.kernel} in other sizes than {size} ranks now agree on"
            _stop(plan, f"{reason}; prepare it again")
            stale.append(plan)
    return tuple(stale)


def _stop(plan: Plan, message: str) -> None:
    plan.run = _refusing(message)
    plan.adapter = _Stopped(message)


class _Stopped:
    """Replaces the adapter of a stopped plan; every use raises."""

    def __init__(self, message: str) -> None:
        self._refuse = _refusing(message)

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()


def _refusing(message: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RanksDisagree("agreement_broken", message, ())

    return refuse


def _open(pins: Pins) -> tuple[dict[Any, Override], dict[Any, Mapping[str, Rejection]]]:
    """The tables of an agreement under construction."""
    assert isinstance(pins.overrides, dict)
    assert isinstance(pins.refusals, dict)
    return pins.overrides, pins.refusals


def _as_read(kernel: Kernel, problem: Any) -> Any:
    """The problem that a kernel runs: with weights in its own layout, if it does not read those of a checkpoint."""
    if not kernel.needs_packing or getattr(problem, WEIGHT_LAYOUT, CHECKPOINT) != CHECKPOINT:
        return problem
    return replace(problem, **{WEIGHT_LAYOUT: kernel.packs_to})


def _there(refusal: Refusal) -> str:
    return f"on rank {refusal.rank}: {refusal.remedy}" if refusal.remedy else ""


def _record(op: str, name: str) -> Kernel:
    return next(kernel for kernel in HUB.registry.candidates(op).kernels if kernel.name == name)


def _fingerprint(selection: Selection[Any], kernel: str, tuned: str) -> SelectionFingerprint:
    # Its parts are problem classes of their own, whose kernels are settled, too.
    return HUB.fingerprint_of(replace(selection, kernel=_record(selection.op, kernel), parts=()), tuned)
