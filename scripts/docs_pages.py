"""Pages of the documentation site that are made at build time: ops, backends, commands, functions, changes.

Each function gives the Markdown of a page from the code itself, so no page can be out of date and none is committed.
`scripts/docs_hooks.py` hands them to mkdocs.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from generate_docs import kernels, results, table  # noqa: E402

from kernelhub.cli import main as command_line  # noqa: E402
from kernelhub.cli import matrix  # noqa: E402
from kernelhub.dispatch.hub import HUB  # noqa: E402
from kernelhub.dispatch.problem import shown  # noqa: E402
from kernelhub.homes import HOMES  # noqa: E402
from kernelhub.ops import functions  # noqa: E402

GUIDES = ROOT / "docs"
API_PART = re.compile(r"<!-- api of (\w+): made by scripts/generate_docs.py -->.*?<!-- end -->", re.DOTALL)
KERNELS_PART = re.compile(r"<!-- kernels of (\w+): made by scripts/generate_docs.py -->.*?<!-- end -->", re.DOTALL)
RESULTS = ("attention_h200", "mla_h200", "gemm_h200", "grouped_gemm_h200", "moe_h200", "indexer_h200", "quant_h200")
RESULTS_OF_A_CPU = tuple(f"{benchmark}_two_threads_epyc" for benchmark in ("attention", "mla", "gemm", "moe"))


def ops() -> dict[str, Any]:
    """Every op by its name."""
    return {function.op.contract.name: function for function in functions()}


def guide_of(op: str) -> Path:
    """The hand-written page about an op: the one that holds its generated signature."""
    part = f"<!-- api of {op}: made by"
    return next(page for page in sorted(GUIDES.glob("*.md")) if part in page.read_text())


def guides() -> list[str]:
    """The hand-written pages about families of ops, in the order of the ops."""
    return list(dict.fromkeys(guide_of(op).name for op in ops()))


def op_page(op: str) -> str:
    """Signature, features, kernels with their limits, and measured times of one op."""
    contract = ops()[op].op.contract
    guide = guide_of(op)
    home = HOMES[op]
    parts = [
        f"# {op}\n\n{_sentence(contract.summary)} Conventions, examples and tolerances: "
        f"[{_title(guide)}](../{guide.name}).",
        f"::: {home}.{op}\n    options:\n      heading: kernelhub.{op}",
        f"## Features\n\n{_features(op)}",
        f"## Facets\n\nA facet is one fact that selection may read. Flags of `kernelhub explain {op}` set facets, and "
        f"so do keyword arguments of `kernelhub.explain`.\n\n{_facets(op)}",
        f"## Kernels\n\n{kernels(op)}",
        f"## Devices and limits\n\n[Trust](../trust.md#standing) defines the standings.\n\n{_limits(op)}",
        f"## Measured\n\n{_measured(op)}",
    ]
    return "\n\n".join(parts) + "\n"


def ops_index() -> str:
    """All ops with one line each."""
    rows = [(f"[`{op}`]({op}.md)", _sentence(function.op.contract.summary)) for op, function in ops().items()]
    families = "\n".join(f"- [{_title(GUIDES / name)}](../{name})" for name in guides())
    return (
        "# Ops\n\nAn op is one operation that a user can call. Each op has a page with its signature, features, "
        f"kernels and measured times.\n\n{table(('op', 'description'), rows)}\n\n## Families\n\nThese pages state "
        f"the conventions of a family: layouts, scales, tolerances.\n\n{families}\n"
    )


def backend_kernels(backend: str) -> str:
    """The kernels of a backend, as its page shows them."""
    rows = []
    for row in (row for function in functions() for row in matrix.rows(function.op.contract)):
        if row.kernel.backend != backend:
            continue
        devices: dict[str, list[str]] = {}
        for device, standing in row.standings.items():
            devices.setdefault(standing.word.replace("_", "-"), []).append(device)
        where = "; ".join(f"{word}: {', '.join(names)}" for word, names in devices.items())
        rows.append(
            (f"`{row.kernel.name}`", f"[`{row.kernel.op}`](../ops/{row.kernel.op}.md)", row.kernel.summary, where)
        )
    return f"## All kernels of `{backend}`\n\n{table(('kernel', 'op', 'description', 'standing'), rows)}\n"


def backends() -> tuple[str, ...]:
    """The names of the built-in backends."""
    _ = HUB.settings
    return tuple(
        sorted(path.name for path in (ROOT / "kernelhub" / "backends").iterdir() if path.name in HUB.registry.backends)
    )


def commands_page() -> str:
    """The reference of the command line: the help text that each command's parser prints."""
    parts = [
        "# Command line\n\nThis page is the `--help` text of each command. `python -m kernelhub` does the same as "
        "`kernelhub`.",
        f"```text\n{_said('--help')}\n```",
    ]
    for name, command in command_line.COMMANDS.items():
        schema = f"[The JSON Schema](../schemas/{name}.json) describes the output with `--json`."
        said = f"```text\n{_said(name, '--help')}\n```"
        parts.append(f"## kernelhub {name}\n\n{_sentence(command.summary)} {schema}\n\n{said}")
    return "\n\n".join(parts) + "\n"


