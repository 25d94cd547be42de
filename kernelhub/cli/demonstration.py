"""The run of ``kernelhub demo``: inputs, results, checks and times of each case beside plain torch, and its output."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kernelhub
from kernelhub.cli import block
from kernelhub.cli.console import Console, Table, steps
from kernelhub.cli.explain import reasons_table
from kernelhub.cli.showcase import FULL, QUICK, Case, cases
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import ConfigurationError
from kernelhub.evidence.timing import Timing, time_calls
from kernelhub.ops.attention.tolerance import ToleranceCheck

_STEPS_OF_A_CASE = 3


def demonstrate(arguments: argparse.Namespace, console: Console) -> int:
    """Run every case and print the results; 1 if an error exceeds its tolerance."""
    device = _device(arguments.device)
    size = (QUICK if arguments.quick else FULL)[device.type]
    made = cases(size, device)
    with steps("demo", _STEPS_OF_A_CASE * len(made), sys.stderr) as step:
        results = [_run_case(title, make, device, size.budget_s, step) for title, make in made.items()]
    ok = all(result.agreement.ok for result in results)
    if arguments.json:
        console.json({"ok": ok, "results": [result.to_dict() for result in results]})
    else:
        if arguments.all:
            for result in results:
                _show(result, console)
        else:
            _summary(results, console)
        console.line("next: kernelhub explain paged_attention --device B200    the selection on another GPU")
        console.line("      kernelhub doctor                                   what to improve on this machine")
    return 0 if ok else 1


@dataclass(frozen=True)
class _CaseResult:
    """The result of one case, without its tensors.

    Attributes:
        title: name of the case.
        what, tokens, checked, peer_is: as of the case.
        peer_name: the fastest of the case's peers.
        selection: the selection of the call.
        agreement: the result against the reference.
        ours: time of the call.
        peer: time of the peer.
    """

    title: str
    what: str
    tokens: int
    checked: str
    peer_is: str
    peer_name: str
    selection: Selection[Any]
    agreement: ToleranceCheck | block.ToleranceCheck
    ours: Timing
    peer: Timing

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.ours.median_s

    @property
    def peer_tokens_per_s(self) -> float:
        return self.tokens / self.peer.median_s

    @property
    def ratio(self) -> float:
        return self.peer.median_s / self.ours.median_s

    @property
    def error(self) -> float:
        """The largest error relative to its tolerance."""
        found = self.agreement
        return max(found.largest / found.largest_allowed, found.rms_ratio / found.rms_ratio_allowed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; NaN and infinity, as in a wrong result, are null."""
        return {
            "title": self.title,
            "what": self.what,
            **self.selection.to_dict(),
            "error": {
                **{name: _number(value) for name, value in dataclasses.asdict(self.agreement).items()},
                "ok": self.agreement.ok,
                "checked": self.checked,
            },
            "tokens_per_s": self.tokens_per_s,
            "median_ms": self.ours.median_s * 1e3,
            "samples": self.ours.samples,
            "torch": {
                "what": f"{self.peer_name}: {self.peer_is}",
                "tokens_per_s": self.peer_tokens_per_s,
                "ratio": self.ratio,
            },
        }


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: torch sees no GPU here; `kernelhub doctor` says why")
    return torch.device(name)


def _run_case(
    title: str, make: Callable[[], Case], device: torch.device, budget_s: float, step: Callable[[str], None]
) -> _CaseResult:
    step(f"{title}: draw the inputs")
    case = make()
    step(f"{title}: run it and check it against the reference")
    selection = case.function.prepare(**case.arguments).selection
    agreement = case.check(case.function(**case.arguments))
    step(f"{title}: time it beside plain torch")
    ours, *others = time_calls((lambda: case.function(**case.arguments), *case.peers.values()), device, budget_s)
    name, peer = min(zip(case.peers, others, strict=True), key=lambda timed: timed[1].median_s)
    return _CaseResult(
        title, case.what, case.tokens, case.checked, case.peer_is, name, selection, agreement, ours, peer
    )


def _summary(results: Sequence[_CaseResult], console: Console) -> None:
    """A few lines per case: the kernel, its error, its speed, its ratio to torch, and the next best kernels."""
    console.heading(
        f"kernelhub {kernelhub.__version__} on {results[0].selection.problem.device}, torch {torch.__version__}"
    )
    console.line(
        "kernel: the kernel that ran; error: relative to the tolerance; tokens/s: through one layer; vs torch: speed "
        "relative to the fastest plain torch call for the same work (below 1, torch is faster)"
    )
    rows = []
    for result in results:
        error = f"{result.error:.2f}" if result.agreement.ok else "WRONG"
        rows.append(
            (
                result.title,
                result.selection.selected or "",
                error,
                f"{result.tokens_per_s:,.0f}",
                f"{result.ratio:.2f}x",
            )
        )
    console.line()
    console.table(Table(("case", "kernel", "error", "tokens/s", "vs torch"), rows))
    console.line()
    console.entries([(result.title, _next_best(result.selection)) for result in results])
    console.line()
    rejected = sum(not decision.accepted for result in results for decision in result.selection.decisions)
    console.line(f"{rejected} unsupported here, --all lists them with their reasons, and what torch ran")


def _next_best(selection: Selection[Any]) -> str:
    """The next two kernels after the selected one."""
    names = [decision.kernel for decision in selection.decisions if decision.accepted][1:3]
    rejected = sum(not decision.accepted for decision in selection.decisions)
    return f"next best: {', '.join(names) or 'none'}; {rejected} unsupported here"


def _show(result: _CaseResult, console: Console) -> None:
    selection, agreement = result.selection, result.agreement
    console.heading(f"{result.title}: {result.what}")
    timing = f"{result.ours.median_s * 1e3:.3g} ms a call, median of {result.ours.samples}"
    console.entries(
        [
            ("  ran", f"{selection.op} by {selection.selected} on {selection.problem.device}"),
            ("  decided by", f"{selection.source}, {selection.because}"),
            ("  numbers", f"{agreement}: {'within bounds' if agreement.ok else 'WRONG'}"),
            ("  checked against", f"the float32 reference, {result.checked}"),
            ("  speed", f"{result.tokens_per_s:,.0f} tokens/s through one layer ({timing})"),
            ("  torch", f"{result.peer_tokens_per_s:,.0f} tokens/s by {result.peer_name} ({result.peer_is})"),
            ("  ratio", f"kernelhub runs at {result.ratio:.2f} times the speed of torch"),
        ]
    )
    console.table(reasons_table(selection.decisions))
    console.line()


def _number(value: float | bool) -> float | bool | None:
    return value if math.isfinite(value) else None
