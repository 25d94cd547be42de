"""Rewrite the generated parts of README.md and docs/: tables of variables, kernels and results, the API, the picture.

A part stands between ``<!-- name: made by scripts/generate_docs.py -->`` and ``<!-- end -->``. With ``--check``
nothing is written, and the exit code is 1 if a part is out of date.

Nothing here depends on the machine: kernels are described by their records, selections are those on simulated devices,
figures come from benchmarks/results.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import relative_time  # noqa: E402
import serving_page  # noqa: E402
import verification_page  # noqa: E402

import kernelhub  # noqa: E402
from kernelhub.cli import matrix  # noqa: E402
from kernelhub.cli.defects import kernels_of, words  # noqa: E402
from kernelhub.cli.schemas import SHAPES, schema_of  # noqa: E402
from kernelhub.compat.env.attention import ATTENTION  # noqa: E402
from kernelhub.compat.env.experts import EXPERTS  # noqa: E402
from kernelhub.compat.env.gemm import GEMM  # noqa: E402
from kernelhub.dispatch.hub import HUB  # noqa: E402
from kernelhub.dispatch.settings import VARIABLES  # noqa: E402
from kernelhub.ops import functions  # noqa: E402
from kernelhub.runtime.caches.notices import CODES  # noqa: E402
from tests.faults.record import FIXTURES, NOTHING  # noqa: E402
from tests.faults.records import FAULTS  # noqa: E402

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PART = re.compile(r"(<!-- ([a-z0-9_ ]+): made by scripts/generate_docs.py -->\n).*?(<!-- end -->)", re.DOTALL)
OPS = tuple(function.op.contract.name for function in functions())
INSTALLED = kernelhub.SimulatedMachine({"torch": "2.13.0", "triton": "3.7.1"})
DEVICES = ("CPU", "A100", "L40S", "H200", "B200", "RTX5090", "MI300X")  # one of each family
COLUMNS = (DEVICES[0], "ZEN4", "XEON", *DEVICES[1:])  # CPUs with AVX-512 BF16 and with AMX have kernels of their own


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def variables() -> str:
    rows = []
    for variable in VARIABLES.values():
        default = variable.default
        if default in (None, ()):
            shown = ""
        elif isinstance(default, tuple):
            shown = ",".join(default)
        else:
            shown = f"{default:g}" if isinstance(default, bool | float) else str(default)
        rows.append((f"`{variable.name}`", f"`{variable.grammar}`", shown, variable.doc))
    return table(("variable", "value", "default", "effect"), rows)


def engines() -> str:
    rows = [
        (f"`{variable.name}`", variable.grammar, f"`{variable.successor}`" if variable.successor else "itself")
        for variable in (*ATTENTION, *GEMM, *EXPERTS)
    ]
    return table(("variable", "accepted values", "vLLM 0.33 reads"), rows)


def kernels(op: str) -> str:
    _ = HUB.settings
    rows = []
    for kernel in sorted(HUB.registry.candidates(op).kernels, key=lambda kernel: kernel.name):
        promises = [
            *(["deterministic"] if kernel.deterministic else []),
            *(["batch invariant"] if kernel.batch_invariant else []),
            *(["needs lengths on the host"] if kernel.reads_lengths else []),
            f"CUDA graphs: {kernel.graph.name.lower().replace('_', ' ')}",
        ]
        features = ", ".join(sorted(kernel.features)) or "none"
        rows.append((f"`{kernel.name}`", kernel.summary, features, "; ".join(promises)))
    return table(("kernel", "description", "features", "promises"), rows)


def choices() -> str:
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "prefill": ("attention", {"q_len": "many", "causal": True}),
        "prefill, sliding window": ("attention", {"q_len": "many", "causal": True, "window_left": True}),
        "prefill, ragged": ("attention", {"q_len": "any", "causal": True, "ragged": True}),
        "paged decode": ("paged_attention", {}),
        "paged decode, softcap": ("paged_attention", {"softcap": True}),
        "paged, prefill and decode mixed": ("paged_attention", {"ragged": True, "q_len": "any"}),
        "latent attention": ("mla_attention", {}),
        "fp8 product, scaled by tensor": ("fp8_gemm", {"scaling": "tensor"}),
        "fp8 product, scaled by block": ("fp8_gemm", {}),
        "grouped product, decode": ("grouped_gemm", {}),
        "grouped product, prefill": ("grouped_gemm", {"rows": "many"}),
        "experts, bfloat16": ("fused_moe", {}),
        "experts, fp8 blocks": ("fused_moe", {"weights": "fp8_block", "activation_dtype": "float8_e4m3fn"}),
    }
    rows = []
    for label, (op, facets) in cases.items():
        selections = [kernelhub.explain(op, device=device, machine=INSTALLED, **facets).selected for device in COLUMNS]
        rows.append((label, *(f"`{name}`" for name in selections)))
    return table(("", *COLUMNS), rows)


# Libraries that users of each family have beside torch and Triton, and the most frequent problems of their models.
LIBRARIES = {
    "triton": "3.7.1",
    "flashinfer": "0.6.18.post1",
    "cudnn": "1.32.0",
    "deep_gemm": "2.5.0",
    "flash_mla": "1.0.0",
    "flash_attn": "2.8.3",
    "flash_attn_interface": "3.0.0",
    "vllm": "0.33.0",
}
_HEADS = {"num_q_heads": 64, "num_kv_heads": 8}
OF_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "prefill, ragged": ("attention", {**_HEADS, "q_len": "any", "ragged": True, "causal": True}),
    "paged decode": ("paged_attention", {**_HEADS, "q_len": "one"}),
    "latent decode": ("mla_attention", {"num_heads": 128, "q_len": "one", "page_size": 64}),
    "fp8 in blocks, many rows": ("fp8_gemm", {"n": 7168, "k": 2048, "rows": "many"}),
    "nvfp4": ("fp4_gemm", {"a_format": "nvfp4", "b_format": "nvfp4"}),
}


def families() -> str:
    """The kernels selected on each family of devices, without and with the libraries that users have, after warm-up."""
    rows = []
    for device in DEVICES[1:]:
        for label, packages, evidence in (
            ("no libraries", {"triton": "3.7.1"}, ()),
            ("with libraries", LIBRARIES, ("*",)),
        ):
            machine = kernelhub.SimulatedMachine(packages, verified=evidence)
            cells = [_and_how(op, device, machine, facets) for op, facets in OF_FAMILIES.values()]
            rows.append((f"{device}, {label}", *cells))
    return table(("", *OF_FAMILIES), rows)


def _and_how(op: str, device: str, machine: Any, facets: dict[str, Any]) -> str:
    """The selected kernel, with a mark if the user's machine has to verify it first."""
    selection = kernelhub.explain(op, device=device, machine=machine, **facets)
    word = selection.kernel.standing_on(selection.problem.device.family).word
    portable = selection.kernel in HUB.registry.candidates(op).portable
    return f"`{selection.selected}`{'' if word == 'verified' or portable else ' †'}"


