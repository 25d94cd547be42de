"""``kernelhub tune``: measure the fastest correct kernels for a model here, and store the times for selection."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernelhub
from kernelhub.cli.console import Console, Table, steps
from kernelhub.cli.facets import op_named
from kernelhub.cli.options import add_model, add_packing, check_writable, counts, names, seconds, served
from kernelhub.errors import ConfigurationError
from kernelhub.evidence.tuning.decide import WORDS, Regret
from kernelhub.evidence.tuning.report import RegretRow, Tuning


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    add_model(parser)
    add_packing(parser)
    parser.add_argument("--op", action="append", metavar="OP", type=op_named, help="only this op; may be repeated")
    parser.add_argument("--backend", metavar="NAME[,NAME]", type=names, help="only these backends, kernels or globs")
    parser.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: the first GPU, else the CPU)")
    parser.add_argument("--tokens", metavar="N[,N]", type=counts, help="new tokens of a step (default: usual ones)")
    parser.add_argument("--context-len", type=int, default=1024, metavar="N", help="of a sequence (default: 1024)")
    parser.add_argument("--samples", type=int, default=30, metavar="N", help="most of each kernel (default: 30)")
    parser.add_argument(
        "--no-configurations", action="store_true", help="measure kernels with their default tiles only"
    )
    parser.add_argument("--budget-s", metavar="SECONDS", type=seconds, help="begin no new measurement after this time")
    parser.add_argument("--export", metavar="FILE", type=Path, help="write a table file; without --model, of all times")
    parser.add_argument("--import", metavar="FILE", type=Path, dest="table", help="store the times of a table file")
    parser.add_argument("--all", action="store_true", help="print every column of the table")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and nothing else")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measure and print the results; 1 if a kernel was wrong, or nothing could be measured."""
    if arguments.table is not None:
        return _import(arguments, console)
    if arguments.export is not None:
        check_writable("--export", arguments.export)
    if arguments.model is None:
        if arguments.export is None:
            raise ConfigurationError("--model: name a model or a config.json, e.g. --model llama-3.1-70b --tp 8")
        from kernelhub.evidence.tuning.carried import export_stored

        count = export_stored(arguments.export, arguments.device)
        if arguments.json:
            console.json({"file": str(arguments.export), "problem_classes": count})
        else:
            console.line(f"{arguments.export}: {count} problem classes")
        return 0 if count else 1
    ops = None if arguments.op is None else [record.name for record in arguments.op]
    from kernelhub.evidence.tuning.tune import needs_of

    needs = needs_of(arguments.model, ops=ops, **served(arguments))
    if not needs:
        raise ConfigurationError(f"--op: {arguments.model} does not use {' or '.join(ops or ())}")
    try:
        with steps("tuning", len(needs), sys.stderr) as step:
            found = kernelhub.tune(
                needs,
                token_counts=arguments.tokens,
                backend=arguments.backend,
                device=arguments.device,
                context_len=arguments.context_len,
                configurations=not arguments.no_configurations,
                samples=arguments.samples,
                budget_s=arguments.budget_s,
                packing=arguments.packing,
                progress=lambda name, place, number: step(name),
            )
    except KeyboardInterrupt:
        print("kernelhub: interrupted; earlier measurements are stored", file=sys.stderr)
        raise
    if arguments.export is not None:
        found.export(arguments.export)
    if arguments.json:
        console.json(found.to_dict())
    else:
        _show(found, console, everything=arguments.all)
    return 0 if found.ok else 1


def _import(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.model is not None or arguments.export is not None:
        raise ConfigurationError("--import measures and writes nothing else; leave out --model and --export")
    from kernelhub.evidence.tuning.carried import import_table

    entries = import_table(arguments.table, arguments.device)
    if arguments.json:
        console.json({"file": str(arguments.table), "problem_classes": len(entries)})
        return 0 if entries else 1
    console.line(f"{arguments.table}: {len(entries)} problem classes are stored, and used from the next start")
    return 0 if entries else 1


_COLUMNS = ("op", "regime", "tokens", "chosen", "us", "noise", "next", "regret", "order", "order's regret", "why")
_SHOWN = ("op", "regime", "tokens", "chosen", "us", "next", "order's regret")  # fits 120 columns


def _show(found: Tuning, console: Console, *, everything: bool) -> None:
    rows = [row for entry in found.entries for row in _rows(found, entry)]
    if rows:
        columns = _COLUMNS if everything else _SHOWN
        places = [_COLUMNS.index(name) for name in columns]
        console.table(Table(columns, [tuple(row[place] for place in places) for row in rows]))
        if not everything:
            console.line(
                "next: the second fastest, in us; order's regret: extra time of the order's kernel. --all adds columns"
            )
    for (op, kernel), why in found.wrong.items():
        console.line(f"{op} {kernel} is {why}; its time is not used; `kernelhub verify {op}` checks it in detail")
    for item in found.left_out:
        console.line(f"left out: {item.what}: {item.why}")
    console.line(found.summary())
    for sentence in filter(None, (found.unwritten, found.unheeded)):
        console.line(sentence)


def _rows(found: Tuning, entry: Any) -> list[tuple[str, ...]]:
    """A line for each size of a problem class."""
    by_label = {(row.op, tuple(sorted(row.facets.items())), row.label): row for row in found.regret}
    lines: list[tuple[str, ...]] = []
    for size in entry.sizes:
        row: RegretRow | None = by_label.get((entry.op, entry.facets, size.label))
        if row is None:
            continue
        chosen = size.times.get(entry.chosen)
        others = sorted((item.us, name) for name, item in size.times.items() if name != entry.chosen)
        lines.append(
            (
                entry.op,
                entry.regime,
                str(size.tokens),
                entry.chosen + (" (tiles)" if chosen is not None and chosen.configuration is not None else ""),
                "" if chosen is None else f"{chosen.us:.4g}",
                "" if chosen is None else f"{chosen.noise_us:.2g}",
                "" if not others else f"{others[0][1]} {others[0][0]:.4g}",
                _percent(row.chosen_regret),
                row.order,
                _percent(row.order_regret),
                WORDS[entry.word],
            )
        )
    return lines


def _percent(found: Regret | None) -> str:
    return "not measured" if found is None else f"{found.percent:.1f} % ({found.us:.3g} us)"
