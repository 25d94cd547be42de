"""An op's record (its facets and regimes) and contract (its adapter class, its call, its reference).

Selection needs the record alone. The contract adds what a call needs, and imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Generic

from kernelhub.dispatch.problem import ProblemT, Schema


def _as_written(facets: dict[str, Any]) -> dict[str, Any]:
    return facets


def _consistent(problem: Any) -> str | None:
    return None


def _any(problem: Any) -> str:
    return "any"


@dataclass(frozen=True, kw_only=True)
class OpRecord(Generic[ProblemT]):
    """One op as data for selection, cheap to import.

    Attributes:
        name: the op's public name.
        summary: one line.
        problem: the dataclass of its facets.
        complete: takes the facets that a user gave; returns them with those that follow from them.
        contradiction: takes a problem; returns why its facets contradict each other, as a sentence, or None.
        regimes: names of the phases that order lines may use.
        regime: takes a problem; returns its phase.
    """

    name: str
    summary: str
    problem: type[ProblemT]
    complete: Callable[[dict[str, Any]], dict[str, Any]] = _as_written
    contradiction: Callable[[ProblemT], str | None] = _consistent
    regimes: tuple[str, ...] = ("any",)
    regime: Callable[[ProblemT], str] = _any

    @cached_property
    def schema(self) -> Schema:
        """The closed set of facets."""
        return Schema(self.problem, self.complete)


@dataclass(frozen=True, kw_only=True)
class Contract(OpRecord[ProblemT]):
    """An op's record with the parts of its calls, as its folder in `ops` declares them.

    Attributes:
        problem_of: builds the problem from a table key and a device index (-1 for the CPU). It has no other inputs, so
            that equal keys give equal problems.
        adapter: base class of adapters; every kernel's target makes an instance of it from a problem.
        bind: makes the function that a call runs, from the adapter, the problem, the device index, a call counter, and
            a function that returns the bound function of another device index.
        reference: the op in plain torch, computed in float32 or in a requested dtype.
        example: ``"module:function"`` that returns inputs with the shapes of real models.
    """

    problem_of: Callable[[Any, int], ProblemT]
    adapter: type
    bind: Callable[[Any, ProblemT, int, Callable[[], int], Callable[[int], Callable[..., Any]]], Callable[..., Any]]
    reference: Callable[..., Any]
    example: str

    @classmethod
    def of(cls, record: OpRecord[ProblemT], **calls: Any) -> Contract[ProblemT]:
        """The contract of an op from its record and, by name, the attributes of its calls."""
        contract = cls(**{item.name: getattr(record, item.name) for item in fields(OpRecord)}, **calls)
        contract.__dict__["schema"] = record.schema
        return contract
