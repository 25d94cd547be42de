"""The short table at the end of scripts/verify_on_gpu.sh, from the files that its parts left in a folder."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

BENCHMARKS = ("attention", "mla", "moe", "gemm", "grouped_gemm", "quant", "indexer")


def tests(files: Iterable[Path]) -> tuple[Counter[str], list[str]]:
    """How many tests ended how, and the names of those that failed; of one that ran again, how it ended last."""
    ends: dict[str, str] = {}
    for path in files:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
            found = (child.tag for child in case if child.tag in ("failure", "error", "skipped"))
            ends[name] = next(found, "passed")
    return Counter(ends.values()), [name for name, ended in ends.items() if ended in ("failure", "error")]


def left(folder: Path, name: str) -> str:
    """How many tests have not ended well, of those that are to run, by what `tests/going_on.py` notes."""
    passed, every = folder / f"{name}.passed", folder / f"{name}.passed.all"
    if not (passed.exists() and every.exists()):
        return ""
    count = int(every.read_text())
    missing = count - len(set(passed.read_text().splitlines()[1:]))
    return f"; {missing} of {count} are left" if missing else f"; all {count} have ended"


def fuzz(name: str, result: dict[str, Any]) -> None:
    """How the fuzzer's cases ended, and commands that show the first that failed."""
    counts: Counter[str] = Counter()
    for row in result["counts"]:
        counts.update({ended: value for ended, value in row.items() if isinstance(value, int)})
    print(f"{name:14} " + ", ".join(f"{count} {ended}" for ended, count in sorted(counts.items())))
    for failure in result["failed"][:25]:
        print(f"    failed: {failure['text'][:150]}\n        {failure['command']}")


def show(result: dict[str, Any]) -> None:
    """A line per case of a benchmark of kernels."""
    print(f"{result['device']}, torch {result['torch']}, {result['date']}")
    for row in result["rows"]:
        peers = row["torch_ms"]
        best = f"torch's best {min(peers.values()):.3f}" if peers else "torch has no such op"
        ours = ", ".join(f"{'*' * (name == row['chosen'])}{name} {ms:.3f}" for name, ms in row["kernels_ms"].items())
        print(f"  {row['case']}: {ours}; {best}; roof {row['roof_ms']:.3f} ms")


def host(result: dict[str, Any]) -> None:
    """What a call and a run of a plan keep the host, by our launcher and by Triton's, for ops measured by both."""
    for op, both in result["ops"].items():
        if "own" not in both or "triton" not in both:
            continue
        forms = [f"{form} {us:.1f} ({both['triton'][form]:.1f})" for form, us in both["own"].items()]
        print(f"  host us (by Triton's launcher), {op}: {', '.join(forms)}")


def messages(result: dict[str, Any]) -> None:
    """A line per message and kernel."""
    for row in result["rows"]:
        print(
            f"  {row['op']} {row['kernel']} {row['bytes']} bytes: eager {row['eager_us']}, graph {row['graph_us']} us"
        )


def main(folder: Path) -> int:
    """1 if a test failed, a part broke, or the tests of the GPU did not come to their end; else 0."""
    bad = False
    parts = {line.split()[0]: line for line in (folder / "parts.txt").read_text().splitlines()}  # the last of each
    for line in parts.values():
        name, code, seconds, budget = line.split()
        late = code in ("124", "137") or (code == "2" and name.endswith("tests"))  # pytest at its limit ends with 2
        bad |= code != "0" and (name == "gpu_tests" or not late)
        spent = "ran out of time" if late else f"exit {code}"
        print(f"{name:14} {spent:18} {seconds:>4} of {budget} s")
    for name in ("gpu_tests", "comm_tests", "other_tests"):
        files = [path for path in folder.glob(f"{name}.*.xml") if path.stat().st_size]
        if files:
            counts, failed = tests(sorted(files, key=lambda path: int(path.name.split(".")[1])))
            ends = ", ".join(f"{count} {ended}" for ended, count in sorted(counts.items()))
            print(f"{name:14} {ends}{left(folder, name)}")
            bad |= bool(failed)
            for case in failed[:25]:
                print(f"    failed: {case[:150]}")
    for name in ("fuzz", "fuzz_values"):
        if (folder / f"{name}.json").exists():
            fuzz(name, json.loads((folder / f"{name}.json").read_text()))
    if (folder / "dispatch.json").exists():
        costs = json.loads((folder / "dispatch.json").read_text())
        names = ("cached_call", "override_call", "plan_run", "miss", "import")
        known = (f"{name} {costs[name]['ns']:,.0f}" for name in names if name in costs)
        print("dispatch, ns   " + ", ".join(known))
    for name in BENCHMARKS:
        if (folder / f"{name}.json").exists():
            show(json.loads((folder / f"{name}.json").read_text()))
    for name, shown in (("host", host), ("comm", messages)):
        if (folder / f"{name}.json").exists():
            shown(json.loads((folder / f"{name}.json").read_text()))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