def explanation() -> str:
    """A selection, with one rejected kernel for each code."""
    selection = kernelhub.explain("fp8_gemm", device="H200", machine=INSTALLED, rows="many")
    codes: set[str] = set()
    lines, left, shown = [], 0, True
    for line in str(selection).splitlines():
        rejected = re.match(r"  - \S+ +(\w+):", line)
        if rejected:
            shown = rejected[1] not in codes
            left += not shown
            codes.add(rejected[1])
        if shown:
            lines.append(line)
    return "\n".join(["```text", *lines, f"  ... and {left} more, each with its reason", "```"])


def api(name: str) -> str:
    function = getattr(kernelhub, name)
    lines = [str(parameter) for parameter in inspect.signature(function).parameters.values()]
    named = [parameter.kind is parameter.KEYWORD_ONLY for parameter in inspect.signature(function).parameters.values()]
    if any(named):
        lines.insert(named.index(True), "*")
    parameters = ",\n".join(f"    {line}" for line in lines)
    return f"```python\nkernelhub.{name}(\n{parameters},\n)\n```\n\n```text\n{inspect.getdoc(function)}\n```"


def results(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return document


def measured(name: str) -> str:
    """Every case of an attention benchmark."""
    result = results(name)
    rows = []
    for row in result["rows"]:
        ours = row["kernels_ms"]
        best = min(row["torch_ms"].values(), default=None)
        chosen = ours[row["chosen"]]
        host = row.get("host_us", {}).get(row["chosen"])
        others = ", ".join(f"{kernel} {ms:.3g}" for kernel, ms in ours.items() if kernel != row["chosen"])
        rows.append(
            (
                row["case"],
                f"`{row['chosen']}`",
                f"{chosen:.3g}",
                "torch has no such op" if best is None else f"{best:.3g}",
                f"{100 * row['roof_ms'] / chosen:.0f} %",
                *([] if host is None else [f"{host:.0f}"]),
                others,
            )
        )
    roof = result["roofs"]
    head = (
        f"{result['device']}, torch {result['torch']}, {result['date']}. Roof: reads at "
        f"{roof['bytes_per_s'] / 1e9:,.0f} GB/s, {roof['operations_per_s'] / 1e12:,.3g} TFLOP/s in bfloat16.\n\n"
    )
    host_column = ("host, µs",) if result["rows"][0].get("host_us") else ()
    return head + table(
        ("case", "selected", "ms", "fastest torch, ms", "of the roof", *host_column, "other kernels, ms"), rows
    )


# Cases of benchmarks/results on an H200 that the README shows: what is done, the benchmark, the case.
HEADLINES = (
    ("routing, DeepSeek V3.2, 4096 tokens", "moe_with_gluon", "routing deepseek-v3.2, 4096 tokens"),
    (
        "FP8 experts, DeepSeek V3.2 / 8, 4096 tokens",
        "moe_with_gluon",
        "deepseek-v3.2, 256 experts of 256, fp8_block, 4096 tokens",
    ),
    (
        "FP8 experts, DeepSeek V3.2 / 8, 64 tokens",
        "moe_with_gluon",
        "deepseek-v3.2, 256 experts of 256, fp8_block, 64 tokens",
    ),
    ("experts, Qwen3 30B-A3B, 64 tokens", "moe_with_gluon", "qwen3-30b-a3b, 128 experts of 768, plain, 64 tokens"),
    (
        "FP8 block-scaled, 24576 x 1536, 4096 rows",
        "gemm_with_cuda",
        "deepseek-v3.2 q_b 24576 x 1536, scaled by block, 4096 rows",
    ),
    (
        "FP8 block-scaled, 7168 x 2304, 1024 rows",
        "gemm_with_cuda",
        "deepseek-v3.2 down / 8 7168 x 2304, scaled by block, 1024 rows",
    ),
    ("FP8 block-scaled, 7168 x 18432, 16 rows", "gemm", "deepseek-v3.2 down 7168 x 18432, scaled by block, 16 rows"),
    ("latent decode, 128 heads, 32 x 8192 tokens", "mla_with_cuda", "decode, 128 heads, 32 x 8192, bfloat16"),
    ("latent decode, 16 heads, 8 x 8192 tokens", "mla_with_cuda", "decode, 16 heads, 8 x 8192, bfloat16"),
    ("prefill, Llama 3.1 8B, 8 x 2048 tokens", "attention", "prefill llama-3.1-8b, 8 x 2048, bfloat16"),
    (
        "paged decode, Llama 3.1 8B, 64 x 4096 tokens",
        "attention_with_cuda",
        "paged decode llama-3.1-8b, 64 x 4096, bfloat16 KV",
    ),
    ("latent decode, 16 heads, 64 x 4096 tokens", "mla_with_cuda", "decode, 16 heads, 64 x 4096, bfloat16"),
    ("NVFP4 weights, 10240 x 8192, 256 rows", "gemm_with_cuda", "llama-3.1-70b qkv 10240 x 8192, nvfp4, 256 rows"),
    ("MXFP8, 7168 x 2304, 1024 rows", "gemm_mx", "deepseek-v3.2 down / 8 7168 x 2304, scaled by mx, 1024 rows"),
)


def headlines() -> str:
    """A few cases of each benchmark on an H200, won and lost, beside torch's fastest call; best first."""
    rows = []
    for what, benchmark, case in HEADLINES:
        result = results(f"{benchmark}_h200.json")
        row = next(row for row in result["rows"] if row["case"] == case)
        ms, best = row["kernels_ms"][row["chosen"]], min(row["torch_ms"], key=row["torch_ms"].__getitem__)
        times = f"{row['torch_ms'][best]:.3g} ({best})"
        rows.append(
            (row["torch_ms"][best] / ms, (what, f"`{row['op']}`", f"`{row['chosen']}`", f"{ms:.3g}", times), result)
        )
    rows.sort(key=lambda row: -row[0])
    versions = {(result["device"].split(",")[0], result["torch"]) for _, _, result in rows}
    ((device, torch_version),) = versions
    header = (
        "case",
        "op",
        "selected kernel",
        "kernelhub [ms]",
        f"torch {torch_version} [ms] (fastest call)",
        "speed-up",
    )
    *before, last = sorted({result["date"] for _, _, result in rows})
    days = f"{', '.join(before)} and {last}" if before else last
    said = (
        f"Median times on an {device}, {days}, without kernels of vendors' libraries, of the kernels that were "
        "selected then. A speed-up below 1 is a loss."
    )
    return f"{said}\n\n{table(header, [(*cells, f'{ratio:.2g} x') for ratio, cells, _ in rows])}"


def first_call() -> str:
    """The kernel that runs the README's first call, on a few devices."""
    facets = {"q_dtype": "float32", "kv_dtype": "float32", "num_q_heads": 8, "num_kv_heads": 8, "head_dim_qk": 64}
    facets |= {"head_dim_vo": 64, "q_len": "many", "causal": True, "window_left": True}
    width = max(map(len, DEVICES))
    lines = [
        f"{device:<{width}}  {kernelhub.explain('attention', device=device, machine=INSTALLED, **facets).selected}"
        for device in DEVICES
    ]
    return "\n".join(["```text", *lines, "```"])


# The same of a CPU, with cases where plain torch is faster.
HEADLINES_OF_A_CPU = (
    (
        "fp8 product in blocks, 7168 x 2304, 1 row",
        "gemm",
        "deepseek-v3.2 down / 8 7168 x 2304, scaled by block, 1 rows",
    ),
    ("the same, 256 rows", "gemm", "deepseek-v3.2 down / 8 7168 x 2304, scaled by block, 256 rows"),
    ("experts in fp8, DeepSeek V3.2 / 8, 1 token", "moe", "deepseek-v3.2, 8 experts of 256, fp8_block, 1 tokens"),
    ("prefill, Llama 3.1 8B, 512 tokens", "attention", "prefill llama-3.1-8b, 1 x 512, bfloat16"),
    ("decode, Llama 3.1 8B, 8 x 2048 tokens", "attention", "decode llama-3.1-8b, 8 x 2048, bfloat16 KV"),
    ("paged decode, the same", "attention", "paged decode llama-3.1-8b, 8 x 2048, bfloat16 KV"),
    ("latent attention, 16 heads, 8 x 2048 tokens", "mla", "decode, 16 heads, 8 x 2048, bfloat16"),
)


def headlines_of_a_cpu() -> str:
    """The same of a CPU, beside the fastest way to call plain torch, by its name."""
    rows = []
    for what, benchmark, case in HEADLINES_OF_A_CPU:
        row = next(row for row in results(f"{benchmark}_two_threads_epyc.json")["rows"] if row["case"] == case)
        best = min(row["torch_ms"], key=row["torch_ms"].__getitem__)
        ratio = row["torch_ms"][best] / row["kernels_ms"][row["chosen"]]
        rows.append((what, f"`{row['op']}`", f"`{row['chosen']}`", best, f"{ratio:.2g} x"))
    return table(("case on 2 cores of a CPU", "op", "selected", "fastest torch call", "speed-up"), rows)


def standing() -> str:
    """The number of kernels of each backend with each standing on each family of devices, by the records."""
    words: dict[str, dict[str, Counter[str]]] = {}
    kernels_of: Counter[str] = Counter()
    for row in (row for function in functions() for row in matrix.rows(function.op.contract)):
        backend = row.kernel.backend
        kernels_of[backend] += 1
        of_backend = words.setdefault(backend, {name: Counter() for name in COLUMNS})
        for name in row.standings.keys() & of_backend.keys():
            of_backend[name][row.standings[name].word.replace("_", "-")] += 1

    def cell(count: Counter[str]) -> str:
        return ", ".join(f"{number} {word}" for word, number in sorted(count.items(), reverse=True)) or "-"

    rows = [(f"`{name}`", str(kernels_of[name]), *map(cell, words[name].values())) for name in sorted(words)]
    return table(("backend", "kernels", *COLUMNS), rows)


def cost() -> str:
    """The cost of selection on both machines."""
    labels = {
        "cached_call": "selection in a call",
        "override_call": "selection in a call with `backend=`",
        "launch_ns": "a whole call without the kernel's launch: selection and checks",
        "plan_run": "a plan's `step.run` without the kernel's launch",
        "miss": "the first call of a configuration",
        "import": "`import kernelhub` and both ops, after `import torch`",
    }
    columns = [results(name) for name in ("dispatch_cpu.json", "dispatch_h200.json")]
    rows = []
    for key, label in labels.items():
        cells = []
        for column in columns:
            ns = column["cached_call"]["launch_ns"] if key == "launch_ns" else column[key]["ns"]
            ratio = ns / column["empty_call"]["ns"]
            cells.append(f"{ns / 1e6:.0f} ms" if ns > 1e6 else f"{ns / 1e3:.2g} µs" if ns > 1e4 else f"{ns:.0f} ns")
            if ns < 1e4:
                cells[-1] += f" = {ratio:.0f} empty calls" if ratio >= 10 else f" = {ratio:.2g} empty calls"
        rows.append((label, *cells))
    entries = [str(column["table"]["entries"]) for column in columns]
    rows.append(("entries in the table of plans after 100,000 different lengths", *entries))
    rows.insert(0, ("an empty call", *(f"{column['empty_call']['ns']:.0f} ns" for column in columns)))
    machines = [", ".join(column["machine"].split(", ")[1:]) for column in columns]
    return table(("", f"2-core CPU ({machines[0]})", f"host of an H200 ({machines[1]})"), rows)


def cost_of_ops() -> str:
    """The cost of a call of every op without its kernel's launch, on the machines where it was measured."""
    machines = {"2-core CPU": results("dispatch_cpu.json"), "host of an H200": results("dispatch_h200.json")}
    measured = {name: result for name, result in machines.items() if "ops" in result}
    columns = {
        "call": "a call",
        "fresh": "without destinations",
        "plan": "a plan's run",
        "miss": "the first call of a configuration",
    }
    rows = []
    for op in OPS:
        cells = []
        for result in measured.values():
            cost = result["ops"].get(op)
            if cost is None:
                cells += ["not measured"] * len(columns)
                continue
            cells.append(f"{cost['ns'] / 1e3:.1f} µs = {cost['ratio']:.0f} empty calls")
            cells += [f"{cost[name + '_ns'] / 1e3:.2g} µs" for name in columns if name != "call"]
        rows.append((f"`{op}`", *cells))
    header = [f"{label}, {name}" if len(measured) > 1 else label for name in measured for label in columns.values()]
    return table(("op", *header), rows)


def launching() -> str:
    """What launches keep the host of a GPU, by kernelhub's launcher and by Triton's."""
    result = results("launch_h100.json")
    rows = [(what, f"{us:.1f} µs") for what, us in result["us"].items()]
    where = f"{result['device']}, {result['machine']}, {result['date']}, launching as in commit {result['commit']}."
    return f"{where}\n\n{table(('on the host', 'time'), rows)}"


def launches_as_graphs() -> str:
    """What the driver takes for launches one by one, and as one graph."""
    result = results("launches_h200.json")
    rows = [row for row in result["rows"] if row["shared_bytes"] == 0]
    header = ("launches", *rows[0]["us"])
    where = f"{result['device']}, {result['driver_api']}, {result['date']}, µs on the host, the driver alone."
    cells = [(str(row["launches"]), *[f"{us:.1f}" for us in row["us"].values()]) for row in rows]
    return f"{where}\n\n{table(header, cells)}"


def calls_as_graphs() -> str:
    """Eager calls by plain launches and as CUDA graphs."""
    result = results("graphs_h200.json")
    facts, rows = result["facts"], []
    for op, ways in result["ops"].items():
        before, after = ways["kernels"], ways["own"]
        rows.append((f"`{op}`", *[f"{way[form]:.1f}" for form in ("call", "layers", "gpu") for way in (before, after)]))
    columns = ("host, plain", "graphs", "host, 4 layers in turn, plain", "graphs", "GPU, plain", "graphs")
    where = f"{facts['device']}, {facts['machine']}, {facts['date']}; {facts['note']}."
    return f"{where}\n\n{table(('µs', *columns), rows)}"


def eager_calls() -> str:
    """Whole eager calls of every op, from all machines that they were measured on."""
    parts = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("host_*.json")):
        result = results(path.name)
        facts = result["facts"]
        rows = [
            (f"`{op}`", *[f"{both['own'][form]:.1f}" if form in both["own"] else "" for form in _FORMS])
            for op, both in result["ops"].items()
        ]
        where = f"{facts['device']}, {facts['machine']}, {facts['date']}; "
        where += f"torch fills one element in {facts['fill']:.1f} µs."
        where += f" Of these figures: {facts['note']}." if "note" in facts else ""
        header = (
            "µs",
            "a call with destinations",
            "the same of four layers in turn",
            "without",
            "a plan's or step's run",
        )
        parts.append(f"{where}\n\n{table(header, rows)}")
    command = "python benchmarks/host.py --ways own --out benchmarks/results/host_h200.json"
    return "\n\n".join(parts) or f"Not measured yet: `{command}` on a GPU writes the data of this table."


