"""`Selection`: the selected kernel, the reason, and one `Decision` for every kernel of the op.

`kernelhub.explain` and plans return selections. `dispatch.select` makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol

from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.problem import WEIGHT_LAYOUT, ProblemT, as_dict

SELECTED, SUPPORTED, REJECTED = "selected", "supported", "rejected"


class Decision(NamedTuple):
    """The result of a selection for one kernel.

    Attributes:
        kernel: name of the kernel.
        accepted: whether the kernel supports the problem under this policy.
        code: ``"selected"``, ``"supported"``, ``"not_requested"``, or the stable code of the first rejection.
        reason: a sentence.
        remedy: command or setting that changes the result; empty if there is none on this machine.
        rejections: every reason against the kernel; the first gives `code`.
        ahead: whether the kernel would be selected if it were verified on this machine.
    """

    kernel: str
    accepted: bool
    code: str
    reason: str
    remedy: str = ""
    rejections: tuple[Rejection, ...] = ()
    ahead: bool = False

    @property
    def state(self) -> str:
        """``"selected"``, ``"supported"`` (but ranked below the selected kernel) or ``"rejected"``."""
        return SELECTED if self.code == SELECTED else SUPPORTED if self.accepted else REJECTED

    @property
    def hint(self) -> str:
        """Kernel, reason and remedy in one line."""
        return f"{self.kernel} {self.reason}: {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``"also"`` has the rejections after the first."""
        plain: dict[str, Any] = {
            "kernel": self.kernel,
            "accepted": self.accepted,
            "code": self.code,
            "reason": self.reason,
            "remedy": self.remedy,
        }
        if self.ahead:
            plain["ahead"] = True
        if len(self.rejections) > 1:
            plain["also"] = [
                {"code": item.code, "reason": item.reason, "remedy": item.remedy} for item in self.rejections[1:]
            ]
        return plain


