"""A child that runs cases and writes what became of them: one line before each, one after."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO

import torch

from tests.fuzz.case import CaseId, judged
from tests.fuzz.outcome import LostDevice

LOST_STATUS = 3


def work(cases: list[CaseId], device: torch.device, journal: TextIO) -> None:
    """Run cases in order; ends early, with `LOST_STATUS`, where the device is lost."""
    for at, case in enumerate(cases):
        _write(journal, at=at, began=time.time())
        try:
            found = judged(case, device)
        except LostDevice as error:
            _write(journal, at=at, kind="failed", text=f"the device is lost: {error}", note="", seconds=0.0)
            sys.exit(LOST_STATUS)
        outcome = found.outcome
        _write(journal, at=at, kind=outcome.kind, text=outcome.text, note=found.note, seconds=found.seconds)


def _write(journal: TextIO, **line: Any) -> None:
    journal.write(json.dumps(line) + "\n")
    journal.flush()


def main() -> None:
    """Read a job from stdin: cases, device, path of the journal."""
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    with open(job["journal"], "a", encoding="utf-8") as journal:
        work([CaseId(*case) for case in job["cases"]], torch.device(job["device"]), journal)


if __name__ == "__main__":
    main()