_FORMS = ("call", "layers", "fresh", "plan")  # as `benchmarks/host.py` names them


def every_kernel() -> list[tuple[str, str]]:
    """(op, kernel) of all records."""
    return [(op, name) for op, function in zip(OPS, functions(), strict=True) for name in function.kernels()]


def matrix_of_ops() -> str:
    """The problems that every record supports, a table per op."""
    parts = []
    for op, function in zip(OPS, functions(), strict=True):
        rows = [
            tuple(f"`{cell}`" if place == 0 else cell for place, cell in enumerate(matrix.text(row)))
            for row in matrix.rows(function.op.contract)
        ]
        parts.append(f"### `{op}`\n\n{table(matrix.COLUMNS, rows)}")
    return "\n\n".join(parts)


def defects() -> str:
    """The known defects in the records."""
    _ = HUB.settings
    rows = []
    for registered in HUB.registry.backends.values():
        for entry in registered.known_bad:
            ops = dict.fromkeys(f"`{kernel.op}`" for kernel in kernels_of(entry, registered.kernels))
            number = "/".join(entry.issue.split("/")[3:5]) + "#" + entry.issue.rpartition("/")[2]
            remedy = f"`{entry.remedy}`" if entry.remedy else ""
            where = words(entry.where)
            rows.append(
                (f"`{entry.kernel}`", ", ".join(ops), where, entry.symptom, f"[{number}]({entry.issue})", remedy)
            )
    return table(("kernel", "op", "condition", "symptom", "report", "fix"), rows)


