"""A selection as users see it: the chosen kernel, who decided, and what was decided about every other one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple

from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.problem import WEIGHT_LAYOUT, ProblemT, as_dict

SELECTED, SUPPORTED, REJECTED = "selected", "supported", "rejected"


class Decision(NamedTuple):
    """What was decided about one kernel.

    Attributes:
        kernel: its name.
        accepted: whether it could run this problem under this policy.
        code: ``"selected"``, ``"supported"``, or the stable code of the first rejection.
        reason: a sentence.
        remedy: what would change the decision; empty if nothing would here.
        rejections: every reason against it, the first of which gave `code`.
        ahead: it would be chosen in place of the one that is, if it were verified on this machine.
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
        """``"selected"``, ``"supported"`` (it could run, and ranks below) or ``"rejected"``."""
        return SELECTED if self.code == SELECTED else SUPPORTED if self.accepted else REJECTED

    @property
    def hint(self) -> str:
        """What would be chosen, why it is not, and the command that changes it, in one line."""
        return f"{self.kernel} {self.reason}: {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
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


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Selection(Generic[ProblemT]):
    """The answer for one problem.

    Attributes:
        op: name of the op.
        problem: what was looked at.
        kernel: the record of the chosen kernel, or None if none may run.
        source: who decided, a stable word: ``"force"``, ``"kwarg"``, ``"context"``, ``"configure"``, ``"ranks"`` (what
            ranks agreed on), ``"lock"`` (a lock file), ``"environment"``, ``"file"``, ``"engine"`` (a variable of
            another project), ``"tuned"`` (measured: `kernelhub.tune`), ``"order"`` (a line of the heuristic),
            ``"band"`` (no line).
        because: the same as a sentence, with its evidence.
        explicit: whether the user asked for it by name; such a choice is never replaced.
        overruled: what was said for other kernels and gave way, as sentences.
        tell: gives `decisions`, out of what the choice was made from.
        assumed: what the answer takes for granted of a machine that is not here, as a sentence; empty for this one.
    """

    op: str
    problem: ProblemT
    kernel: Kernel | None
    source: str
    because: str
    explicit: bool
    overruled: tuple[str, ...]
    tell: Callable[[], tuple[Decision, ...]]
    assumed: str = ""

    def __init__(
        self,
        op: str,
        problem: ProblemT,
        kernel: Kernel | None,
        source: str,
        because: str,
        explicit: bool,
        overruled: tuple[str, ...],
        tell: Callable[[], tuple[Decision, ...]],
        assumed: str = "",
    ) -> None:
        # What a frozen dataclass writes takes a call for each attribute, at every choice.
        self.__dict__.update(
            op=op,
            problem=problem,
            kernel=kernel,
            source=source,
            because=because,
            explicit=explicit,
            overruled=overruled,
            tell=tell,
            assumed=assumed,
        )

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """One for every registered kernel of the op: selected, supported, rejected though asked for, the rest.

        Supported ones come best first; then those that would be chosen if they were verified here; other rejected ones
        by name. A choice ends with the first kernel that can run, so
        these are made when they are first looked at; they tell of the moment of the choice.
        """
        return self.tell()

    @property
    def faster(self) -> tuple[Decision, ...]:
        """Kernels that are expected to be faster and would be chosen once they are verified here, best first."""
        return tuple(decision for decision in self.decisions if decision.ahead)

    @property
    def selected(self) -> str | None:
        """Name of the chosen kernel."""
        return self.kernel.name if self.kernel else None

    @property
    def weights(self) -> str | None:
        """How the chosen kernel takes the op's weights, as a sentence; None if the op takes no packed ones."""
        given = getattr(self.problem, WEIGHT_LAYOUT, None)
        if given is None or self.kernel is None:
            return None
        reads = f"weights: given as {given}; {self.kernel.name} reads {' or '.join(self.kernel.layouts)}"
        if not self.kernel.packs_to:
            return f"{reads}; no repacking needed"
        need = "required" if self.kernel.needs_packing else "optional"
        return f"{reads}; packing to {self.kernel.packs_to} is {need}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the keys ``op``, ``problem``, ``selected``, ``source``, ``decisions``."""
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
            **({"overruled": list(self.overruled)} if self.overruled else {}),
            **weights,
            "decisions": [decision.to_dict() for decision in self.decisions],
        }

    def __str__(self) -> str:
        who = f"{self.selected}, decided by {self.source}" if self.selected else f"no kernel: {self.because}"
        lines = [f"{self.op} on {self.problem.device}: {who}", *([f"  {self.weights}"] if self.weights else [])]
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

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name not in ("tell", "decisions")}
        told = ", ".join(f"{name}={value!r}" for name, value in {**shown, "decisions": self.decisions}.items())
        return f"Selection({told})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        return self._choice == other._choice and self.decisions == other.decisions

    def __hash__(self) -> int:
        return hash(self._choice)

    def __reduce__(self) -> tuple[Any, ...]:
        """What is stored or sent to another process holds the decisions, and not what they were made from."""
        return Selection, (*self._choice, _Told(self.decisions), self.assumed)

    @property
    def _choice(self) -> tuple[Any, ...]:
        return self.op, self.problem, self.kernel, self.source, self.because, self.explicit, self.overruled


def _sentence(decision: Decision) -> str:
    """The reason with its code, unless it opens with the code."""
    return decision.reason if decision.reason.startswith(decision.code) else f"{decision.code}: {decision.reason}"


class _Told(NamedTuple):
    """Decisions that were made already."""

    decisions: tuple[Decision, ...]

    def __call__(self) -> tuple[Decision, ...]:
        return self.decisions
