"""Check of one case of one kernel against the reference, also under variations that must not change the result.

The op's tolerance judges the result; a code identifies each kind of fault.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.dispatch.api import use
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.op import OpFunction
from kernelhub.dispatch.problem import feature_name
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.standing import OPT_IN, UNTRUSTED
from kernelhub.errors import InvalidArgument, KernelUnavailable, NoKernel
from kernelhub.evidence.call import Expectations, Failed, GuardedCall, JudgedResults, OutOfMemory, Unavailable, why
from kernelhub.evidence.poison import apart, copied, in_wider, kind_of_error, overwrite, same
from kernelhub.evidence.results import Check
from kernelhub.evidence.serving import other_class
from kernelhub.ops.case import Arguments, Case, Make, OpCases, Packing, each

NOT_REPRESENTED = "its format cannot represent this weight"  # prefix of `Subject.check` for a layout that rounds
_IGNORED = 0.25  # below this fraction of the feature's effect on the reference, the kernel ignores the feature


class DeviceUnusable(Exception):
    """The kernel's error left the device unusable for this process."""

    def __init__(self, check: Check) -> None:
        self.check = check
        super().__init__(check.figures)


@dataclass(frozen=True)
class Subject:
    """A kernel under check.

    Attributes:
        function: its op.
        kernel: its record.
        cases: the op's cases.
        device: its device.
        expectations: expected results of the calls of one case.
        overruled: codes of further rejections that do not stop the check, for a kernel that a test forces.
    """

    function: OpFunction[Any, Any, Any]
    kernel: Kernel
    cases: OpCases
    device: torch.device
    expectations: Expectations = field(default_factory=Expectations, repr=False, compare=False)
    overruled: frozenset[str] = frozenset()

    def claims(self, arguments: Arguments) -> _Claim:
        """Whether the kernel's record supports a call, ignoring quarantine."""
        return self.claims_of(self.function.explain(**arguments))

    def claims_of(self, selection: Selection[Any]) -> _Claim:
        """The same, of the selection for a call."""
        rejections = selection.against(self.kernel.name)  # `decisions` evaluates the reasons against all others too
        codes = {rejection.code for rejection in rejections}
        limits = {"quarantined", *self.overruled}
        allowed = {UNTRUSTED, OPT_IN, *limits}
        if self.kernel.needs_packing and self.kernel.packs_to:
            allowed.add("layout")
        if not rejections and selection.explicit:
            decision = next(item for item in selection.decisions if item.kernel == self.kernel.name)
            if not decision.accepted:
                return _Claim(False, "", why=f"{decision.code}: {decision.reason}")
        if codes <= allowed:
            schema = self.function.op.contract.schema
            return _Claim(True, class_of(schema, selection.problem), not codes.isdisjoint(limits))
        return _Claim(False, "", why=f"{rejections[0].code}: {rejections[0].reason}")

    def check(self, case: Case) -> Check | str:
        """Check one case; a sentence if the kernel does not claim it.

        Raises:
            Unavailable: it cannot be loaded.
            OutOfMemory: the case does not fit.
            DeviceUnusable: nothing can run after this.
        """
        try:
            return replace(self, expectations=Expectations())._check(case)
        except (torch.OutOfMemoryError, MemoryError) as error:  # outside of the kernel: tensors, the reference
            raise OutOfMemory(str(error)) from error

    def _check(self, case: Case) -> Check | str:
        arguments = case.make(self.device)
        selection = self.function.explain(**arguments)
        if other := other_class(case, selection.problem):
            raise Unavailable(other)
        claim = self.claims_of(selection)
        if not claim.holds:
            return claim.why

        def found(code: str, ratio: float = 0.0, figures: str = "") -> Check:
            return Check(case.label, code, claim.problem, ratio, figures, case.tokens)

        with self._allowed(claim):
            try:
                answer = self._ask(arguments)
                wrong = self._wrong_with(case, arguments, answer)
            except _NotHeld as error:
                return str(error)
            except Failed as failure:
                check = found(failure.code, math.inf, str(failure))
                if self._lost():
                    raise DeviceUnusable(check) from failure
                return check
        if wrong is not None:
            code, figures = wrong
            return found(code, answer.judgement.ratio, figures)
        return found("ok", answer.judgement.ratio)

    def _wrong_with(self, case: Case, arguments: Arguments, answer: JudgedResults) -> tuple[str, str] | None:
        """The fault of a result or of the varied calls: a code with figures, or None."""
        results, judgement = answer
        if case.without is not None:
            ignored = self._ignores(case, answer, case.without)
            if ignored is not None:
                return ignored
        if not judgement.ok:
            return kind_of_error(results, judgement), judgement.figures
        if case.repeats:
            otherwise = self._differs_otherwise(arguments, results)
            if otherwise is not None:
                return otherwise
        if case.packs and self.kernel.packs_to:
            return self._packs_badly(arguments)
        return None

    def _differs_otherwise(self, arguments: Arguments, results: dict[str, Tensor]) -> tuple[str, str] | None:
        """The fault when the call is repeated, and made in other memory."""
        if self.kernel.deterministic:
            again = self._ask(arguments).results
            differ = [name for name, tensor in results.items() if not same(again[name], tensor)]
            if differ:
                return "other_bits", f"{' and '.join(differ)} of the same call made twice differ"
        for code, where, ask in (
            ("strides", "where operands and results are parts of wider tensors", self._in_wider),
            ("own_result", "where it allocates the result itself", self._in_its_own),
            ("in_place", "where the result takes the place of an operand", self._in_place),
            ("stale", "the second time, with other values in the same memory", self._later),
        ):
            try:
                answer = ask(arguments)
            except Failed as failure:
                raise Failed(failure.code, f"{failure}, {where}") from failure
            if answer is not None and not answer.judgement.ok:
                return code, f"{where}: {answer.judgement.figures}"
        return None

    def _in_wider(self, arguments: Arguments) -> JudgedResults | None:
        """The result of a call with operands and destinations in wider memory; None if unsupported."""
        whole = {name: value for name, value in arguments.items() if name in self.cases.whole}
        wide = each(in_wider, arguments) | whole
        if not self.claims(wide).holds:
            return None
        if self.kernel.needs_packing:
            return self._ask(wide, apart=True)
        return self._ask(arguments, given=copied(wide), apart=True)

    def _in_its_own(self, arguments: Arguments) -> JudgedResults | None:
        return self._ask(arguments, own=True) if self.cases.destinations(arguments) else None

    def _in_place(self, arguments: Arguments) -> JudgedResults | None:
        if self.kernel.needs_packing:
            return None
        made = self.cases.in_place(copied(arguments))
        if made is None or not self.claims(made[0] | made[1]).holds:
            return None
        return self._ask(arguments, given=made[0], places=made[1])

    def _later(self, arguments: Arguments) -> JudgedResults | None:
        """The second of two calls in the same memory; packed weights do not change, and have a check of their own."""
        later = self.cases.later(arguments)
        if self.kernel.needs_packing or not self.claims(later).holds:
            return None
        memory = copied(arguments)
        self._ask(arguments, given=memory)
        overwrite(memory, later)
        return self._ask(later, given=memory)

    def _ignores(self, case: Case, answer: JudgedResults, without: Make) -> tuple[str, str] | None:
        """Whether the result equals that of the call without the feature, although the reference's does not."""
        plain = without(self.device)
        claim = self.claims(plain)
        if not claim.holds:
            return None
        with self._allowed(claim):
            other = self._ask(plain)
        if not other.judgement.ok:
            return None  # another case reports wrong numbers without the feature
        moved = apart(answer.results, other.results)
        wanted = apart(answer.judgement.want, other.judgement.want)
        share = 0.0 if answer.judgement.ok else _IGNORED
        names = [name for name in moved if name in wanted]
        if not any(wanted[name] > 0 for name in names) or any(moved[name] > share * wanted[name] for name in names):
            return None
        figures = f"with {case.feature} it gives the same result as without; {answer.judgement.figures}"
        return "feature_ignored", figures

    def _packs_badly(self, arguments: Arguments) -> tuple[str, str] | None:
        """Whether a packed weight is lost or misread."""
        made = self._packed(arguments)
        if made is None:
            return None
        packed, weights = made
        for weight, originals in weights:
            for place, (got, want) in enumerate(zip(weight.unpack(), originals, strict=True)):
                if (got is None) != (want is None) or (got is not None and want is not None and not same(got, want)):
                    return "packing", f"tensor {place} of the weight does not come back from {weight.layout} as it was"
        judgement = self._ask(arguments, packed=packed).judgement
        return None if judgement.ok else ("packing", f"the packed weight gives another result: {judgement.figures}")

    def _packed(self, arguments: Arguments) -> tuple[Arguments, tuple[Packing, ...]] | None:
        try:
            plan = self.function.prepare(**arguments, backend=self.kernel.name)
            return self.cases.pack(plan, arguments)
        except (NoKernel, KernelUnavailable) as error:
            raise Unavailable(why(error, self.kernel.name)) from error
        except InvalidArgument as error:
            raise _NotHeld(f"{NOT_REPRESENTED}: {error}") from error
        except SystemExit as error:
            raise Failed("crashed", f"packing raised SystemExit({error.code!r})") from error
        except Exception as error:
            raise Failed("packing", f"packing raised {type(error).__name__}: {error}") from error

    def _ask(
        self,
        arguments: Arguments,
        *,
        packed: Arguments | None = None,
        given: Arguments | None = None,
        apart: bool = False,
        own: bool = False,
        places: Mapping[str, Tensor] | None = None,
    ) -> JudgedResults:
        """Call the kernel, with its weight packed if it supports no other layout."""
        if packed is None and given is None and self.kernel.needs_packing:
            made = self._packed(arguments)
            packed = None if made is None else made[0]
        call = GuardedCall(self.function, self.kernel, self.cases, self.device, self.expectations)
        return call(arguments, packed=packed, given=given, apart=apart, own=own, places=places)

    @contextlib.contextmanager
    def _allowed(self, claim: _Claim) -> Iterator[None]:
        """Allow a quarantined or forced kernel to run; its own limits were checked before."""
        with use(unsafe=True) if claim.forced else contextlib.nullcontext():
            yield

    def _lost(self) -> bool:
        """Whether a device error is permanent: every later call raises, or the device no longer responds."""
        if (self.device.index or 0 if self.device.type == "cuda" else -1) in GATE.lost:
            return True
        if self.device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize(self.device)
            torch.zeros(1, device=self.device, dtype=torch.float32).item()
        except RuntimeError:
            return True
        return False


class _NotHeld(Exception):
    """The kernel's layout cannot represent the values of a weight, by its own report."""


class _Claim(NamedTuple):
    """Whether a kernel supports a call, its problem class, and whether the check must force it."""

    holds: bool
    problem: str
    forced: bool = False
    why: str = ""


def class_of(schema: Any, problem: Any) -> str:
    """The formats of a problem and the features it requires, without sizes."""
    formats = [f"{name}={getattr(problem, name)}" for name in schema.facets if isinstance(getattr(problem, name), str)]
    plain = {feature_name(name, getattr(problem, name)) for name, facet in schema.facets.items() if facet.semantic}
    return " ".join(dict.fromkeys([*formats, *(name for name in schema.features_used(problem) if name in plain)]))
