"""Constraints: conditions of a kernel record on the problem and the machine.

A constraint is an immutable value with `fields` (the facets it reads) and `reject(problem, machine)`, which returns
None or a `Rejection`: a stable code, a sentence, a remedy. Constraints do not raise and have no other inputs: equal
problems on equal machines give equal results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes.finding import Finding
from kernelhub.probes.finding import Rejection as Rejection
from kernelhub.probes.package import Library, Wanted, find_library, fits
from kernelhub.probes.torch_build import TorchBuild

if TYPE_CHECKING:
    from kernelhub.probes.signature import Call

# Code of a kernel that must first be compiled for minutes. It does not reject a kernel that a user requests or prefers,
# since that user accepts the wait.
NOT_BUILT = "not_built"


class Constraint(Protocol):
    """A condition of a kernel record."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Facets of the problem that `reject` reads."""

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        """None if the kernel may run, else the reason against it."""


@dataclass(frozen=True)
class OnDevice:
    """Devices that the kernel runs on.

    Args:
        vendor: ``"nvidia"``, ``"amd"`` or ``"cpu"``.
        at_least: lowest compute capability, inclusive; None for no limit.
        below: upper limit of the compute capability, exclusive; None for no limit.
        only: exact capabilities, for kernels that are compiled for single architectures.
        arch: exact architecture names, for devices without a compute capability.
    """

    vendor: str
    at_least: tuple[int, int] | None = None
    below: tuple[int, int] | None = None
    only: tuple[tuple[int, int], ...] = ()
    arch: tuple[str, ...] = ()

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        device = problem.device
        if device.vendor != self.vendor:
            return Rejection("vendor", "CPU only" if self.vendor == "cpu" else f"needs {self}")
        sm = device.capability
        if (
            (self.at_least is not None and sm < self.at_least)
            or (self.below is not None and sm >= self.below)
            or (self.only and sm not in self.only)
            or (self.arch and device.arch not in self.arch)
        ):
            return Rejection("capability", f"needs {self}; {device.name} is {device.arch}")
        return None

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        if self.vendor == "cpu":
            return f"CPUs with {', '.join(self.arch).upper()}" if self.arch else "CPUs"
        vendor = {"nvidia": "NVIDIA", "amd": "AMD"}.get(self.vendor, self.vendor)
        if self.arch:
            return f"{vendor} {', '.join(self.arch)}"
        if self.only:
            return f"{vendor} {', '.join(_sm(sm) for sm in self.only)}"
        if self.at_least and self.below:
            return f"{vendor} GPUs from {_sm(self.at_least)}, older than {_sm(self.below)}"
        return f"{vendor} GPUs from {_sm(self.at_least)} on" if self.at_least else f"{vendor} GPUs"


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


