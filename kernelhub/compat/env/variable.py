"""What a variable of another project means to kernelhub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernelhub.dispatch.constraint import Constraint, Rule
from kernelhub.dispatch.policy import FOREIGN, Names, Override
from kernelhub.dispatch.settings import parse_bool

VLLM, FLASHINFER, DEEP_GEMM = "vLLM", "FlashInfer", "DeepGEMM"


@dataclass(frozen=True)
class Meaning:
    """What one value says.

    Attributes:
        says: the consequence, as a sentence for `kernelhub env`.
        requests: what runs, or the call fails.
        prefers: what ranks first where it can run.
        disables: what never runs.
        batch_invariant: whether rows must not depend on the batch, or None.
    """

    says: str
    requests: tuple[Override, ...] = ()
    prefers: tuple[Override, ...] = ()
    disables: tuple[Override, ...] = ()
    batch_invariant: bool | None = None

    @property
    def overrides(self) -> tuple[Override, ...]:
        """All of them."""
        return (*self.requests, *self.prefers, *self.disables)


@dataclass(frozen=True)
class EngineVariable:
    """One variable of another project.

    Attributes:
        name: full name.
        owner: the project.
        grammar: what may be written.
        read: text to meaning; raises ValueError with what would be right.
        successor: what the project's present version takes in its place; empty if it still reads this one.
    """

    name: str
    owner: str
    grammar: str
    read: Callable[[str], Meaning]
    successor: str = ""


def override(ops: str, *names: str, where: tuple[Constraint, ...] = ()) -> Override:
    """An override whose place is filled in by `translation`."""
    return Override(ops, names, FOREIGN, "", where)


def overrides(ops: tuple[str, ...], *names: str, where: tuple[Constraint, ...] = ()) -> tuple[Override, ...]:
    """The same override for several ops."""
    return tuple(override(op, *names, where=where) for op in ops)


_ON_GPU = Rule(("device",), lambda problem: None if problem.device.type == "cuda" else "is about GPUs")


def gpu_only(names: Names) -> tuple[Constraint, ...]:
    """The condition of a request for libraries that have kernels for GPUs only: it leaves operands on a CPU alone."""
    return () if {"torch", "cpp"} & set(names) else (_ON_GPU,)


def switch(on: Meaning, off: Meaning) -> Callable[[str], Meaning]:
    """Reads 0 or 1, in kernelhub's forms of true and false."""
    return lambda text: on if parse_bool(text) else off


def one_of(meanings: dict[str, Meaning]) -> Callable[[str], Meaning]:
    """Reads one of some words, in any case."""

    def read(text: str) -> Meaning:
        meaning = {word.lower(): meaning for word, meaning in meanings.items()}.get(text.strip().lower())
        if meaning is None:
            raise ValueError(f"{text!r} is not one of {', '.join(meanings)}")
        return meaning

    return read


def backend_switch(ops: tuple[str, ...], *names: str, where: tuple[Constraint, ...] = ()) -> Callable[[str], Meaning]:
    """1 ranks these kernels first, 0 removes them."""
    who, whom = described(names), ", ".join(ops)
    return switch(
        Meaning(f"{who} ranks first in {whom}", prefers=overrides(ops, *names, where=where)),
        Meaning(f"{who} does not run in {whom}", disables=overrides(ops, *names, where=where)),
    )


def described(names: Names) -> str:
    """Names as a sentence has them."""
    return " or ".join(names)
