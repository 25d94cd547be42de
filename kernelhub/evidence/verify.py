"""`kernelhub.verify`: check every kernel that supports a problem against the op's reference on this device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kernelhub.dispatch.explain import contract_of, problem_from
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.op import OpFunction
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.dispatch.standing import OPT_IN, UNTRUSTED
from kernelhub.errors import ConfigurationError
from kernelhub.evidence.apart import Child, can_go_apart, goes_apart
from kernelhub.evidence.budgets import FULL_BUDGET_S, QUICK_BUDGET_S
from kernelhub.evidence.case_run import CaseRun, quick_run
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.checks import Subject
from kernelhub.evidence.earn import BUDGET_S, earn
from kernelhub.evidence.here import Here
from kernelhub.evidence.quarantine import kept_of
from kernelhub.evidence.results import Result, Verification
from kernelhub.ops.models.calls import need_of
from kernelhub.probes.device import facts

Progress = Callable[[str, int, int], None]


def verify(
    op: OpFunction[Any, Any, Any] | str | None = None,
    *,
    backend: str | Sequence[str] | None = None,
    device: torch.device | str | None = None,
    quick: bool = False,
    budget_s: float | None = None,
    progress: Progress | None = None,
    apart: bool | None = None,
    facets: Mapping[str, Any] | None = None,
    token_counts: Sequence[int] | None = None,
    case: str | None = None,
) -> Verification:
    """Check kernels against the references of their ops on this machine, and store the results.

    Each kernel runs the cases of its op that its record supports: outputs poisoned with NaN, workspaces and outputs
    between guards, token counts of 0, 1, odd ones and one past a tile, tiny and zero scales, each feature toggled,
    weights packed and unpacked. A kernel that fails any case is quarantined: selection rejects it with the code
    ``quarantined``, in this process and in later ones, until it passes.

    No call of a kernel takes longer than KERNELHUB_VERIFY_TIMEOUT_S, including compilation. Kernels of libraries and of
    third parties run in a child process, so that a crash, hang or exit is recorded and ends nothing else; the command
    runs all kernels so. Kernels that are registered at run time, and kernelhub's own, run in a thread of this process.
    A hang there is recorded too (unless the kernel keeps the interpreter's lock), but its thread cannot be ended, and
    on a GPU nothing else is checked in this process. A note is stored before a kernel is launched, so that a kernel
    that ends this process is quarantined in the next one; a warm-up verifies it again, in a child process.

    Args:
        op: one op, or its name; all of them by default.
        backend: backends, kernels or globs; all by default.
        device: ``"cuda"``, ``"cuda:1"`` or ``"cpu"``; by default the first GPU, else the CPU.
        quick: a few cases of each kernel, and those that failed before.
        budget_s: time limit per kernel in seconds; the result counts the cases that are left out. 120 by default, 20 if
            quick. Cases that failed before come first.
        progress: called as each kernel begins, with its name, its position and the number of kernels.
        apart: True to use a child process for kernelhub's own kernels too (a few seconds, and on a GPU a context of its
            own), except for kernels that are registered at run time; False to use none, as for a debugger.
        facets: facets of one problem class of `op`, as of `kernelhub.explain`: kernels are called as in serving, in
            random order and with new values each time. Selection then accepts a right kernel for this class
            (docs/trust.md). All facets count, except token counts.
        token_counts: for `facets`, the token counts of serving, up to the most that a step will have.
        case: the label of one case of `op`, to run only that case.

    Returns:
        One result for each kernel that can be selected on this device. Results are stored below ``evidence`` in the
        cache folder (``KERNELHUB_CACHE_DIR``), keyed by device, driver, versions and the digest of the kernel.

    Raises:
        ConfigurationError: an unknown op, backend, facet, case or device; facets or a case without an op; the
            process is sealed.
        DeviceLost: the device was lost before.

    Example:
        >>> import kernelhub
        >>> found = kernelhub.verify("merge_attention_states", backend="torch", device="cpu", quick=True)
        >>> found.ok, found.results[0].kernel
        (True, 'torch.merge')
    """
    where = device_here(device)
    GATE.check_change("verify")
    GATE.check_device(-1 if where.type == "cpu" else where.index)
    if facets is not None or token_counts is not None:
        return _verify_class(op, backend, where, budget_s, progress, apart, facets or {}, token_counts)
    subjects = list(_subjects(op, backend, where))
    if case is not None:
        _check_label(op, case)
    limit_s = budget_s if budget_s is not None else QUICK_BUDGET_S if quick else FULL_BUDGET_S
    results, lifted, unwritten, lost = [], [], "", ""
    child, here = Child(), Here()
    try:
        for place, subject in enumerate(subjects):
            if progress is not None:
                progress(f"{subject.kernel.op} {subject.kernel.name}", place, len(subjects))
            elsewhere = goes_apart(subject.kernel) if apart is None else apart and can_go_apart(subject.kernel)
            if lost and not elsewhere:
                results.append(Result(subject.kernel.op, subject.kernel.name, why_not=lost))
                continue
            run = CaseRun(subject, quick, limit_s, case)
            result = run.ask(child if elsewhere else here)
            assert result is not None
            unwritten = run.unwritten or unwritten
            results.append(result)
            if run.device_lost and not elsewhere:
                lost = f"{subject.kernel.name} left the device unusable for this process; restart it"
            elif here.hung and where.type != "cpu" and not lost:
                lost = f"{subject.kernel.name} hangs on the device in this process; restart it, or give apart=True"
            if result.checks and run.was_wrong and not result.failures:
                lifted.append((subject.kernel.op, subject.kernel.name))
    finally:
        child.close()
        here.close()
        HUB.forget_evidence()
    return Verification(str(facts(where)), tuple(results), tuple(lifted), unwritten)


def verify_served(kernel: Kernel, device: torch.device, problems: Sequence[Any]) -> Result | None:
    """Check a kernel by the quick cases that concern the problems that it will serve, and store the result."""
    asked_in = Child() if goes_apart(kernel) else Here()
    try:
        return quick_run(kernel, device, problems).ask(asked_in)
    finally:
        asked_in.close()
        HUB.forget_evidence()


def _verify_class(
    op: OpFunction[Any, Any, Any] | str | None,
    backend: str | Sequence[str] | None,
    device: torch.device,
    budget_s: float | None,
    progress: Progress | None,
    apart: bool | None,
    facets: Mapping[str, Any],
    token_counts: Sequence[int] | None,
) -> Verification:
    """Check kernels against the reference on one problem class."""
    if op is None:
        raise ConfigurationError("verify: facets and token_counts belong to one op; give op")
    function = HUB.function(op) if isinstance(op, str) else op
    name = function.op.contract.name
    problem = problem_from(function.op.contract, facts(device), dict(facets))
    need = need_of(name, problem)
    results, lifted, unwritten = [], [], ""
    subjects = [subject for subject in _subjects(op, backend, device) if _takes(function, problem, subject.kernel)]
    with Child() as child:
        for place, subject in enumerate(subjects):
            if progress is not None:
                progress(f"{name} {subject.kernel.name}", place, len(subjects))
            before = kept_of(subject.kernel, facts(device))
            earned = earn(
                subject.kernel, need, device, token_counts, budget_s=budget_s or BUDGET_S, child=child, apart=apart
            )
            results.append(earned.result)
            unwritten = earned.unwritten or unwritten
            after = kept_of(subject.kernel, facts(device))
            if before is not None and before.result.failures and (after is None or not after.result.failures):
                lifted.append((name, subject.kernel.name))
    HUB.forget_evidence()
    return Verification(str(facts(device)), tuple(results), tuple(lifted), unwritten)


def _takes(function: OpFunction[Any, Any, Any], problem: Any, kernel: Kernel) -> bool:
    """Whether a kernel can run a problem class, apart from trust, quarantine, and weights that it packs itself."""
    decision = next(item for item in function.op.select(problem, None).decisions if item.kernel == kernel.name)
    allowed = {"quarantined", UNTRUSTED, OPT_IN} | ({"layout"} if kernel.packs_to else set())
    return decision.accepted or {rejection.code for rejection in decision.rejections} <= allowed


def count(
    op: OpFunction[Any, Any, Any] | str | None = None,
    *,
    backend: str | Sequence[str] | None = None,
    device: torch.device | str | None = None,
) -> int:
    """The number of kernels that `verify` would check, for the same arguments."""
    return sum(1 for _ in _subjects(op, backend, device_here(device)))


def _check_label(op: OpFunction[Any, Any, Any] | str | None, label: str) -> None:
    """Raise for a label that no case of the op has."""
    if op is None:
        raise ConfigurationError("verify: case belongs to one op; give op")
    name = op if isinstance(op, str) else contract_of(op).name
    labels = [case.label for case in CASES[name].cases()]
    if label not in labels:
        raise ConfigurationError(
            f"verify: {name} has no case {label!r}{did_you_mean(label, labels)}; "
            f"its {len(labels)} cases are those of `kernelhub.testing.cases`"
        )


def _subjects(
    op: OpFunction[Any, Any, Any] | str | None, backend: str | Sequence[str] | None, device: torch.device
) -> Iterator[Subject]:
    """The requested kernels that can be selected on a device."""
    _ = HUB.settings
    if op is None:
        names = list(HUB.registry.contracts)
    else:
        names = [HUB.record(op).name if isinstance(op, str) else contract_of(op).name]
    words = (backend,) if isinstance(backend, str) else tuple(backend or ())
    HUB.registry.check_names(words, "backend=")
    for name in names:
        for kernel in HUB.registry.candidates(name).kernels:
            if words and not any(kernel.matches(word) for word in words):
                continue
            if _could_run(kernel, device):
                yield Subject(HUB.function(name), kernel, CASES[name], device)


def _could_run(kernel: Kernel, device: torch.device) -> bool:
    """Whether no rejection of a kernel applies to every problem: device, packages, disabled kernels."""
    problem = _Anywhere(facts(device))
    for constraint in kernel.constraints:
        if set(constraint.fields) <= {"device"}:
            with contextlib.suppress(Exception):  # the kernel's check reports errors of its constraints
                if constraint.reject(problem, HUB.machine) is not None:  # type: ignore[arg-type]
                    return False
    return True


class _Anywhere:
    """A problem that has only a device."""

    def __init__(self, device: Any) -> None:
        self.device = device


def device_here(device: torch.device | str | None) -> torch.device:
    """The device to run on: the named one, else the first GPU, else the CPU.

    Raises:
        ConfigurationError: this machine has no such device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        made = torch.device(device)
    except RuntimeError:
        meant = did_you_mean(device, ("cuda", "cpu"))
        raise ConfigurationError(f"device: unknown device {str(device)!r}{meant}; give cuda, cuda:1 or cpu") from None
    if made.type == "cpu":
        return torch.device("cpu")
    if made.type != "cuda":
        raise ConfigurationError(f"device: {made} is neither a GPU nor the CPU; give cuda, cuda:1 or cpu")
    index, count = made.index or 0, torch.cuda.device_count()
    if index >= count:
        raise ConfigurationError(f"device: there is no {made} here ({count} GPUs); `kernelhub doctor` says why")
    return torch.device("cuda", index)