@dataclass(frozen=True)
class AnyOf:
    """At least one of the alternatives must hold.

    The rejection joins the reasons of the alternatives for the problem's kind of device, or has the reason of the
    first alternative if there is none.
    """

    alternatives: tuple[Constraint, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple({name: None for item in self.alternatives for name in item.fields})

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        rejections = []
        for alternative in self.alternatives:
            rejection = alternative.reject(problem, machine)
            if rejection is None:
                return None
            rejections.append(rejection)
        close = [rejection for rejection in rejections if rejection.code != "vendor"] or rejections[:1]
        remedy = next((rejection.remedy for rejection in close if rejection.remedy), "")
        return Rejection(close[0].code, "; ".join(dict.fromkeys(rejection.reason for rejection in close)), remedy)


@dataclass(frozen=True)
class OneOf:
    """The facet has one of a few values."""

    field: str
    values: tuple[Any, ...]
    code: str = "value"
    why: str = ""
    remedy: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        value = getattr(problem, self.field)
        if value in self.values:
            return None
        allowed = ", ".join(map(str, self.values))
        return Rejection(self.code, _because(f"{self.field} is {value}, not one of {allowed}", self.why), self.remedy)


def dtype_in(field: str, *dtypes: str, why: str = "", remedy: str = "") -> OneOf:
    """The facet is one of these dtypes, named as in torch: ``"bfloat16"``, ``"float8_e4m3fn"``."""
    return OneOf(field, dtypes, "dtype", why, remedy)


@dataclass(frozen=True)
class Between:
    """The facet is between two bounds, both inclusive."""

    field: str
    low: int
    high: int
    why: str = ""
    remedy: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        value = getattr(problem, self.field)
        if self.low <= value <= self.high:
            return None
        return Rejection(
            "range",
            _because(f"{self.field} is {value}, outside {self.low} to {self.high}", self.why),
            self.remedy,
        )


@dataclass(frozen=True)
class MultipleOf:
    """The facet is divisible by a number. The remedy names the next larger value that is."""

    field: str
    divisor: int
    why: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        value = getattr(problem, self.field)
        if value % self.divisor == 0:
            return None
        legal = -(-value // self.divisor) * self.divisor
        reason = _because(f"{self.field} is {value}, not a multiple of {self.divisor}", self.why)
        return Rejection("divisibility", reason, f"pad {self.field} to {legal}")


@dataclass(frozen=True)
class SameValue:
    """Two facets have the same value."""

    field: str
    other: str
    why: str = ""
    remedy: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field, self.other)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        left, right = getattr(problem, self.field), getattr(problem, self.other)
        if left == right:
            return None
        return Rejection(
            "mismatch", _because(f"{self.field} is {left} but {self.other} is {right}", self.why), self.remedy
        )


@dataclass(frozen=True)
class Anything:
    """The kernel supports every value of these facets that the op's contract allows."""

    fields: tuple[str, ...]

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return None


def anything(*fields: str) -> Anything:
    """State that the kernel has no limit on these facets; a record must mention every structural facet."""
    return Anything(fields)


@dataclass(frozen=True)
class Rule:
    """A limit that needs code: a function of the problem that returns a reason or None.

    Args:
        reads: the facets that `check` reads.
        check: takes the problem; returns the reason against it as a sentence, or None.
        code: stable code of the rejection.
        remedy: command or setting that helps; empty if there is none.
    """

    reads: tuple[str, ...]
    check: Callable[[Any], str | None]
    code: str = "rule"
    remedy: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        return self.reads

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        reason = self.check(problem)
        return None if reason is None else Rejection(self.code, reason, self.remedy)


@dataclass(frozen=True)
class Package(Wanted):
    """A package that must be installed in a supported version (see `probes.package`)."""

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return machine.package(self).rejection


@dataclass(frozen=True)
class Takes:
    """A library function that must accept the arguments which the adapter passes (see `probes.signature`)."""

    call: Call
    remedy: str = ""

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return machine.ask(self, self._asked).rejection

    def _asked(self) -> Finding:
        from kernelhub.probes.signature import takes  # which the records bring; to import an op takes less without

        return takes(self.call, remedy=self.remedy)


@dataclass(frozen=True)
class Compiled:
    """A compiled library that must have a file for the problem's device. `Package` rejects a missing package."""

    library: Library

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        capability = problem.device.capability
        key = ("library", self.library, self.library.patterns(capability))
        finding = machine.ask(key, lambda: find_library(self.library, capability))
        return None if finding.code == "package_missing" else finding.rejection


@dataclass(frozen=True)
class TorchBuilt:
    """torch must be built for this CUDA version or a newer one, and have at least this version if one is given."""

    cuda: str
    at_least: str = ""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return _torch_rejection(machine.torch_for(problem.device), self.cuda, self.at_least)


@functools.lru_cache(maxsize=256)
def _torch_rejection(build: TorchBuild, cuda: str, at_least: str) -> Rejection | None:
    if build.cuda is not None and fits(build.cuda, f">={cuda}") and fits(build.version, f">={at_least or 0}"):
        return None
    needed = f"{at_least} for CUDA {cuda}" if at_least else f"CUDA {cuda}"
    release = f'pip install "torch>={at_least}"' if at_least else "install a torch"
    return Rejection("package_version", f"{build}, {needed} is needed", f"{release}, built for CUDA {cuda} or newer")


def _because(fact: str, why: str) -> str:
    return f"{fact} ({why})" if why else fact
