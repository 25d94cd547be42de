"""The tables of docs/verification.md, from the records that scripts/record_verification.py and the benchmarks wrote."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
OURS = ("torch", "triton", "cpp")  # backends without a library, or whose library the tests really run
NOT_RUN, NO_RECORD = "not run", "no record"
NOTHING_AHEAD = "not compiled"

Kernels = Sequence[tuple[str, str]]  # op, kernel
Table = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]


def records() -> dict[str, dict[str, Any]]:
    """The records by the word in their file's name: cpu, h200."""
    files = sorted(RESULTS.glob("verification_*.json"))
    return {path.stem.removeprefix("verification_"): json.loads(path.read_text()) for path in files}


def machines(table: Table) -> str:
    """Where and when each record was made, and where what is compiled ahead was, if that is newer."""
    machines_of = []
    for record in records().values():
        newer = record.get("ahead_here")
        machines_of += [record, newer | {"device": f"{newer['device']}, compiled ahead"}] if newer else [record]
    rows = [
        (record["device"], record["date"], record["python"], record["torch"], record["triton"], f"`{record['commit']}`")
        for record in machines_of
    ]
    return table(("machine", "date", "Python", "torch", "Triton", "commit"), rows)


def tested(kernels: Kernels, table: Table) -> str:
    """Per op and kernel: run on which machine, and measured where."""
    known = records()
    gpus = [name for name in known if name != "cpu"] or ["h200"]
    timed = _timed()
    rows = []
    for op, kernel in kernels:
        on_cpu = _ran(known.get("cpu"), op, kernel)
        if on_cpu not in (NOT_RUN, NO_RECORD) and kernel.startswith("triton."):
            on_cpu = f"interpreted: {on_cpu}"
        elif on_cpu not in (NOT_RUN, NO_RECORD) and kernel.partition(".")[0] not in OURS:
            on_cpu = f"against a mock of its library: {on_cpu}"
        on_gpus = [_ran(known.get(name), op, kernel) for name in gpus]
        on_gpus = [
            _elsewhere(name, op, kernel) or ran if ran == NOT_RUN else ran
            for name, ran in zip(gpus, on_gpus, strict=True)
        ]
        rows.append((op, f"`{kernel}`", on_cpu, *on_gpus, ", ".join(timed.get((op, kernel), ())) or "no"))
    return table(("op", "kernel", "on a CPU", *(f"on an {name.upper()}" for name in gpus), "measured"), rows)


def _elsewhere(machine: str, op: str, kernel: str) -> str | None:
    """Where it says that a kernel passed on a machine whose record of all tests does not name it."""
    for name, runs in _runs(RESULTS, machine).items():
        passed = [run for run in runs if run["passed"] and not run["failed"]]
        if any(said in run["kernels"] for run in passed for said in (kernel, f"{op} {kernel}")):
            of_library = name == f"libraries_{machine}.json"
            return "with its library, below" if of_library else f"[a run of its own](../benchmarks/results/{name})"
    return None


@functools.cache
def _runs(results: Path, machine: str) -> dict[str, list[dict[str, Any]]]:
    """Runs of parts of the tests on a machine, by file: those with libraries first, then the youngest."""
    files = {path.name: json.loads(path.read_text()) for path in results.glob(f"*_{machine}.json")}
    found = {
        name: [run for run in result["runs"] if "kernels" in run and "passed" in run]
        for name, result in files.items()
        if isinstance(result, dict) and isinstance(result.get("runs"), list)
    }
    order = sorted(found, key=lambda name: str(files[name].get("date", "")), reverse=True)
    return {name: found[name] for name in sorted(order, key=lambda name: not name.startswith("libraries_"))}


def libraries(table: Table) -> str:
    """What the tests of the backends that wrap a library gave on GPUs, with which copy of it."""
    rows = []
    for path in sorted(RESULTS.glob("libraries_*.json")):
        record = json.loads(path.read_text())
        rows += [
            (
                ", ".join(f"`{kernel}`" for kernel in run["kernels"]),
                run["library"],
                record["device"],
                record["date"],
                f"`{run['commit']}`",
                f"{run['passed']} passed, {run['failed']} failed, {run['skipped']} skipped",
                run["note"],
            )
            for run in record["runs"]
        ]
    return table(("kernels", "library", "machine", "date", "commit", "its GPU tests", "note"), rows)


def compiled(kernels: Kernels, table: Table) -> str:
    """Per op and Triton kernel: what was compiled for which GPU."""
    rows_of: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    devices: dict[str, None] = {}
    for record in records().values():
        for row in record.get("ahead", ()):
            rows_of.setdefault((row["op"], row["kernel"]), {})[row["device"]] = row
            devices[row["device"]] = None
    rows = []
    for op, kernel in kernels:
        if kernel.startswith("triton."):
            made = rows_of.get((op, kernel), {})
            cells = (_launches(made[device]) if device in made else _not_made(op, kernel, device) for device in devices)
            rows.append((op, f"`{kernel}`", *cells))
    return table(("op", "kernel", *devices), rows)


def _ran(record: dict[str, Any] | None, op: str, kernel: str) -> str:
    if record is None:
        return NO_RECORD
    row = next((row for row in record["tests"] if (row["op"], row["kernel"]) == (op, kernel)), None)
    if row is None:
        return NOT_RUN
    return f"{row['passed']} tests" if not row["failed"] else f"{row['passed']} tests, **{row['failed']} failed**"


def _not_made(op: str, kernel: str, device: str) -> str:
    """That nothing was compiled, or what the kernel's record says of the GPU."""
    from kernelhub.dispatch.constraint import OnDevice
    from kernelhub.dispatch.hub import HUB
    from kernelhub.probes.device import simulated

    _ = HUB.settings  # which makes it know the kernels
    records = [record for record in HUB.registry.candidates(op).kernels if record.name == kernel]
    problem: Any = SimpleNamespace(device=simulated(device))
    limits = [limit for record in records for limit in record.constraints if isinstance(limit, OnDevice)]
    needs = [str(limit) for limit in limits if limit.reject(problem, HUB.machine)]
    return f"needs {needs[0]}" if needs else NOTHING_AHEAD


def _launches(row: dict[str, Any]) -> str:
    said = [f"{row['launches']}", f"{row['most_shared_memory_bytes'] / 1024:.0f} KB"]
    if row["too_large"]:
        said.append(f"**{row['too_large']} too large**")
    if row["spilling"]:
        said.append(f"{row['spilling']} spill up to {row['most_spilled_bytes']} B")
    return ", ".join(said)


def _timed() -> dict[tuple[str, str], list[str]]:
    """Machines that a kernel was timed on, from every benchmark's results."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        for row in result.get("rows", ()) if isinstance(result, dict) else ():
            for kernel in row.get("kernels_ms", ()):
                places = found.setdefault((row.get("op", ""), kernel), [])
                place = path.stem.rpartition("_")[2].upper()
                if place not in places:
                    places.append(place)
    return found