class Decide(Protocol):
    """What a selection keeps of its inputs."""

    def __call__(self) -> tuple[Decision, ...]: ...

    def against(self, name: str) -> tuple[Rejection, ...]: ...


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Selection(Generic[ProblemT]):
    """The result of selecting a kernel for one problem. `str` gives the full explanation, `to_dict` plain values.

    Attributes:
        op: name of the op.
        problem: the problem: every facet of the call.
        kernel: record of the selected kernel; None if no kernel may run.
        source: what decided, a stable word: ``"force"`` (KERNELHUB_FORCE), ``"kwarg"`` (``backend=``), ``"context"``
            (`kernelhub.use`), ``"configure"``, ``"ranks"`` (an agreement of ranks), ``"lock"`` (a lock file),
            ``"environment"``, ``"file"`` (the config file), ``"engine"`` (a variable of another project), ``"tuned"``
            (measured by `kernelhub.tune`), ``"order"`` (an order line), ``"band"`` (no line has the kernel).
        because: the reason as a sentence, with its evidence.
        explicit: whether a user, a lock file or an agreement of ranks requested the kernel; there is no fallback then.
        overruled: weaker requests for other kernels, as sentences.
        decide: function that computes `decisions` from the inputs of the selection.
        assumed: what the selection assumes about a simulated device or machine, as a sentence; else empty.
        parts: the selections of the ops that the kernel is made of; empty for a kernel of its own.
    """

    op: str
    problem: ProblemT
    kernel: Kernel | None
    source: str
    because: str
    explicit: bool
    overruled: tuple[str, ...]
    decide: Decide
    assumed: str = ""
    parts: tuple[Selection[Any], ...] = ()

    def __init__(
        self,
        op: str,
        problem: ProblemT,
        kernel: Kernel | None,
        source: str,
        because: str,
        explicit: bool,
        overruled: tuple[str, ...],
        decide: Decide,
        assumed: str = "",
        parts: tuple[Selection[Any], ...] = (),
    ) -> None:
        # The generated __init__ of a frozen dataclass makes one call for each attribute, at every selection.
        self.__dict__.update(
            op=op,
            problem=problem,
            kernel=kernel,
            source=source,
            because=because,
            explicit=explicit,
            overruled=overruled,
            decide=decide,
            assumed=assumed,
            parts=parts,
            _calls=tuple,
        )

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """One `Decision` for every registered kernel of the op.

        The order is: the selected kernel; supported ones, best first; rejected ones that were requested; those that
        would be selected if they were verified on this machine, best first; other rejected ones by name. Selection
        stops at the first supported kernel, so that the rest is computed at the first access, with the facts at the
        time of the selection.
        """
        return self.decide()

    def against(self, kernel: str) -> tuple[Rejection, ...]:
        """Every reason against one kernel; none if it is supported. The others are not evaluated."""
        return self.decide.against(kernel)

    @cached_property
    def calls(self) -> tuple[Selection[Any], ...]:
        """The selections of the ops that the kernel calls by their functions, in order; empty for others.

        Where a call decides, by its number of rows, there is one for each case. They are computed at the first access.
        """
        made: tuple[Selection[Any], ...] = self.__dict__["_calls"]()
        return made

    def calling(self, calls: Callable[[], tuple[Selection[Any], ...]]) -> None:
        """Let `calls` be computed by this function."""
        self.__dict__["_calls"] = calls

    @property
    def faster(self) -> tuple[Decision, ...]:
        """Kernels that are expected to be faster and would be selected once verified on this machine, best first."""
        return tuple(decision for decision in self.decisions if decision.ahead)

    @property
    def selected(self) -> str | None:
        """Name of the selected kernel; None if no kernel may run."""
        return self.kernel.name if self.kernel else None

    @property
    def steps(self) -> tuple[str, ...]:
        """The ops that the kernel calls and what it converts between them; empty for a kernel of its own."""
        return self.kernel.steps if self.kernel else ()

    @property
    def weights(self) -> str | None:
        """The layout of the weights and those that the kernel reads, as a sentence; None for ops without packing."""
        given = getattr(self.problem, WEIGHT_LAYOUT, None)
        if given is None or self.kernel is None:
            return None
        reads = f"weights: given as {given}; {self.kernel.name} reads {' or '.join(self.kernel.layouts)}"
        if not self.kernel.packs_to:
            return f"{reads}; no repacking needed"
        need = "required" if self.kernel.needs_packing else "optional"
        return f"{reads}; packing to {self.kernel.packs_to} is {need}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON.

        The keys are ``op``, ``problem``, ``selected``, ``source``, ``because`` and ``decisions``, and where they apply
        ``assumed``, ``steps``, ``parts``, ``overruled`` and ``weights``.
        """
        weights: dict[str, Any] = {}
        if self.kernel is not None and hasattr(self.problem, WEIGHT_LAYOUT):
            weights["weights"] = {
                "layout": getattr(self.problem, WEIGHT_LAYOUT),
                "reads": list(self.kernel.layouts),
                "packs_to": self.kernel.packs_to or None,
                "needs_packing": self.kernel.needs_packing,
            }
        return {
            "op": self.op,
            "problem": as_dict(self.problem),
            "selected": self.selected,
            "source": self.source,
            "because": self.because,
            **({"assumed": self.assumed} if self.assumed else {}),
            **({"steps": list(self.steps)} if self.steps else {}),
            **({"parts": [part.to_dict() for part in self.parts or self.calls]} if self.parts or self.calls else {}),
            **({"overruled": list(self.overruled)} if self.overruled else {}),
            **weights,
            "decisions": [decision.to_dict() for decision in self.decisions],
        }

    def __str__(self) -> str:
        who = f"{self.selected}, decided by {self.source}" if self.selected else f"no kernel: {self.because}"
        lines = [f"{self.op} on {self.problem.device}: {who}", *([f"  {self.weights}"] if self.weights else [])]
        lines += [f"  steps: {'; '.join(self.steps)}"] if self.steps else []
        lines += [f"  {part.op} by {part.selected}: {part.because}" for part in self.parts]
        for step, kernel, part in self.called:
            rejected = [f"{one.kernel} ({one.code})" for one in part.decisions if not one.accepted]
            lines += [f"  {step} by {kernel}; rejected: {', '.join(rejected)}" if rejected else f"  {step} by {kernel}"]
        lines += [f"  assumed: {self.assumed}"] if self.assumed else []
        lines += [f"  {sentence}" for sentence in self.overruled]
        lines += [f"  faster: {self.faster[0].hint}"] if self.faster else []
        width = max((len(decision.kernel) for decision in self.decisions), default=0)
        for decision in self.decisions:
            mark = "*" if decision.code == "selected" else "+" if decision.accepted else "-"
            lines.append(f"  {mark} {decision.kernel:<{width}}  {_sentence(decision)}")
            if decision.remedy and not decision.accepted:
                lines.append(f"    {'':<{width}}  remedy: {decision.remedy}")
        return "\n".join(lines)

    @property
    def called(self) -> list[tuple[str, str, Selection[Any]]]:
        """The op of each of `calls`, the kernel that runs, with the cases in which it does, and such a selection."""
        cases: dict[tuple[str, str | None], tuple[list[str], Selection[Any]]] = {}
        for part in self.calls:
            of_op = [other for other in self.calls if other.op == part.op]
            several = len({other.selected for other in of_op}) > 1
            found, _ = cases.setdefault((part.op, part.selected), ([], part))
            found += [_differing(part, of_op)] if several else []
        return [
            (op, f"{name or 'no kernel'} ({'; '.join(of)})" if of else f"{name or 'no kernel'}", part)
            for (op, name), (of, part) in cases.items()
        ]

    def __repr__(self) -> str:
        hidden = ("decide", "decisions", "calls", "_calls")
        shown = {name: value for name, value in vars(self).items() if name not in hidden}
        text = ", ".join(f"{name}={value!r}" for name, value in {**shown, "decisions": self.decisions}.items())
        return f"Selection({text})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        return self._fields == other._fields and self.decisions == other.decisions and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self._fields)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle has the decisions, and not the inputs that they are computed from."""
        return _unpickled, ((*self._fields, _Decided(self.decisions), self.assumed, self.parts), self.calls)

    @property
    def _fields(self) -> tuple[Any, ...]:
        return self.op, self.problem, self.kernel, self.source, self.because, self.explicit, self.overruled


def _unpickled(fields: tuple[Any, ...], calls: tuple[Selection[Any], ...]) -> Selection[Any]:
    made: Selection[Any] = Selection(*fields)
    made.calling(functools.partial(tuple, calls))
    return made


def _differing(part: Selection[Any], others: Sequence[Selection[Any]]) -> str:
    """The facets of a selection in which it differs from the others of its op."""
    names = [name for name in vars(part.problem) if len({getattr(other.problem, name) for other in others}) > 1]
    return ", ".join(f"{name} {getattr(part.problem, name)}" for name in names)


def _sentence(decision: Decision) -> str:
    """The reason with its code, unless it starts with the code."""
    return decision.reason if decision.reason.startswith(decision.code) else f"{decision.code}: {decision.reason}"


class _Decided(NamedTuple):
    """A `Selection.decide` that returns known decisions."""

    decisions: tuple[Decision, ...]

    def __call__(self) -> tuple[Decision, ...]:
        return self.decisions

    def against(self, name: str) -> tuple[Rejection, ...]:
        return next(decision.rejections for decision in self.decisions if decision.kernel == name)
