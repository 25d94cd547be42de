"""Check and time forms of `cuda.fp8_gemm` for few rows beside its others and other kernels, on one Hopper GPU.

    python scripts/measure_few_rows.py {check,compile,time,alternate} --folder FOLDER [--part I/N] [--seconds S]
        [--rows ROWS,...]

`time`: in CUDA graphs of two calls, medians of five samples of 2 ms that alternate, the cache not flushed; in cases
"cold" a graph has calls with copies of b, more than L2 holds together. Each form is compared with the reference before
it is timed. Scales of rows come side by side down the rows. `alternate`: 4096 rows, samples of 18 ms, in both orders.

`check` compares each form with the reference at small and odd sizes, ten calls each, which have the same bits, and
`compile` makes the other kernels' calls once. Both note in FOLDER what is done. `time` takes only what they noted, and
leaves out what an earlier run of it began without an end, so that all three can be run again after one was stopped.
"""

from __future__ import annotations

import functools
import json
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from alternating import attempt, facts, medians, options_of
from measure_cuda_gemm import VENDOR, adapter_of, problem_of
from measure_gluon_tiles import quantised

import kernelhub
from kernelhub.backends.cuda.gemm.fp8 import HIGH, LOW, MIDDLE, Form
from kernelhub.backends.gluon.gemm.fp8.adapter import Fp8Gemm as GluonGemm
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.reference import fp8_gemm_reference
from kernelhub.ops.gemm.fp8.tolerance import compare, expected_of
from tests.gpu.products_sanitized import FOR_FEW_ROWS

FORMS: dict[str, Form] = {**FOR_FEW_ROWS, "256x128": HIGH, "192x128 s2": MIDDLE, "128x128": LOW}
OTHERS = {VENDOR: "dg", "triton.fp8_gemm": "triton", "gluon.fp8_gemm": "gluon"}
SIZES = (
    (7168, 18432),
    (2112, 7168),
    (24576, 1536),
    (7168, 2304),
    (4096, 7168),
    (36864, 7168),
    (7168, 2048),
)
_ROWS = (128, 64, 256, 16, 192, 512, 96, 384, 32, 65)
_COLD = tuple((rows, n, k) for rows in (128, 64) for n, k in ((2112, 7168), (7168, 2304)))
_L2_BYTES = 50e6


