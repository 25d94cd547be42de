"""The contract cases of an op for one kernel: for tests of kernels inside and outside of kernelhub.

    class TestMerge(kernelhub.testing.OpContract):
        op, kernel = "merge_attention_states", "mykernels.merge"

pytest then runs one test for each case of the op that the kernel's record supports. Without pytest:

    for case in kernelhub.testing.cases("merge_attention_states", kernel="mykernels.merge"):
        case.check()

The cases are those of `kernelhub verify` (`cases.py` of each op). A test leaves no record: it trusts and quarantines no
kernel.
"""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError, KernelUnavailable
from kernelhub.evidence.call import OutOfMemory, Unavailable
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.checks import DeviceUnusable, Subject
from kernelhub.evidence.verify import device_here
from kernelhub.ops.case import Case

__all__ = ["KernelCase", "OpContract", "WrongResult", "cases", "repair_interpreter"]


class WrongResult(AssertionError):
    """A kernel failed a case.

    Attributes:
        code: what is wrong, as of `kernelhub verify`: ``"wrong_numbers"``, ``"strides"``, ``"past_output"``, ...
    """

    def __init__(self, code: str, text: str) -> None:
        self.code = code
        super().__init__(text)

    def __reduce__(self) -> tuple[type[WrongResult], tuple[str, str]]:
        return WrongResult, (self.code, str(self))


@dataclass(frozen=True)
class KernelCase:
    """One case of an op, for one kernel.

    Attributes:
        op: name of the op.
        kernel: name of the kernel.
        label: what is unusual about the call.
        problem: formats and features of the call.
        device: where it runs.
        elements: of the largest tensor of the call.
    """

    op: str
    kernel: str
    label: str
    problem: tuple[str, ...]
    device: str
    elements: int

    def __str__(self) -> str:
        return self.label

    @property
    def command(self) -> str:
        """The shell command that runs this case alone."""
        options = {"--backend": self.kernel, "--device": self.device, "--case": self.label}
        return shlex.join(("kernelhub", "verify", self.op, *(word for pair in options.items() for word in pair)))

    def check(self) -> None:
        """Call the kernel with the case, and compare the result with the reference, within the op's tolerance.

        Outputs are poisoned with NaN and guarded. A case may repeat the call: with strided operands, without `out`, in
        place, with other values in the same memory, with packed weights.

        Raises:
            WrongResult: the result is wrong, or the kernel raised. The text says where it is wrong, what was expected,
                and the command that runs the case again.
            KernelUnavailable: the kernel cannot be loaded, or its record does not support the case.
            MemoryError: the case does not fit into memory.
        """
        subject = _subject(self.op, self.kernel, self.device)
        try:
            found = subject.check(_cases(self.op)[self.label])
        except Unavailable as error:
            raise KernelUnavailable(f"{self.kernel} cannot run {self.op}: {error}") from error
        except OutOfMemory as error:
            raise MemoryError(f"{self.op}, {self.label}: {error}") from error
        except DeviceUnusable as error:
            found = error.check
        if isinstance(found, str):
            raise KernelUnavailable(f"{self.kernel} does not support {self.op}, {self.label}: {found}")
        if found.code != "ok":
            text = f"{self.kernel} failed {self.op}, {self.label}: {found.code}: {found.figures}"
            raise WrongResult(found.code, f"{text}\nrun this case again: {self.command}")


