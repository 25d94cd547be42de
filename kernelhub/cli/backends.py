"""``kernelhub backends``: the backends, and which of their kernels can run here."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kernelhub.cli import matrix
from kernelhub.cli.console import Console, Table
from kernelhub.cli.explain import named_together
from kernelhub.cli.facets import op_named, ops
from kernelhub.cli.here import devices, library, obstacles, plain_selection
from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.problem import Schema
from kernelhub.dispatch.reasons import OF_DEVICES
from kernelhub.dispatch.registry import Registered
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.finding import Finding

# If fewer features than this are missing, the table lists the missing ones.
_FEW = 4


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    parser.add_argument("--op", metavar="OP", type=op_named, help=f"only kernels of this op: {', '.join(ops())}")
    parser.add_argument("--matrix", action="store_true", help="print what each kernel accepts, on every device")
    parser.add_argument("--all", action="store_true", help="list every kernel of every op with all fields")
    parser.add_argument("--json", action="store_true", help="print the list as JSON, and nothing else")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print backends and kernels; always 0, also if no kernel can run here."""
    _ = HUB.settings
    records = ops().values() if arguments.op is None else (arguments.op,)
    if arguments.matrix:
        return _matrix(records, arguments.json, console)
    device = devices()[0]
    kernels = [entry for record in records for entry in _kernels(record, device)]
    backends = [(registered, library(registered)) for registered in HUB.registry.backends.values()]
    if arguments.json:
        console.json(
            {
                "device": str(device),
                "backends": [_backend_dict(*backend) for backend in backends],
                "kernels": [entry.to_dict() for entry in kernels],
            }
        )
        return 0
    if arguments.all:
        _show_all(records, backends, kernels, device, console)
    elif arguments.op is not None:
        _show_op(arguments.op, kernels, device, console)
    else:
        console.heading(f"backends on {device}")
        console.table(Table(("backend", "kernels", "library", "remedy"), _summary(backends, kernels)))
        console.line("kernels: number supported here, of all registered")
        console.line("`--op OP` lists the kernels of an op, `--all` every kernel with all fields;")
        console.line("`kernelhub info KERNEL` prints what a kernel accepts, `--matrix` its devices")
    return 0


def _summary(
    backends: Sequence[tuple[Registered, Finding | None]], kernels: Sequence[_KernelStatus]
) -> list[tuple[str, ...]]:
    """A row for each backend: how many of its kernels can run here, its library, and what is missing."""
    here = Counter(entry.kernel.backend for entry in kernels if not entry.obstacles)
    rows: list[tuple[str, ...]] = []
    for registered, finding in backends:
        if registered.backend is None:
            remedy = "fix or uninstall it, or set KERNELHUB_PLUGINS"
            rows.append((registered.name, "broken", f"{registered.code}: {registered.error}", remedy))
            continue
        of_backend = [entry for entry in kernels if entry.kernel.backend == registered.name]
        what = finding.reason if finding is not None else "built in" if registered.builtin else _place(registered)
        elsewhere = bool(of_backend) and all(
            any(item.code in OF_DEVICES for item in entry.obstacles) for entry in of_backend
        )
        remedy = "" if finding is None or finding.ok or elsewhere else finding.remedy
        if elsewhere:
            what += "; its kernels are for other devices"
        rows.append((registered.name, f"{here[registered.name]} of {len(registered.kernels)}", what, remedy))
    return rows


def _show_op(record: OpRecord[Any], kernels: Sequence[_KernelStatus], device: DeviceFacts, console: Console) -> None:
    """The kernels of an op, one per line with its first reason; kernels of a library with one reason share a line."""
    contract = record
    console.heading(f"kernels of {contract.name} ({contract.summary}) on {device}")
    rows: dict[tuple[str, str, str], list[str]] = {}
    for entry in kernels:
        alone = "" if entry.obstacles else entry.kernel.name
        reason = entry.obstacles[0].reason if entry.obstacles else entry.kernel.summary
        rows.setdefault((entry.kernel.backend, alone, reason), []).append(entry.kernel.name)
    made = [
        (named_together(names), "supported" if alone else "rejected", reason)
        for (_, alone, reason), names in rows.items()
    ]
    console.table(
        Table(("kernel", "here", "what it is, or why not"), sorted(made, key=lambda row: row[1] == "rejected"))
    )
    console.line("--all lists each with all reasons and remedies; `kernelhub info KERNEL` prints what a kernel accepts")


def _show_all(
    records: Iterable[OpRecord[Any]],
    backends: Sequence[tuple[Registered, Finding | None]],
    kernels: Sequence[_KernelStatus],
    device: DeviceFacts,
    console: Console,
) -> None:
    console.heading("backends")
    console.table(_backend_table(backends))
    for record in records:
        contract = record
        console.line()
        console.heading(f"kernels of {contract.name} ({contract.summary}) on {device}")
        console.table(_kernel_table(contract.schema, [entry for entry in kernels if entry.kernel.op == contract.name]))