def cases(numbers: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """The most valuable first: all sizes of the first three numbers of rows come later if these are `_ROWS`."""
    if numbers != _ROWS:
        yield from ((f"{rows} x {n} x {k}", (rows, n, k)) for rows in numbers for n, k in SIZES)
        return
    for at, rows in enumerate(_ROWS):
        for n, k in SIZES if at >= 3 else SIZES[:4]:
            yield f"{rows} x {n} x {k}", (rows, n, k)
        if at == 2:
            yield from ((f"{few} x {n} x {k} cold", (few, n, k)) for few, n, k in _COLD)
            yield from ((f"{few} x {n} x {k}", (few, n, k)) for few in _ROWS[:3] for n, k in SIZES[4:])


class Notes:
    """Lines in files of a folder: what was begun, and what ended well. A file is one process's."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.own = folder / f"{name}.notes"

    def add(self, what: str, key: str) -> None:
        with self.own.open("a") as file:
            file.write(f"{what}\t{key}\n")

    def all(self, what: str, of: str = "") -> set[str]:
        """Keys noted so by all processes whose name begins with `of`."""
        lines = [
            line for path in self._folder.glob(f"{of or self._name}*.notes") for line in path.read_text().split("\n")
        ]
        return {line.partition("\t")[2] for line in lines if line.partition("\t")[0] == what}


# --- check

_CHECKED = (
    (1, 8, 16, False),
    (64, 128, 1024, False),
    (65, 136, 144, True),
    (130, 197, 1168, True),
    (257, 200, 400, False),
    (300, 1153, 640, True),
    (128, 2112, 7168, False),
    (512, 7168, 2304, False),
    (1000, 2120, 1536, True),
)


def check(notes: Notes, part: int, parts: int) -> int:
    """Each form of a part; it is noted as right if all of its sizes are."""
    known: dict[Any, Any] = {}
    wrong = 0
    for name in [*FORMS][part::parts]:
        if name in notes.all("begun"):
            continue
        notes.add("begun", name)
        began = time.monotonic()
        made = [_checked(name, size, known) for size in _CHECKED]
        wrong += not all(made)
        if all(made):
            notes.add("right", name)
        print(f"check {name}: {'right' if all(made) else 'WRONG'} in {time.monotonic() - began:.1f} s", flush=True)
    return wrong


def _checked(name: str, size: tuple[int, int, int, bool], known: dict[Any, Any]) -> bool:
    tokens, n, k, bias = size
    if size not in known:
        arguments = fp8_gemm_inputs(tokens=tokens, n=n, k=k, bias=bias, device="cuda")
        known[size] = arguments, expected_of(fp8_gemm_reference, arguments)
    arguments, expected = known[size]
    operands = [arguments.get(one) for one in ("a", "b", "a_scale", "b_scale", "bias")]
    made: Any = adapter_of(FORMS[name])(problem_of(arguments, "cuda.fp8_gemm"))
    if size == _CHECKED[0]:
        error = attempt(lambda: print(f"  {name}: {_clusters(made._kernel(FORMS[name]), FORMS[name])}", flush=True))
        if error is not None:
            print(f"  {name}: {error}", flush=True)
    around = [
        torch.full((tokens + 2, -(-n // 8) * 8 + 16), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(10)
    ]
    for one in around:
        made.launch(*operands, one[1:-1, 8 : n + 8])
    torch.cuda.synchronize()
    out = around[0][1:-1, 8 : n + 8]
    agreement = compare(out, fp8_gemm_reference, arguments, matrix_instructions=True, expected=expected)
    same = all(torch.equal(one.view(torch.int16), around[0].view(torch.int16)) for one in around)
    if not agreement.ok or not same:
        off = ~(out.double() - expected.exact).abs().le(0.02 * expected.mass)
        rows, columns = (sorted({int(at) // 8 * 8 for at in off.any(dim).nonzero().flatten()}) for dim in (1, 0))
        print(f"  {name}, {size}: {agreement}, same bits {same}, rows {rows[:24]}, columns {columns[:24]}", flush=True)
        print(f"  {out[0, :6].tolist()}, not {expected.exact[0, :6].tolist()}", flush=True)
    out.fill_(7.0)
    beside = bool((around[0] == 7.0).all())
    if not beside:
        print(f"  {name}, {size}: written outside of the result", flush=True)
    return agreement.ok and same and beside


def _clusters(kernel: Any, form: Form) -> str:
    """How many clusters run at the same time, as the driver says."""
    library = kernel._library
    config = library.config_of(form.cluster, False, 1, form.threads, 0, form.shared_bytes)
    status, count = library.driver.cuOccupancyMaxActiveClusters(kernel._function_of(0), config)
    return f"{count} clusters of {form.cluster} at the same time ({status!r})"


# --- compile


def compile_others(notes: Notes, part: int, parts: int, seconds: float, numbers: tuple[int, ...]) -> int:
    """Other kernels' calls, once: DeepGEMM's for up to 64 rows of a size apart from its others, which take longer."""
    began = time.monotonic()
    few, many = (tuple(rows for rows in numbers if (rows <= 64) == small) for small in (True, False))
    tasks = [(size, rows, (VENDOR,)) for size in SIZES for rows in (many, few) if rows]
    tasks += [(size, numbers, (kernel,)) for kernel in tuple(OTHERS)[1:] for size in SIZES]
    tasks.append(((7168, 2304), (4096,), ("gluon.fp8_gemm",)))
    for (n, k), of, kernels in tasks[part::parts]:
        operands = _operands(n, k, 1)
        for rows in of:
            for kernel in kernels:
                if time.monotonic() - began > seconds:
                    continue
                error = attempt(functools.partial(_made_and_called, kernel, rows, operands))
                torch.cuda.synchronize()
                if error is None:
                    notes.add("compiled", f"{rows} x {n} x {k}: {kernel}")
                else:
                    print(f"{rows} x {n} x {k}: {kernel}: {error}", flush=True)
        print(f"{n} x {k} {kernels}, at {time.monotonic() - began:.1f} s", flush=True)
    return 0


def _made_and_called(kernel: str, rows: int, operands: Any) -> None:
    _other(kernel, _call_of(rows, operands))()


# --- time


def _operands(n: int, k: int, copies: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Copies of b, and its scales."""
    torch.manual_seed(n + k)
    b, b_scale = quantised(-(-n // 128) * 128, k, 128)
    return [b[:n], *(b.clone()[:n] for _ in range(copies - 1))], b_scale


def _call_of(rows: int, operands: tuple[list[torch.Tensor], torch.Tensor]) -> list[dict[str, Any]]:
    """Arguments of a call with each copy of b."""
    copies, b_scale = operands
    torch.manual_seed(rows)
    a, a_scale = quantised(rows, copies[0].shape[1], 1)
    out = torch.full((rows, copies[0].shape[0]), torch.nan, dtype=torch.bfloat16, device="cuda")
    given = {"a": a, "a_scale": a_scale.t().contiguous().t(), "b_scale": b_scale, "out": out}
    return [{**given, "b": b} for b in copies]


def _other(kernel: str, calls: list[dict[str, Any]]) -> Any:
    if kernel != "gluon.fp8_gemm":
        return lambda at=0: kernelhub.fp8_gemm(**calls[at % len(calls)], backend=kernel)
    return _launched(GluonGemm, kernel, calls)


def _launched(adapter: Any, kernel: str, calls: list[dict[str, Any]]) -> Any:
    """Launches by an adapter."""
    made: Any = adapter(problem_of({name: value for name, value in calls[0].items() if name != "out"}, kernel))

    def call(at: int = 0) -> torch.Tensor:
        of = calls[at % len(calls)]
        made.launch(of["a"], of["b"], of["a_scale"], of["b_scale"], None, of["out"])
        result: torch.Tensor = of["out"]
        return result

    return call


def _ran(call: Any) -> Any:
    call()
    return call


def time_case(case: str, operands: Any, rows: int, notes: Notes, right_forms: set[str], compiled: set[str]) -> Any:
    """Milliseconds of each form and kernel, and which were wrong."""
    calls = _call_of(rows, operands)
    given = {name: value for name, value in calls[0].items() if name != "out"}
    some = torch.linspace(0, rows - 1, min(rows, 96), device="cuda").long()
    few = given | {"a": given["a"][some], "a_scale": given["a_scale"][some]}
    expected = expected_of(fp8_gemm_reference, few)
    timed: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    size = case.removesuffix(" cold")
    candidates: dict[str, Any] = {
        short: functools.partial(_other, kernel, calls)
        for kernel, short in OTHERS.items()
        if f"{size}: {kernel}" in compiled
    }
    for name, form in FORMS.items():
        if name in right_forms:
            candidates[name] = functools.partial(_launched, adapter_of(form), "cuda.fp8_gemm", calls)
    begun, ended = notes.all("begun"), notes.all("ended")
    for name, make in candidates.items():
        key = f"{case}: {name}"
        if key in begun and key not in ended:
            wrong[name] = "did not end before"
            continue
        notes.add("begun", key)
        calls[0]["out"].fill_(torch.nan)
        error = attempt(lambda name=name, make=make: timed.__setitem__(name, _ran(make())))  # type: ignore[misc]
        torch.cuda.synchronize()
        notes.add("ended", key)
        out = calls[0]["out"]
        agreement = compare(out[some], fp8_gemm_reference, few, matrix_instructions=True, expected=expected)
        if error is not None or not agreement.ok or not bool(torch.isfinite(out).all()):
            wrong[name] = error or str(agreement)
            timed.pop(name, None)
    times = medians(timed, max(2, len(calls)), 2.0)
    return {"case": case, "ms": times, **({"wrong": wrong} if wrong else {})}


def line_of(row: dict[str, Any]) -> str:
    """Microseconds, as one line."""
    if "ms" not in row:
        return f"{row['case']}: {row['error'][-300:]}"
    found = " ".join(f"{name.replace(' ', '_')}={1000 * ms:.1f}" for name, ms in row["ms"].items())
    return f"{row['case']}: {found}{' WRONG ' + str(row['wrong']) if 'wrong' in row else ''}"


def summary_of(row: dict[str, Any]) -> str:
    """The fastest three forms beside those of before and the other kernels."""
    if "ms" not in row:
        return line_of(row)
    us = {name: round(1000 * ms, 1) for name, ms in row["ms"].items()}
    before = min((us[name] for name in ("256x128", "192x128 s2", "128x128") if name in us), default=None)
    best = sorted((us[name], name) for name in us if name in FORMS)[:3]
    others = " ".join(f"{name} {us[name]}" for name in OTHERS.values() if name in us)
    found = ", ".join(f"{name} {time}" for time, name in best)
    wrong = f" WRONG {sorted(row['wrong'])}" if "wrong" in row else ""
    return f"{row['case'].replace(' x ', 'x')}: {others} before {before}; {found}{wrong}"


def time_forms(options: Any, notes: Notes, numbers: tuple[int, ...]) -> int:
    """All cases that were not measured before."""
    began = time.monotonic()
    path: Path = options.out
    rows: list[Any] = json.loads(path.read_text())["rows"] if path.exists() else []
    measured = {row["case"] for row in rows if "ms" in row}
    right_forms, compiled = notes.all("right", "check"), notes.all("compiled", "compile")
    print(f"not right, so not timed: {sorted(set(FORMS) - right_forms)}", flush=True)
    operands: dict[Any, Any] = {}
    longest = 0.0
    turns = options.out.with_name("alternate.json")
    if not turns.exists() and "256x128" in right_forms and (error := attempt(lambda: alternate(turns))):
        print(f"4096 x 7168 x 2304: {error}", flush=True)
    for case, (number, n, k) in cases(numbers):
        began_case = time.monotonic()
        if case in measured or began_case - began + longest > options.seconds:
            continue
        copies = int(4 * _L2_BYTES / (n * k)) if case.endswith("cold") else 1
        try:
            if (n, k, copies) not in operands:
                operands[n, k, copies] = _operands(n, k, copies)
            row = time_case(case, operands[n, k, copies], number, notes, right_forms, compiled)
        except Exception:
            row = {"case": case, "error": traceback.format_exc()[-600:]}
        row["at_s"] = round(time.monotonic() - began, 1)
        longest = max(longest, time.monotonic() - began_case)
        rows.append(row)
        print(f"{line_of(row)}\n> {summary_of(row)}", flush=True)
        path.write_text(json.dumps({**facts(__doc__), "rows": rows}, indent=1) + "\n")
    print(f"{len(rows)} cases, {time.monotonic() - began:.1f} s", flush=True)
    return 0


def alternate(path: Path) -> int:
    """4096 rows of 7168 x 2304: `cuda.fp8_gemm` and `gluon.fp8_gemm` in turns."""
    rows, operands = [], _operands(7168, 2304, 1)
    (given,) = _call_of(4096, operands)
    for by_row in (False, True):
        call = given | {"a_scale": given["a_scale"].contiguous()} if by_row else given
        of: dict[str, Any] = {"gluon": _other("gluon.fp8_gemm", [call])}
        of["cuda"] = _launched(adapter_of(None), "cuda.fp8_gemm", [call])
        some = torch.linspace(0, 4095, 96, device="cuda").long()
        few = {name: value for name, value in call.items() if name != "out"}
        few |= {name: call[name][some] for name in ("a", "a_scale")}
        for name, one in of.items():
            agreement = compare(one()[some], fp8_gemm_reference, few, matrix_instructions=True)
            print(f"  {name}: {'right' if agreement.ok else 'WRONG'} {agreement}", flush=True)
        for order in (("gluon", "cuda"), ("cuda", "gluon")) * 2:
            times = medians({name: of[name] for name in order}, 2, 18.0)
            rows.append({"by_row": by_row, "order": order, "ms": times})
            said = ", ".join(f"{name} {1000 * ms:.1f}" for name, ms in times.items())
            print(f"4096 x 7168 x 2304, scales {'by row' if by_row else 'down the rows'}: {said} us", flush=True)
        alone = {name: medians({name: one}, 2, 18.0)[name] for name, one in of.items()}
        rows.append({"by_row": by_row, "alone": alone})
        print(f"  each alone: {', '.join(f'{name} {1000 * ms:.1f}' for name, ms in alone.items())} us", flush=True)
    path.write_text(json.dumps({**facts(__doc__), "rows": rows}, indent=1) + "\n")
    return 0


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("what", choices=("check", "compile", "time", "alternate"))
    parser.add_argument("--folder", type=Path, default=Path("build/few_rows"))
    parser.add_argument("--rows", default="", help="numbers of rows in place of those of the script")
    options = parser.parse_args()
    numbers = tuple(map(int, options.rows.split(","))) if options.rows else _ROWS
    options.folder.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, options.part.split("/"))
    notes = Notes(options.folder, f"{options.what}_{part}")
    torch.manual_seed(0)
    if options.what == "check":
        return check(notes, part, parts)
    if options.what == "compile":
        return compile_others(notes, part, parts, options.seconds, numbers)
    if options.what == "alternate":
        return alternate(options.out)
    return time_forms(options, Notes(options.folder, "time"), numbers)


if __name__ == "__main__":
    sys.exit(main())
