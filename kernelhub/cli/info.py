"""``kernelhub info``: the record of a kernel, for each op that has a kernel of that name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from kernelhub.cli import matrix
from kernelhub.cli.console import Console
from kernelhub.cli.facets import ops
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    parser.add_argument("kernel", metavar="KERNEL", help="its name, e.g. triton.split_kv, or OP:KERNEL for one op")
    parser.add_argument("--json", action="store_true", help="print the records as JSON, and nothing else")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the records; an unknown name is an error that suggests the nearest."""
    rows = _rows(arguments.kernel)
    if arguments.json:
        records = [{**row.to_dict(), "orders": _orders(row), "source": row.kernel.source} for row in rows]
        console.json({"kernels": records})
        return 0
    for place, row in enumerate(rows):
        if place:
            console.line()
        _show(row, console)
    return 0


def _rows(name: str) -> list[matrix.Row]:
    _ = HUB.settings
    op, _, kernel = name.rpartition(":")
    rows = [row for record in ops().values() if op in ("", record.name) for row in matrix.rows(record)]
    found = [row for row in rows if row.kernel.name == kernel]
    if not found:
        known = dict.fromkeys(row.kernel.name for row in rows)
        if op and not rows:
            raise ConfigurationError(f"{op!r} is not an op{did_you_mean(op, ops())}; ops: {', '.join(ops())}")
        of_backend = [item for item in known if item.partition(".")[0] == kernel]
        if of_backend:
            raise ConfigurationError(f"{kernel!r} is a backend; give one of its kernels: {', '.join(of_backend)}")
        meant = did_you_mean(kernel, known)
        raise ConfigurationError(f"{kernel!r} is not a kernel{meant}; `kernelhub backends --all` lists them")
    return found


def _show(row: matrix.Row, console: Console) -> None:
    kernel = row.kernel
    console.heading(f"{kernel.name} of {kernel.op}: {kernel.summary}")
    by_word: dict[str, list[str]] = {}
    for device, standing in row.standings.items():
        some = " (some problems)" if row.devices[device] == matrix.SOME else ""
        by_word.setdefault(standing.word.replace("_", "-"), []).append(device + some)
    said = [(word, ", ".join(devices)) for word, devices in by_word.items()] or [("devices", "none known")]
    said += [
        ("limits", "; ".join(row.limits) or "none"),
        ("features", ", ".join(sorted(kernel.features)) or "none"),
        ("lacks", ", ".join(row.missing) or "nothing"),
        ("needs", ", ".join(row.needs) or "nothing"),
        ("weights", " or ".join(kernel.layouts) + (f", packs to {kernel.packs_to}" if kernel.packs_to else "")),
        ("CUDA graphs", kernel.graph.name.lower()),
        ("deterministic", "yes" if kernel.deterministic else "no"),
        ("batch invariant", "yes" if kernel.batch_invariant else "no"),
        ("orders", "; ".join(_orders(row)) or f"none; ranks by its band, {kernel.band.name.lower()}"),
    ]
    if kernel.source:
        said.append(("source", kernel.source))
    console.entries(said)


def _orders(row: matrix.Row) -> list[str]:
    """Its position in each order that names it."""
    lines: Sequence[Any] = HUB.registry.candidates(row.kernel.op).lines
    name = row.kernel.name
    return [
        f"{line.family}/{line.regime}: {line.kernels.index(name) + 1} of {len(line.kernels)}"
        for line in lines
        if name in line.kernels
    ]
