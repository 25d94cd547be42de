"""Write down what was run and passed, per op and kernel, for docs/verification.md.

    python scripts/record_verification.py                      # on a CPU: the kernels' tests, and all compiled ahead
    python scripts/record_verification.py --ahead              # what is compiled ahead alone, in a record that there is
    python scripts/record_verification.py --junit FILE ... --out build/verification.json   # of tests that have been run

Which kernels ran in a test is told by the report of the library itself: `tests/conftest.py` notes it in the JUnit file.
A test counts for every kernel that ran in it. Which kernel a launch compiled ahead belongs to is told by its adapter.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kernelhub.dispatch.hub import HUB

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "verification_cpu.json"
AHEAD = ("A100", "L40S", "H200", "B200", "RTX5090")


def tests(files: Iterable[Path]) -> list[dict[str, Any]]:
    """How many tests passed and failed in which a kernel of this package ran; tests bring kernels of their own."""
    _ = HUB.settings
    known = {(op, kernel.name) for op in HUB.registry.contracts for kernel in HUB.registry.candidates(op).kernels}
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in files:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            ended = {child.tag for child in case}
            if "skipped" in ended:
                continue
            for item in case.iter("property"):
                if item.get("name") == "ran":
                    counts[item.get("value", "")]["failed" if ended & {"failure", "error"} else "passed"] += 1
    rows = []
    for name, count in sorted(counts.items()):
        op, kernel = name.split()
        if (op, kernel) not in known:
            continue
        rows.append({"op": op, "kernel": kernel, "passed": count["passed"], "failed": count["failed"]})
    return rows


def ahead(device: str) -> list[dict[str, Any]]:
    """What was compiled for a GPU that is not here, by op and kernel record."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.triton_ahead", "--device", device]
    printed = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    by_record: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in map(json.loads, printed.splitlines()):
        by_record[row["op"] or "", row["record"] or ""].append(row)
    return [
        {
            "op": op,
            "kernel": record,
            "device": device,
            "launches": len(rows),
            "too_large": sum(not row["fits"] for row in rows),
            "most_shared_memory_bytes": max(row["shared_memory_bytes"] for row in rows),
            "spilling": sum(row["spill_bytes"] > 0 for row in rows),
            "most_spilled_bytes": max(row["spill_bytes"] for row in rows),
        }
        for (op, record), rows in sorted(by_record.items())
    ]


def here() -> dict[str, Any]:
    """The machine, its versions, the day, and the commit."""
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "device": device,
        "date": datetime.date.today().isoformat(),
        "commit": git.stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
    }


def run_tests(folder: Path) -> Path:
    """The tests of the kernels, of which some may fail: that is recorded too."""
    junit = folder / "kernels.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not ahead",
        "tests/backends",
        "--junitxml",
        str(junit),
    ]
    subprocess.run([*command, "--ignore", "tests/backends/test_triton_ahead.py"], cwd=ROOT, check=False)
    return junit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--junit", type=Path, nargs="+", help="files of tests that have been run; nothing is run then")
    parser.add_argument("--ahead", action="store_true", help="keep the tests of the record, compile ahead anew")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    record = json.loads(options.out.read_text()) if options.ahead else here()
    if options.ahead:
        record |= {"ahead_here": here(), "ahead": [row for device in AHEAD for row in ahead(device)]}
    elif options.junit:
        record["tests"] = tests(path for path in options.junit if path.exists() and path.stat().st_size)
    else:
        with tempfile.TemporaryDirectory() as folder:
            record["tests"] = tests([run_tests(Path(folder))])
        record["ahead"] = [row for device in AHEAD for row in ahead(device)]
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    failed = sum(row["failed"] for row in record["tests"])
    print(f"{options.out}: {sum(row['passed'] for row in record['tests'])} passed, {failed} failed, by kernel")


if __name__ == "__main__":
    main()
