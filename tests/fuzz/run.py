"""Runs cases in children, one for each op; a child that crashes or hangs is a failure of its case, and is replaced."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.case import CaseId
from tests.fuzz.worker import LOST_STATUS

_START_S = 120.0  # to import everything
_LIMIT_S = {"cpu": 60.0, "cuda": 120.0}  # for a case, compiling included
_POLL_S = 0.05


class Result(NamedTuple):
    """What became of a case, as its child said, or as its end shows."""

    case: CaseId
    kind: str
    text: str
    note: str
    seconds: float


def run(
    cases: Sequence[CaseId], device: str, ends: float | None = None, tell: Callable[[Result], None] | None = None
) -> list[Result]:
    """Run cases of one op in as many children as it takes, until a time of `time.monotonic`."""
    results: list[Result] = []
    while len(results) < len(cases) and (ends is None or time.monotonic() < ends):
        _child(cases, results, device, ends, tell or (lambda result: None))
    return results


def _child(
    cases: Sequence[CaseId],
    results: list[Result],
    device: str,
    ends: float | None,
    tell: Callable[[Result], None],
) -> None:
    """One child for what is left; adds to the results."""
    left = cases[len(results) :]
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        journal.touch()
        log = Path(folder) / "log"
        job = {"cases": left, "device": device, "journal": str(journal)}
        with log.open("w") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.worker"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=os.environ | ({} if device != "cpu" else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}),
            )
            assert child.stdin is not None
            child.stdin.write(json.dumps(job))
            child.stdin.close()
            done = _followed(child, journal, left, device, ends, results, tell)
        if done is not None and done < len(left) and child.returncode != LOST_STATUS:
            said = log.read_text(errors="replace").strip().splitlines()[-1:]
            how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
            result = Result(left[done], "failed", f"the process crashed: {how} {' '.join(said)[:200]}", "", 0.0)
            results.append(result)
            tell(result)


def _followed(
    child: Any,
    journal: Path,
    left: Sequence[CaseId],
    device: str,
    ends: float | None,
    results: list[Result],
    tell: Callable[[Result], None],
) -> int | None:
    """Read a child's journal until it ends: how many of its cases are done; None where it was ended from here."""
    done, began, line = 0, time.monotonic(), ""
    limit = _START_S + _LIMIT_S[device.partition(":")[0]]
    with journal.open(encoding="utf-8") as lines:
        while True:
            ended = child.poll() is not None
            for piece in lines:
                line += piece
                if not line.endswith("\n"):  # the child is writing it
                    continue
                entry, line = json.loads(line), ""
                began, limit = time.monotonic(), _LIMIT_S[device.partition(":")[0]]
                if "kind" in entry:
                    result = Result(left[done], entry["kind"], entry["text"], entry["note"], entry["seconds"])
                    results.append(result)
                    tell(result)
                    done += 1
            if ended:
                return done
            if time.monotonic() - began > limit:
                _end(child)
                result = Result(left[done], "failed", f"hangs: no end within {limit:.0f} s", "", limit)
                results.append(result)
                tell(result)
                return None
            if ends is not None and time.monotonic() > ends:
                _end(child)
                return None
            time.sleep(_POLL_S)


def _end(child: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


COLUMNS = ("run", "passed", "refused", "failed", "skipped", "broken")


def counted(results: Sequence[Result]) -> dict[tuple[str, str, str], Counter[str]]:
    """By op, kernel and kind: how many were run, and how they ended."""
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    for result in results:
        place = result.case.op, result.case.kernel, result.case.kind
        row = counts.setdefault(place, Counter())
        row[result.kind] += 1
        row["run"] += result.kind != "skipped"
    return counts


def table(results: Sequence[Result]) -> str:
    """Counts by op, kernel and kind, as text."""
    counts = counted(results)
    lines = [f"{'op':24}{'kernel':26}{'kind':12}" + "".join(f"{name:>9}" for name in COLUMNS)]
    for (op, kernel, kind), row in counts.items():
        lines.append(f"{op:24}{kernel:26}{kind:12}" + "".join(f"{row[name]:>9}" for name in COLUMNS))
    total: Counter[str] = sum(counts.values(), Counter())
    lines.append(f"{'all':62}" + "".join(f"{total[name]:>9}" for name in COLUMNS))
    return "\n".join(lines)
