"""An op's record and contract: what it is asked, how a kernel must answer, and how an answer is judged."""

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
    """One op as data, light to import: all that a kernel is selected by.

    Attributes:
        name: the op's public name.
        summary: one line.
        problem: the dataclass of its facets.
        complete: facets that a user wrote out, with those that follow from them filled in.
        contradiction: what is wrong with facets that cannot stand together, as a sentence, or None.
        regimes: names of the phases that order lines may speak of.
        regime: the phase of a problem.
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
    """One op as its family's folder declares it: its record, and what calls of it are made of.

    Attributes:
        problem_of: builds the problem from a table key and a device index (-1 for the CPU) and from nothing
            else, so that equal keys are equal problems.
        adapter: the class that every kernel's target must give an instance of, made from a problem.
        bind: makes the function that a call runs, from adapter, problem, device index, a call counter, and a
            function that gives the same for another device index.
        reference: the op in plain torch, computed in float32 or the dtype asked for.
        example: ``"module:function"`` that gives inputs with the shapes of real models.
    """

    problem_of: Callable[[Any, int], ProblemT]
    adapter: type
    bind: Callable[[Any, ProblemT, int, Callable[[], int], Callable[[int], Callable[..., Any]]], Callable[..., Any]]
    reference: Callable[..., Any]
    example: str

    @classmethod
    def of(cls, record: OpRecord[ProblemT], **calls: Any) -> Contract[ProblemT]:
        """The contract of an op out of its record, and of what its calls are made of, by name."""
        contract = cls(**{item.name: getattr(record, item.name) for item in fields(OpRecord)}, **calls)
        contract.__dict__["schema"] = record.schema
        return contract
