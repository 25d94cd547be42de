"""``kernelhub demo``: attention and a block of experts through the hub: which kernel ran, why, how exact, how fast."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelhub.cli import block
from kernelhub.cli.console import Console, steps
from kernelhub.cli.explain import decision_table
from kernelhub.cli.showcase import FULL, QUICK, Case, cases
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import ConfigurationError
from kernelhub.evidence.timing import Timing, time_calls
from kernelhub.ops.attention.tolerance import Agreement

_STEPS_OF_A_CASE = 3


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where to run (default: the first GPU, else the CPU)")
    parser.add_argument("--quick", action="store_true", help="smaller shapes and shorter measurements")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and nothing else")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run every case and print what came out; 1 if a result is further from the reference than allowed."""
    device = _device(arguments.device)
    size = (QUICK if arguments.quick else FULL)[device.type]
    made = cases(size, device)
    with steps(_STEPS_OF_A_CASE * len(made), sys.stderr) as step:
        results = [_run_case(title, make, device, size.budget_s, step) for title, make in made.items()]
    ok = all(result.agreement.ok for result in results)
    if arguments.json:
        console.json({"ok": ok, "results": [result.to_dict() for result in results]})
    else:
        for result in results:
            _show(result, console)
        console.line("next: kernelhub explain paged_attention --device B200    the choice on a GPU that is not here")
        console.line("      kernelhub doctor                                   what could be better on this machine")
    return 0 if ok else 1


@dataclass(frozen=True)
class _Result:
    """What came out of one case; its tensors are not held.

    Attributes:
        title: name of the case.
        what, tokens, checked, peer_is: as of the case.
        peer_name: the fastest of the case's peers.
        verdict: the selection that the call ran by.
        agreement: the result against the reference.
        ours: time of the call.
        peer: time of that one.
    """

    title: str
    what: str
    tokens: int
    checked: str
    peer_is: str
    peer_name: str
    verdict: Selection[Any]
    agreement: Agreement | block.Agreement
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a number that is none, as of a wrong result, is null."""
        return {
            "title": self.title,
            "what": self.what,
            **self.verdict.to_dict(),
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
) -> _Result:
    step(f"{title}: draw the inputs")
    case = make()
    step(f"{title}: run it and hold it against the reference")
    verdict = case.function.prepare(**case.arguments).selection
    agreement = case.check(case.function(**case.arguments))
    step(f"{title}: time it beside plain torch")
    ours, *others = time_calls((lambda: case.function(**case.arguments), *case.peers.values()), device, budget_s)
    name, peer = min(zip(case.peers, others, strict=True), key=lambda timed: timed[1].median_s)
    return _Result(title, case.what, case.tokens, case.checked, case.peer_is, name, verdict, agreement, ours, peer)


def _show(result: _Result, console: Console) -> None:
    verdict, agreement = result.verdict, result.agreement
    console.heading(f"{result.title}: {result.what}")
    console.line(f"ran: {verdict.op} by {verdict.selected} on {verdict.problem.device}", indent=2)
    console.line(f"decided by: {verdict.source}, {verdict.because}", indent=2)
    console.line(f"numbers: {agreement}: {'within bounds' if agreement.ok else 'WRONG'}", indent=2)
    console.line(f"held against: the float32 reference, {result.checked}", indent=2)
    timing = f"{result.ours.median_s * 1e3:.3g} ms a call, median of {result.ours.samples}"
    console.line(f"speed: {result.tokens_per_s:,.0f} tokens/s through one layer ({timing})", indent=2)
    console.line(f"torch: {result.peer_tokens_per_s:,.0f} tokens/s by {result.peer_name} ({result.peer_is})", indent=2)
    console.line(f"ratio: kernelhub runs at {result.ratio:.2f} times the speed of that", indent=2)
    console.table(decision_table(verdict))
    console.line()


def _number(value: float | bool) -> float | bool | None:
    return value if math.isfinite(value) else None