def python_page() -> str:
    """Every public name that is not an op, with its signature from the source."""
    known = ops()
    parts = ["# Python reference\n\nThese public names are not ops. Each op has [its own page](../ops/index.md)."]
    for name, home in sorted(HOMES.items()):
        if name not in known:
            parts.append(f"::: {home}.{name}\n    options:\n      heading: kernelhub.{name}\n      members: false")
    for title, module in (("Tests of kernels", "kernelhub.testing"), ("Errors", "kernelhub.errors")):
        parts.append(
            f"## {title}\n\n::: {module}\n    options:\n      show_root_heading: false\n      heading_level: 3"
        )
    return "\n\n".join(parts) + "\n"


def changes_page() -> str:
    """CHANGELOG.md, with links that start at the folder of the pages."""
    return (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")


def for_the_site(text: str) -> str:
    """A hand-written page whose signatures and kernels are links to the pages of the ops."""
    text = API_PART.sub(r"Signature, arguments and example: [`kernelhub.\1`](ops/\1.md).", text)
    return KERNELS_PART.sub(
        r"Kernels of `\1`: [list](ops/\1.md#kernels), [limits](ops/\1.md#devices-and-limits).", text
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def _title(page: Path) -> str:
    return page.read_text().split("\n", 1)[0].removeprefix("# ")


def _said(*arguments: str) -> str:
    """The output of a command, in lines of 100 columns."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = command_line.main(arguments)
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    if code != 0:
        raise RuntimeError(f"kernelhub {' '.join(arguments)} ended with {code}")
    return printed.getvalue().rstrip()


def _features(op: str) -> str:
    """The kernels that support each feature of an op."""
    rows = matrix.rows(ops()[op].op.contract)
    features = sorted(ops()[op].op.contract.schema.features)
    if not features:
        return "This op has no optional feature: every kernel computes the same."
    listed = [
        (f"`{feature}`", ", ".join(f"`{row.kernel.name}`" for row in rows if feature in row.kernel.features))
        for feature in features
    ]
    return (
        "A call uses a feature when it passes the argument. Selection rejects the kernels that do not "
        "support the feature. [Features of other libraries](../features.md) lists features that kernelhub lacks.\n\n"
        f"{table(('feature', 'kernels'), listed)}"
    )


def _facets(op: str) -> str:
    contract = ops()[op].op.contract
    defaults = {field.name: field.default for field in fields(contract.problem)}
    rows = []
    for facet in contract.schema.facets.values():
        if facet.name != "device":
            kind = "feature" if facet.semantic else "size" if facet.size else "structure"
            values = ", ".join(map(shown, facet.values)) or "a positive number"
            rows.append((f"`{facet.name}`", kind, facet.doc, values, shown(defaults[facet.name])))
    return table(("facet", "kind", "meaning", "values", "default"), rows)


def _limits(op: str) -> str:
    cells = [matrix.text(row) for row in matrix.rows(ops()[op].op.contract)]
    return table(matrix.COLUMNS, [(f"`{first}`", *rest) for first, *rest in cells])


def _measured(op: str) -> str:
    """The cases of every benchmark of an op: the selected kernel's time beside those of torch and of other kernels."""
    header = ("case", "selected", "ms", "torch, ms", "other kernels, ms")
    parts = []
    for name in (*RESULTS, *RESULTS_OF_A_CPU):
        result = results(f"{name}.json")
        of_op = [row for row in result["rows"] if row["op"] == op]
        if of_op:
            head = (
                f"**{result['device']}**, torch {result['torch']}, {result['date']}; `benchmarks/results/{name}.json`"
            )
            parts.append(f"{head}\n\n{table(header, [_times(row) for row in of_op])}")
    return "\n\n".join(parts) or "No benchmark times this op yet."


def _times(row: dict[str, Any]) -> tuple[str, ...]:
    ours, chosen = row["kernels_ms"], row["chosen"]
    torch_ms = row.get("torch_ms") or {}
    best = min(torch_ms, key=torch_ms.__getitem__, default=None)
    others = ", ".join(f"`{kernel}` {ms:.3g}" for kernel, ms in ours.items() if kernel != chosen)
    shown = "-" if best is None else f"{torch_ms[best]:.3g} ({best})"
    return (row["case"], f"`{chosen}`", f"{ours[chosen]:.3g}", shown, others or "-")
