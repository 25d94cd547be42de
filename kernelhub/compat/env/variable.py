"""The meaning of another project's variable in kernelhub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernelhub.dispatch.constraint import Constraint, Rule
from kernelhub.dispatch.policy import FOREIGN, Names, Override
from kernelhub.dispatch.settings import did_you_mean, parse_bool

VLLM, FLASHINFER, DEEP_GEMM = "vLLM", "FlashInfer", "DeepGEMM"


@dataclass(frozen=True)
class Meaning:
    """The meaning of one value.

    Attributes:
        says: the effect, as a sentence for `kernelhub env`.
        requests: kernels that run; otherwise the call fails.
        prefers: kernels that rank first if they can run.
        disables: kernels that never run.
        batch_invariant: whether results must not depend on the batch, or None.
    """

    says: str
    requests: tuple[Override, ...] = ()
    prefers: tuple[Override, ...] = ()
    disables: tuple[Override, ...] = ()
    batch_invariant: bool | None = None

    @property
    def overrides(self) -> tuple[Override, ...]:
        """Requests, preferences and disables together."""
        return (*self.requests, *self.prefers, *self.disables)


@dataclass(frozen=True)
class EngineVariable:
    """One variable of another project.

    Attributes:
        name: full name.
        owner: the project.
        grammar: the accepted values.
        read: text to meaning; raises ValueError with the accepted values.
        successor: what replaces it in the project's current version; empty if that still reads this one.
    """

    name: str
    owner: str
    grammar: str
    read: Callable[[str], Meaning]
    successor: str = ""


def override(ops: str, *names: str, where: tuple[Constraint, ...] = ()) -> Override:
    """An override; `translation` sets its origin."""
    return Override(ops, names, FOREIGN, "", where)


def overrides(ops: tuple[str, ...], *names: str, where: tuple[Constraint, ...] = ()) -> tuple[Override, ...]:
    """The same override for several ops."""
    return tuple(override(op, *names, where=where) for op in ops)


_ON_GPU = Rule(("device",), lambda problem: None if problem.device.type == "cuda" else "concerns GPUs only")


def gpu_only(names: Names) -> tuple[Constraint, ...]:
    """The condition of a request for libraries with GPU kernels only: it does not affect operands on a CPU."""
    return () if {"torch", "cpp"} & set(names) else (_ON_GPU,)


def switch(on: Meaning, off: Meaning) -> Callable[[str], Meaning]:
    """Read 0 or 1, in kernelhub's spellings of true and false."""
    return lambda text: on if parse_bool(text) else off


def one_of(meanings: dict[str, Meaning]) -> Callable[[str], Meaning]:
    """Read one of some words, in any case."""

    def read(text: str) -> Meaning:
        meaning = {word.lower(): meaning for word, meaning in meanings.items()}.get(text.strip().lower())
        if meaning is None:
            meant = did_you_mean(text.strip().upper(), meanings) or did_you_mean(text.strip().lower(), meanings)
            raise ValueError(f"{text!r} is not one of {', '.join(meanings)}{meant}")
        return meaning

    return read


def backend_switch(ops: tuple[str, ...], *names: str, where: tuple[Constraint, ...] = ()) -> Callable[[str], Meaning]:
    """Read a switch: 1 ranks these kernels first, 0 removes them."""
    who, whom = described(names), ", ".join(ops)
    return switch(
        Meaning(f"{who} ranks first in {whom}", prefers=overrides(ops, *names, where=where)),
        Meaning(f"{who} does not run in {whom}", disables=overrides(ops, *names, where=where)),
    )


def described(names: Names) -> str:
    """Names joined for a sentence."""
    return " or ".join(names)
