"""One case: drawn from its seed alone, made, and said what became of it."""

from __future__ import annotations

import time
from random import Random
from typing import NamedTuple

import torch

from tests.fuzz.bases import draw
from tests.fuzz.kinds import varied
from tests.fuzz.operands import described
from tests.fuzz.outcome import BROKEN, FAILED, SKIPPED, LostDevice, Outcome, lost, outcome_of

_TRIES = 8
# Elements of all operands together, so that Triton's interpreter takes well under a second.
_MOST = {"interpreter": 120_000, "cpu": 400_000, "cuda": 2_000_000}


class CaseId(NamedTuple):
    """What decides a case, together with the sources."""

    op: str
    kernel: str
    kind: str
    number: int
    seed: int

    @property
    def command(self) -> str:
        """A command that runs it alone."""
        return (
            f"python -m tests.fuzz --op {self.op} --kernel {self.kernel} --kinds {self.kind} "
            f"--case {self.number} --seed {self.seed}"
        )


class Found(NamedTuple):
    """What became of a case."""

    outcome: Outcome
    note: str
    seconds: float


def run_case(case: CaseId, device: torch.device, show: bool = False) -> Found:
    """Run one case here.

    Args:
        case: which.
        device: where.
        show: print the call, and re-raise nothing.
    """
    random = Random(f"{case.seed} {case.op} {case.kernel} {case.kind} {case.number}")
    torch.manual_seed(case.number)
    most = _MOST["cuda" if device.type == "cuda" else "interpreter" if case.kernel.startswith("triton") else "cpu"]
    for _ in range(_TRIES):
        base = draw(case.op, case.kernel, device, random, most)
        if base is None:
            break
        asked = varied(case.kind, case.op, case.kernel, base, random)
        if asked is None:
            continue
        note = f"{base.label}; {asked.note}".strip("; ")
        if show:
            print(f"{note}\ngiven:\n{described(asked.given)}")
            print(described({name: place.tensor for name, place in asked.places.items()}))
        begun = time.monotonic()
        outcome = outcome_of(case.op, case.kernel, asked, device)
        return Found(outcome, note, time.monotonic() - begun)
    return Found(Outcome(SKIPPED, "no call to vary was found"), "", 0.0)


def judged(case: CaseId, device: torch.device) -> Found:
    """Run one case here; what ends in an error of the fuzzer itself, or of a reference, is broken.

    Raises:
        LostDevice: nothing can be run after it.
    """
    try:
        return run_case(case, device)
    except LostDevice:
        raise
    except Exception as error:
        if lost(error):
            raise LostDevice(str(error)) from error
        text = f"the fuzzer could not judge it: {type(error).__name__}: {str(error)[:200]}"
        return Found(Outcome(BROKEN, text, error), "", 0.0)


__all__ = ["FAILED", "CaseId", "Found", "judged", "run_case"]