def codes() -> str:
    """Stable codes of decisions with their meanings."""
    meanings = {
        "selected": "the kernel that runs",
        "supported": "supported; another kernel is expected to be faster, or is preferred",
        "not_faster": "a heuristic of its library does not expect it to be faster for this problem",
        "not_requested": "supported; another kernel was requested",
        "disabled": "disabled by a variable, file, context or `configure`",
        "refused_by_rank": "unsupported on another rank; the reason names the rank and its reason",
        "not_locked": "`KERNELHUB_LOCK_MISSING` is `error`, and the lock file has no entry for the problem",
        "vendor": "needs another kind of device",
        "capability": "needs another generation of GPU",
        "dtype": "does not support this dtype",
        "value": "does not support this value of a facet",
        "range": "a size is outside the supported range",
        "divisibility": "a size is not a multiple of the required number",
        "mismatch": "two facets that must be equal differ",
        "feature": "does not support a feature that the call uses",
        "layout": "the weights are packed for another kernel, or the kernel needs packed weights",
        "rule": "a further condition of the kernel fails; the reason names it",
        "part": "one of the ops that the kernel is made of has no kernel; the reason names the op and why",
        "nondeterministic": "`deterministic` is set, and the kernel is not deterministic",
        "batch_variant": "`batch_invariant` is set, and the kernel is not batch invariant",
        "known_bad": "known to give wrong numbers for this problem or machine; the reason links the report",
        "quarantined": "`kernelhub verify`, or an audit ([audit.md](audit.md)), found it wrong on this machine; the "
        "reason gives the size of the error and the date ([verify.md](verify.md))",
        "no_adapter": "kernelhub does not call this library; the reason says why",
        "package_missing": "its library is not installed",
        "package_version": "the installed version of its library is unsupported",
        "package_broken": "its library is installed but unreadable",
        "symbol_missing": "its library lacks a required function",
        "symbol_unknown": "its library could not be searched for a required function",
        "signature_changed": "its library has the required function with other parameters",
        "not_compiled": "its library was built without a required part",
        "jit_disabled": "the kernel is compiled at first use, but a variable of its library disables compilation",
        "cubins_missing": "its binaries are not on this machine; the first call would download them",
        "toolkit_missing": "no CUDA toolkit was found",
        "toolkit_broken": "the CUDA toolkit's compiler fails, or prints no version",
        "toolkit_hangs": "the CUDA toolkit's compiler does not answer",
        "toolkit_killed": "the CUDA toolkit's compiler was killed, most often for lack of memory",
        "toolkit_headers": "the CUDA toolkit's headers are missing, or have another version",
        "driver_old": "the driver is too old for the code of the CUDA toolkit",
        "toolkit_version": "the CUDA toolkit is too old for the kernel",
        "compiler_missing": "no C compiler was found",
        "not_prebuilt": "the package carries no compiled C++ kernels for CPUs; the first use compiles them",
        "headers_missing": "Python's headers were not found",
        "cache_unwritable": "its compiled code cannot be stored",
        "cache_not_a_folder": "its compiled code cannot be stored: the path of the folder is a file",
        "cache_read_only": "its compiled code cannot be stored: the file system is read-only",
        "cache_full": "its compiled code cannot be stored: the disk is full",
        "cache_other_user": "its compiled code cannot be stored: the folder belongs to another user",
        "cache_noexec": "its compiled code can be stored but not loaded: the file system is mounted noexec",
        "interpreter_off": "on a CPU the kernel runs only under Triton's interpreter, which is off",
        "load_failed": "its import or preparation failed; the reason has the error",
        "load_timeout": "its import took longer than `KERNELHUB_LOAD_TIMEOUT_S`",
        "load_symbol": "its compiled library lacks a symbol, because it is built for another torch",
        "load_library": "its compiled library needs a library that is missing, such as `libcudart.so.12`",
        "load_file": "its compiled library is damaged, or built for another system or processor",
        "load_killed": "a compiler that the kernel runs was killed, most often for lack of memory",
        "load_hangs": "a compiler that the kernel runs does not end",
        "constraint_error": "a third party's constraint raised, or returned an invalid value",
    }
    return table(("code", "meaning"), [(f"`{code}`", meaning) for code, meaning in meanings.items()])