class OpContract:
    """Base of a pytest class that runs the cases of an op with one kernel.

    Attributes:
        op: name of the op; the subclass sets it.
        kernel: name of the kernel; the subclass sets it.
        device: where it runs, ``"cuda"``, ``"cuda:1"`` or ``"cpu"``; by default the first GPU, else the CPU.
        quick: run only the few cases of ``kernelhub verify --quick``.
        most_elements: leave out cases with larger tensors, for kernels that Triton interprets; None for no limit.

    Example:
        >>> import kernelhub.testing
        >>> class TestMerge(kernelhub.testing.OpContract):
        ...     op, kernel = "merge_attention_states", "torch.merge"
    """

    op: ClassVar[str]
    kernel: ClassVar[str]
    device: ClassVar[str | None] = None
    quick: ClassVar[bool] = False
    most_elements: ClassVar[int | None] = None

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        """The cases to run.

        Raises:
            ConfigurationError, KernelUnavailable: as of `cases`.
        """
        most = cls.most_elements
        found = cases(cls.op, kernel=cls.kernel, device=cls.device, quick=cls.quick)
        return [case for case in found if most is None or case.elements <= most]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each case; one skipped test if the kernel cannot run on this machine."""
        if "case" not in metafunc.fixturenames:
            return
        import pytest

        try:
            found: list[Any] = list(self.accepted_cases())
        except KernelUnavailable as error:
            found = [pytest.param(None, id="unavailable", marks=pytest.mark.skip(reason=str(error)))]
        metafunc.parametrize("case", found, ids=lambda case: None if case is None else str(case))

    def test_case(self, case: KernelCase) -> None:
        """The kernel passes the case."""
        case.check()


def cases(
    op: str, *, kernel: str, device: torch.device | str | None = None, quick: bool = False
) -> tuple[KernelCase, ...]:
    """The cases of an op that a kernel's record supports.

    Args:
        op: name of the op.
        kernel: name of the kernel.
        device: where it runs: ``"cuda"``, ``"cuda:1"`` or ``"cpu"``; by default the first GPU, else the CPU.
        quick: only the few cases of ``kernelhub verify --quick``.

    Raises:
        ConfigurationError: there is no such op, kernel or device.
        KernelUnavailable: the kernel supports no case on this machine; the text has the first reason.

    Example:
        >>> import kernelhub.testing
        >>> case = kernelhub.testing.cases("merge_attention_states", kernel="torch.merge", device="cpu", quick=True)[0]
        >>> case.label
        'bfloat16'
        >>> case.check()
    """
    where = str(device_here(device))
    found, why = _supported(op, kernel, where, HUB.generation)
    if not found:
        raise KernelUnavailable(f"{kernel} supports no case of {op} on {where}: {why}")
    return tuple(case for case in found if not quick or _cases(op)[case.label].quick)


def repair_interpreter() -> None:
    """Correct Triton's interpreter for bfloat16 and float8, for kernels that are tested without a GPU.

    Call it before the first kernel is interpreted (`TRITON_INTERPRET=1`). Without it the interpreter truncates where a
    GPU rounds to nearest even, and so reports wrong numbers of right kernels. It does nothing where the interpreter is
    off.
    """
    from kernelhub.backends.triton.interpreter import repair

    repair()


@functools.lru_cache(maxsize=512)
def _supported(op: str, kernel: str, device: str, generation: int) -> tuple[tuple[KernelCase, ...], str]:
    """The cases that a record supports, and the first reason against one that it does not."""
    subject = _subject(op, kernel, device)
    found, why, claims = [], "", {}
    for label, problem, elements in _calls(op, device):
        if problem not in claims:
            claims[problem] = subject.claims_of(_selection(op, problem, generation))
        claim = claims[problem]
        if claim.holds:
            found.append(KernelCase(op, kernel, label, tuple(claim.problem.split()), device, elements))
        why = why or claim.why
    return tuple(found), why


@functools.lru_cache(maxsize=4096)
def _selection(op: str, problem: Any, generation: int) -> Selection[Any]:
    """One for all kernels of the op."""
    return HUB.select_as_called(op, problem, None)


@functools.lru_cache(maxsize=64)
def _calls(op: str, device: str) -> tuple[tuple[str, Any, int], ...]:
    """Label, problem and elements of the largest tensor of each case; making the tensors takes the most time."""
    found = []
    for case in _cases(op).values():
        arguments = case.make(torch.device(device))
        largest = max(tensor.numel() for value in arguments.values() for tensor in _tensors(value))
        found.append((case.label, HUB.function(op).explain(**arguments).problem, largest))
    return tuple(found)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [item for item in value if isinstance(item, Tensor)]
    return [value] if isinstance(value, Tensor) else []


def _subject(op: str, kernel: str, device: str) -> Subject:
    function = HUB.function(op)
    known: dict[str, Kernel] = {item.name: item for item in HUB.registry.candidates(op).kernels}
    if kernel not in known:
        raise ConfigurationError(
            f"{op} has no kernel {kernel!r}{did_you_mean(kernel, known)}; it has {', '.join(sorted(known))}"
        )
    return Subject(function, known[kernel], CASES[op], torch.device(device))


@functools.cache
def _cases(op: str) -> dict[str, Case]:
    return {case.label: case for case in CASES[op].cases()}
