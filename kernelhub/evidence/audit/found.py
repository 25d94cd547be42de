"""A wrong call, and the quarantine of its kernel on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.selection import Selection
from kernelhub.evidence.audit.comparing import Comparison
from kernelhub.evidence.checks import class_of
from kernelhub.evidence.quarantine import keep, kept_of, now
from kernelhub.evidence.results import CODES, IN_SERVICE, Check, Result
from kernelhub.ops.case import Arguments
from kernelhub.probes.device import DeviceFacts


@dataclass(frozen=True)
class WrongCall:
    """A call whose numbers were wrong.

    Attributes:
        selection: selection of the kernel.
        arguments: copies from before the launch.
        results: copies of the kernel's results.
        comparison: the comparison that failed.
    """

    selection: Selection[Any]
    arguments: Arguments
    results: dict[str, Tensor]
    comparison: Comparison

    @property
    def kernel(self) -> Kernel:
        assert self.selection.kernel is not None
        return self.selection.kernel

    @property
    def problem_class(self) -> str:
        """The problem class, which is reported once."""
        return class_of(HUB.registry.contracts[self.selection.op].schema, self.selection.problem)

    @property
    def figures(self) -> str:
        """What is wrong, as a sentence."""
        code = self.comparison.code
        return f"{CODES.get(code, code)}: {self.comparison.figures}; operands: {_forms(self.arguments)}"


def quarantine(found: WrongCall) -> str:
    """Store that a kernel was wrong, with its other results; returns why it is not on disk, or an empty text."""
    kernel, device = found.kernel, found.selection.problem.device
    before = kept_of(kernel, device)
    label = label_of(found.problem_class)
    known = before.result.checks if before is not None else ()
    check = Check(label, IN_SERVICE, found.problem_class, found.comparison.ratio, found.figures)
    checks = (*(one for one in known if one.case != label), check)
    result = before.result if before is not None else Result(kernel.op, kernel.name)
    return keep(kernel, device, replace(result, checks=checks), now())


def lift(kernel: Kernel, device: DeviceFacts, problem_class: str) -> bool:
    """Remove the stored result of a class, since the call is right now; returns whether there was one."""
    before, label = kept_of(kernel, device), label_of(problem_class)
    if before is None or not any(check.case == label for check in before.result.checks):
        return False
    checks = tuple(check for check in before.result.checks if check.case != label)
    keep(kernel, device, replace(before.result, checks=checks), now())
    HUB.forget_evidence()
    return True


def label_of(problem_class: str) -> str:
    """The name of the check of a class."""
    return f"in service: {problem_class}"


def _forms(arguments: Arguments) -> str:
    """Dtypes and shapes of the tensors of a call."""
    return ", ".join(
        f"{name} {str(value.dtype)[6:]}{list(value.shape)}"
        for name, value in arguments.items()
        if isinstance(value, Tensor)
    )