def cache_codes() -> str:
    rows = [(f"`{code}`", meaning, remedy) for code, (meaning, remedy) in CODES.items()]
    return table(("code", "meaning", "remedy"), rows)


def adapters() -> str:
    """The class that a kernel of each op subclasses."""
    rows = []
    for function in functions():
        contract = function.op.contract
        path = contract.adapter.__module__.replace(".", "/") + ".py"
        problem = contract.problem.__module__.replace(".", "/") + ".py"
        rows.append((f"`{contract.name}`", f"[`{contract.adapter.__name__}`](../{path})", f"[facets](../{problem})"))
    return table(("op", "adapter class", "problem"), rows)


def faults() -> str:
    """Every kind of fault, where its effect is visible, and its faults."""
    parts = []
    for fixture, (title, seen) in FIXTURES.items():
        rows = [
            (
                fault.injected,
                "none: no effect" if fault.code == NOTHING else f"`{fault.code}`",
                fault.remedy,
            )
            for fault in FAULTS.values()
            if fault.fixture == fixture
        ]
        head = f"### {title[0].upper()}{title[1:]}\n\nSymptom: {seen}."
        parts.append(f"{head}\n\n{table(('injected fault', 'code', 'remedy'), rows)}")
    return "\n\n".join(parts)


PARTS: dict[str, Callable[[], str]] = {
    "variables": variables,
    "cache codes": cache_codes,
    "faults": faults,
    "engines": engines,
    "choices": choices,
    "families": families,
    "explanation": explanation,
    "codes": codes,
    "known defects": defects,
    "machines of the records": lambda: verification_page.machines(table),
    "what was run": lambda: verification_page.tested(every_kernel(), table),
    "what libraries gave": lambda: verification_page.libraries(table),
    "what was compiled ahead": lambda: verification_page.compiled(every_kernel(), table),
    "matrix": matrix_of_ops,
    "adapters": adapters,
    "cost": cost,
    "cost of ops": cost_of_ops,
    "launching": launching,
    "launches as graphs": launches_as_graphs,
    "calls as graphs": calls_as_graphs,
    "eager calls": eager_calls,
    "first call": first_call,
    "headlines": headlines,
    "headlines of a cpu": headlines_of_a_cpu,
    "standing": standing,
    "serving throughput": lambda: serving_page.throughput(table, serving_page.ON_H200),
    "serving by the example": lambda: serving_page.example(table, serving_page.EXAMPLE, serving_page.ON_H200),
    "serving latencies": lambda: serving_page.latencies(table, serving_page.ON_H100),
    "serving with the cuda kernel": lambda: serving_page.at_once(table, serving_page.ON_H200, machine=13),
    "serving latencies on an h200": lambda: serving_page.latencies(table, serving_page.ON_H200),
    **{
        f"{' on '.join(path.stem.rsplit('_', 1))} measured": lambda name=path.name: measured(name)
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
        if not path.stem.startswith("dispatch")
    },
    "experts measured on a cpu": lambda: measured("moe_two_threads_epyc.json"),
    **{f"kernels of {op}": lambda op=op: kernels(op) for op in OPS},
    **{f"api of {op}": lambda op=op: api(op) for op in OPS},
}


def schema(command: str) -> str:
    return json.dumps(schema_of(command), indent=1) + "\n"


# Files that are made whole.
MADE: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "images" / "relative_time_h200.svg": lambda: relative_time.picture("h200"),
    **{ROOT / "docs" / "schemas" / f"{name}.json": functools.partial(schema, name) for name in SHAPES},
}


def refreshed(text: str) -> str:
    """A page with its generated parts made anew."""
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    options = parser.parse_args()
    stale = []
    for page in (*PAGES, *MADE):
        text = page.read_text() if page.exists() else ""
        fresh = MADE[page]() if page in MADE else refreshed(text)
        if fresh != text:
            stale.append(page.relative_to(ROOT))
            if not options.check:
                page.parent.mkdir(exist_ok=True)
                page.write_text(fresh)
    for name in stale:
        print(f"{'out of date' if options.check else 'rewritten'}: {name}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