def _matrix(records: Iterable[OpRecord[Any]], as_json: bool, console: Console) -> int:
    """Print what the records accept, as if every library were installed."""
    if as_json:
        console.json({"kernels": [row.to_dict() for record in records for row in matrix.rows(record)]})
        return 0
    for record in records:
        console.heading(f"{record.name}: {record.summary}")
        console.table(Table(matrix.COLUMNS, [matrix.text(row) for row in matrix.rows(record)]))
        console.line()
    console.line(f"{matrix.SOME}: for some problems only; a dash: never. Every library is assumed to be installed.")
    console.line("verified: run there by the project. published: supported by its authors. opt-in: only by name.")
    return 0


@dataclass(frozen=True)
class _KernelStatus:
    """A kernel, and its rejections on this machine for any problem."""

    kernel: Kernel
    obstacles: tuple[Rejection, ...]

    def to_dict(self) -> dict[str, Any]:
        kernel = self.kernel
        return {
            "op": kernel.op,
            "name": kernel.name,
            "summary": kernel.summary,
            "usable_here": not self.obstacles,
            "obstacles": [
                {"code": obstacle.code, "reason": obstacle.reason, "remedy": obstacle.remedy}
                for obstacle in self.obstacles
            ],
            "band": kernel.band.name.lower(),
            "features": sorted(kernel.features),
            "graph": kernel.graph.name.lower(),
            "deterministic": kernel.deterministic,
            "batch_invariant": kernel.batch_invariant,
            "reads_lengths": kernel.reads_lengths,
            "source": kernel.source,
        }


def _kernels(record: OpRecord[Any], device: DeviceFacts) -> list[_KernelStatus]:
    """The kernels of an op, best first for its default problem on this machine."""
    name = record.name
    selection = plain_selection(record.name, device)
    records = {kernel.name: kernel for kernel in HUB.registry.candidates(name).kernels}
    ordered = (records[decision.kernel] for decision in selection.decisions)
    return [_KernelStatus(kernel, obstacles(kernel, selection)) for kernel in ordered]


def _backend_dict(registered: Registered, finding: Finding | None) -> dict[str, Any]:
    backend = registered.backend
    return {
        "name": registered.name,
        "summary": backend.summary if backend else "",
        "origin": registered.origin,
        "built_in": registered.builtin,
        "distribution": registered.distribution,
        "code": registered.code,
        "error": registered.error,
        "package": backend.package if backend else "",
        "homepage": backend.homepage if backend else "",
        "library": dataclasses.asdict(finding) if finding else None,
        "kernels": [f"{kernel.op}:{kernel.name}" for kernel in registered.kernels],
    }


def _backend_table(backends: Sequence[tuple[Registered, Finding | None]]) -> Table:
    columns = ("backend", "state", "library", "what it is", "from", "remedy")
    return Table(columns, [_backend_row(registered, finding) for registered, finding in backends])


def _backend_row(registered: Registered, finding: Finding | None) -> tuple[str, ...]:
    origin = "built in" if registered.builtin else _place(registered)
    if registered.backend is None:
        remedy = "fix or uninstall it, or set KERNELHUB_PLUGINS"
        return (registered.name, "broken", f"{registered.code}: {registered.error}", "", origin, remedy)
    state = "ok" if finding is None or finding.ok else "missing"
    reason, remedy = (finding.reason, finding.remedy) if finding else ("", "")
    return (registered.name, state, reason, registered.backend.summary, origin, remedy)


def _place(registered: Registered) -> str:
    return f"{registered.origin}, {registered.distribution}" if registered.distribution else registered.origin


def _kernel_table(schema: Schema, entries: Sequence[_KernelStatus]) -> Table:
    columns = (
        "kernel",
        "here",
        "band",
        "graph",
        "deterministic",
        "batch invariant",
        "features",
        "what it is",
        "why not",
    )
    return Table(columns, [_kernel_row(schema, entry) for entry in entries])


def _kernel_row(schema: Schema, entry: _KernelStatus) -> tuple[str, ...]:
    kernel = entry.kernel
    return (
        kernel.name,
        "rejected" if entry.obstacles else "supported",
        kernel.band.name.lower(),
        kernel.graph.name.lower(),
        "yes" if kernel.deterministic else "-",
        "yes" if kernel.batch_invariant else "-",
        _features(kernel, schema),
        kernel.summary,
        "; ".join(_reason_text(obstacle) for obstacle in entry.obstacles),
    )


def _features(kernel: Kernel, schema: Schema) -> str:
    missing = sorted(schema.features - kernel.features)
    if len(missing) < _FEW:
        return f"all but {', '.join(missing)}" if missing else "all"
    return ", ".join(sorted(kernel.features)) or "none"


def _reason_text(obstacle: Rejection) -> str:
    return f"{obstacle.reason} ({obstacle.remedy})" if obstacle.remedy else obstacle.reason
