"""Results of checking kernels against their references: per check, per kernel, and in total."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RIGHT, WRONG, NOT_RUN = "right", "wrong", "not run"
IN_SERVICE = "wrong_in_service"  # found by an audit of real calls; a passing verification does not lift it

CANNOT_LAUNCH = "cannot_launch"  # a module or file that its launch needs is missing: no evidence about its numbers

EVERY = "every problem"  # what all quick cases of an op cover

SERVING = "serving"  # prefix of the label of a check with a serving call, see `evidence.serving`

# Faults of a kernel, worst first. If there are several, the most frequent one is the code of its result.
CODES = {
    "crashed": "it ended the process that ran it",
    "hung": "it did not end",
    "raised": "it raised an error",
    CANNOT_LAUNCH: "it cannot launch here",
    "past_workspace": "it wrote past its workspace",
    "past_output": "it wrote past its output",
    "input_changed": "it changed an input",
    "not_written": "it left part of its output unwritten",
    "nan": "it gave NaN where the result is a number",
    "zeros": "it gave nothing but zeros",
    IN_SERVICE: "its numbers were wrong in service",
    "feature_ignored": "it ignored a feature that it claims",
    "wrong_numbers": "its numbers are wrong",
    "token_count": "its numbers are wrong for some token counts",
    "strides": "its numbers are wrong for operands or results that are parts of wider tensors",
    "own_result": "its numbers are wrong if it allocates the result itself",
    "in_place": "its numbers are wrong if the result overwrites an operand",
    "stale": "its numbers are wrong once the same memory contains other values",
    "packing": "its packed weights do not unpack bit for bit, or give another result",
    "other_bits": "it is declared deterministic, but gave other bits the second time",
}


@dataclass(frozen=True)
class Check:
    """One call compared with the reference.

    Attributes:
        case: label of the call.
        code: ``"ok"`` or one of `CODES`.
        problem: the problem class: its formats, and the features it requires.
        ratio: the largest error relative to the tolerance; at most 1 is right. NaN if there is no number.
        figures: the fault, as a sentence; empty if it is right.
        tokens: whether the case is one of several that differ only in their number of tokens.
    """

    case: str
    code: str
    problem: str
    ratio: float = 0.0
    figures: str = ""
    tokens: bool = False

    @property
    def ok(self) -> bool:
        return self.code == "ok"

    def to_dict(self) -> dict[str, Any]:
        ratio = self.ratio if math.isfinite(self.ratio) else None
        plain = {"case": self.case, "code": self.code, "problem": self.problem, "ratio": ratio}
        return plain | ({} if self.ok else {"figures": self.figures, "tokens": self.tokens})

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Check:
        """The check from `to_dict`; raises KeyError, TypeError or ValueError for anything else."""
        ratio = plain["ratio"]
        made = Check(
            str(plain["case"]),
            str(plain["code"]),
            str(plain["problem"]),
            math.inf if ratio is None else float(ratio),
            str(plain.get("figures", "")),
            bool(plain.get("tokens", False)),
        )
        if not made.ok and made.code not in CODES:
            raise ValueError(f"{made.code!r} is not a code of a check")
        return made


def is_of_serving(check: Check) -> bool:
    """Whether a check is one of a serving call."""
    return check.case.startswith(f"{SERVING} ")


@dataclass(frozen=True)
class Result:
    """All checks of one kernel.

    Attributes:
        op, kernel: the op and the kernel.
        checks: checks of this run, and failures of earlier runs that this one did not repeat.
        left_out: cases that did not run for lack of time or memory.
        why_not: why no check ran, or why the run stopped; empty if all ran.
        seconds: its time.
        covers: the problems for which these and earlier checks were made, as `evidence.served` names them, or `EVERY`.
    """

    op: str
    kernel: str
    checks: tuple[Check, ...] = ()
    left_out: int = 0
    why_not: str = ""
    seconds: float = 0.0
    covers: tuple[str, ...] = ()

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

    @property
    def status(self) -> str:
        """``"right"``, ``"wrong"`` or ``"not run"``; the last also if calls fail only because they cannot launch."""
        codes = {check.code for check in self.failures}
        if codes == {CANNOT_LAUNCH} or not self.checks:
            return NOT_RUN
        return WRONG if codes else RIGHT

    @property
    def code(self) -> str:
        """The code of its fault; ``"ok"`` or ``"not_run"`` without one."""
        failures = self.failures
        if not failures:
            return "ok" if self.checks else "not_run"
        codes = [check.code for check in failures]
        wrong_at = [check for check in failures if check.code in ("wrong_numbers", "zeros", "nan")]
        rest_is_right = any(check.ok and not check.tokens for check in self.checks)
        if len(wrong_at) == len(failures) and rest_is_right and all(check.tokens for check in failures):
            return "token_count"
        return max(CODES, key=codes.count)  # of equals the first, which is the worse

    @property
    def reason(self) -> str:
        """Its fault, as a sentence with figures; or why nothing ran; or empty."""
        failures = self.failures
        if not failures:
            return self.why_not
        code = self.code
        example = next((check for check in failures if check.code == code), failures[0])
        more = f"; {len(failures)} of {len(self.checks)} checks failed" if len(failures) > 1 else ""
        return f"{CODES[code]}: {example.case}: {example.figures}{more}"

    @property
    def worst(self) -> float:
        """The largest error relative to the tolerance, of all checks."""
        return max((check.ratio for check in self.checks if not math.isnan(check.ratio)), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        worst = self.worst
        return {
            "op": self.op,
            "kernel": self.kernel,
            "status": self.status,
            "code": self.code,
            "reason": self.reason,
            "worst": worst if math.isfinite(worst) else None,
            "left_out": self.left_out,
            "why_not": self.why_not,
            "seconds": round(self.seconds, 3),
            "checks": [check.to_dict() for check in self.checks],
        }


@dataclass(frozen=True)
class Verification:
    """The results of one run of `kernelhub.verify`; `str` for people, `to_dict` for machines.

    Attributes:
        device: the device that kernels ran on.
        results: one for each kernel.
        lifted: kernels that were quarantined before and no longer are, as (op, kernel).
        unwritten: why results could not be stored on disk; empty if they were.
    """

    device: str
    results: tuple[Result, ...]
    lifted: tuple[tuple[str, str], ...] = ()
    unwritten: str = ""
    counts: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        found = [result.status for result in self.results]
        object.__setattr__(self, "counts", {status: found.count(status) for status in (RIGHT, WRONG, NOT_RUN)})

    @property
    def ok(self) -> bool:
        """Whether no kernel is wrong."""
        return not self.counts[WRONG]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "device": self.device,
            "counts": dict(self.counts),
            "lifted": [list(pair) for pair in self.lifted],
            "unwritten": self.unwritten,
            "results": [result.to_dict() for result in self.results],
        }

    def summary(self) -> str:
        """The counts in a sentence."""
        checks = sum(len(result.checks) for result in self.results)
        partly = sum(bool(result.left_out) for result in self.results if result.checks)
        text = f"kernels: {self.counts[RIGHT]} right, {self.counts[WRONG]} wrong, {self.counts[NOT_RUN]} not run"
        return f"{text}; {checks} checks on {self.device}" + (f"; {partly} not to the end" if partly else "")

    def __str__(self) -> str:
        lines = [f"{item.op} {item.kernel}: {item.status}: {item.reason}" for item in self.results if item.failures]
        lines += [f"{op} {kernel}: no longer quarantined" for op, kernel in self.lifted]
        return "\n".join([*lines, self.summary(), *([self.unwritten] if self.unwritten else [])])
