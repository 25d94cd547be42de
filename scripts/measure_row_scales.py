"""Check and time `cuda.fp8_gemm` and `gluon.fp8_gemm` with scales of rows as `quantize_fp8` gives them by default.

    python scripts/measure_row_scales.py {check,compile,time,host} [--rows M,...] [--part I/N] [--out FILE] [--seconds]

`check` compares scales that `turn_scales` turned with the same by torch, bit for bit, and that it writes nothing else.
`time`: in CUDA graphs of two calls, medians of samples that alternate, the cache not flushed; scales of a row lie side
by side, so that `cuda.fp8_gemm` turns them by a launch of its own, and "down" is its time with scales that need none,
"triton down" Triton's.
Each is compared with the reference first. `compile` makes the calls of all cases once, the I-th of N parts of them.
`host`: microseconds of the host for an eager call that comes again, the least of many batches.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from typing import Any

import torch
from alternating import Calls, attempt, facts, host_us, measured, options_of
from measure_gluon_tiles import quantised

import kernelhub
from kernelhub.backends.cuda.gemm.fp8 import Fp8Gemm
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.reference import fp8_gemm_reference
from kernelhub.ops.gemm.fp8.tolerance import compare, expected_of

CUDA, GLUON, TRITON = "cuda.fp8_gemm", "gluon.fp8_gemm", "triton.fp8_gemm"
SIZES = ((7168, 2304), (2112, 7168), (24576, 1536), (7168, 18432), (4096, 7168), (7168, 2048))
ROWS = (4096, 1024, 256, 128, 512, 2048, 8192)
_TURNED = ((1, 1), (3, 56), (4, 8), (5, 7), (127, 57), (128, 18), (129, 144), (1000, 9), (4096, 144), (8192, 12))


def check() -> int:
    """Sizes with whole vectors of columns and without, and strides of all kinds."""
    wrong = 0
    arguments = fp8_gemm_inputs(tokens=8, n=128, k=128, device="cuda")
    made: Any = Fp8Gemm(kernelhub.fp8_gemm.explain(**arguments, backend=CUDA).problem)
    for rows, columns in _TURNED:
        wide = torch.randn(rows + 1, 2 * columns + 3, device="cuda")
        wide[0, 0] = torch.nan
        for name, scale in {
            "rows": wide[:rows, :columns].contiguous(),
            "offset": wide[1:, 3 : columns + 3],
            "steps": wide[:rows, 1 : 2 * columns : 2],
            "down": wide.t().contiguous().t()[1:, 1 : columns + 1],
            "one row": wide[:1, :columns].expand(rows, columns),
        }.items():
            before = scale.clone()
            turned = made._down_rows(scale)
            torch.cuda.synchronize()
            same = torch.equal(turned.view(torch.int32), scale.view(torch.int32))
            kept = torch.equal(before.view(torch.int32), scale.view(torch.int32))
            placed = turned.stride() == (1, -(-rows // 4) * 4)
            if not (same and kept and placed):
                wrong += 1
                print(
                    f"WRONG {rows} x {columns}, {name}: bits {same}, kept {kept}, strides {turned.stride()}", flush=True
                )
    print(f"check: {wrong} wrong of {5 * len(_TURNED)}", flush=True)
    return min(wrong, 99)


def calls_of(rows: int, n: int, k: int) -> tuple[Calls, Any]:
    """Calls by name, and whether a result is right."""
    torch.manual_seed(rows + n + k)
    a, by_row = quantised(rows, k, 1)
    b, b_scale = quantised(-(-n // 128) * 128, k, 128)
    given: dict[str, Any] = {"a": a, "b": b[:n], "a_scale": by_row.contiguous(), "b_scale": b_scale}
    some = torch.linspace(0, rows - 1, 96, device="cuda").long()
    few = given | {"a": a[some], "a_scale": by_row[some]}
    expected = functools.cache(lambda: expected_of(fp8_gemm_reference, few))

    def right(out: torch.Tensor) -> bool:
        made = out[some].bfloat16()
        agreement = compare(made, fp8_gemm_reference, few, matrix_instructions=True, expected=expected())
        return agreement.ok and bool(torch.isfinite(out).all())

    def call(kernel: str, **more: Any) -> Any:
        out = torch.full((rows, n), torch.nan, dtype=torch.bfloat16, device="cuda")
        return functools.partial(kernelhub.fp8_gemm, **(given | more), out=out, backend=kernel)

    calls: Calls = {"cuda": call(CUDA), "gluon": call(GLUON)}
    if rows <= 512:
        calls["triton"] = call(TRITON)
    down = by_row.t().contiguous().t()
    calls["down"] = call(CUDA, a_scale=down)
    if rows <= 64:
        calls["triton down"] = call(TRITON, a_scale=down)
    return calls, right


def time_all(options: Any) -> int:
    """The most valuable first."""
    began, rows_of, about = time.monotonic(), [], facts(__doc__)
    longest = 0.0
    for rows in options.rows:
        for n, k in SIZES:
            began_case = time.monotonic()
            if began_case - began + longest > options.seconds:
                continue
            row: dict[str, Any] = {"case": f"{rows} x {n} x {k}, by row"}
            try:
                calls, right = calls_of(rows, n, k)
                again = {name: functools.partial(_again, one) for name, one in calls.items()}
                row |= measured(again, 2, 12.0 if rows > 1024 else 4.0, right)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            longest = max(longest, time.monotonic() - began_case)
            rows_of.append(row)
            times = " ".join(f"{name} {1000 * ms:.1f}" for name, ms in row.get("kernels_ms", {}).items())
            wrong = [name for name, agrees in row.get("right", {}).items() if not agrees]
            more = [row[key] for key in ("failed", "error") if key in row]
            print(f"row {row['case']}, us: {times}{f' WRONG {wrong}' if wrong else ''}", *more, flush=True)
            options.out.write_text(json.dumps({**about, "rows": rows_of}, indent=1) + "\n")
            torch.cuda.empty_cache()
    print(f"{len(rows_of)} cases, {time.monotonic() - began:.1f} s", flush=True)
    return 0


def _again(call: Any, _: int) -> Any:
    return call()


def compile_all(part: int, parts: int, seconds: float, all_rows: tuple[int, ...]) -> None:
    began = time.monotonic()
    for at, (n, k) in enumerate(SIZES):
        if at % parts != part:
            continue
        for rows in all_rows:
            if time.monotonic() - began < seconds:
                calls, _ = calls_of(rows, n, k)
                for name, call in calls.items():
                    if error := attempt(call):
                        print(f"{rows} x {n} x {k} {name}: {error}", flush=True)
                torch.cuda.synchronize()
                calls = {}
                torch.cuda.empty_cache()
        print(f"compiled {n} x {k}, at {time.monotonic() - began:.1f} s", flush=True)


def host() -> dict[str, float]:
    """Microseconds of an eager call of small products, with a destination and without."""
    found = {}
    for rows in (16, 256, 4096):
        a, by_row = quantised(rows, 512, 1)
        b, b_scale = quantised(512, 512, 128)
        out = torch.empty(rows, 512, dtype=torch.bfloat16, device="cuda")
        for layout, scale in (("by row", by_row.contiguous()), ("down", by_row.t().contiguous().t())):
            for kernel in (CUDA, GLUON, TRITON):
                for name, more in (("result", {}), ("destination", {"out": out})):
                    given: dict[str, Any] = {"a": a, "b": b, "a_scale": scale, "b_scale": b_scale, **more}
                    call = functools.partial(kernelhub.fp8_gemm, **given, backend=kernel)
                    found[f"{kernel}, {rows} rows, {layout}, {name}"] = round(host_us(call, calls=30), 2)
    return found


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("what", choices=("check", "compile", "time", "host"))
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS, help="of a")
    options = parser.parse_args()
    os.makedirs("build", exist_ok=True)
    torch.manual_seed(0)
    if options.what == "check":
        return check()
    if options.what == "compile":
        part, parts = map(int, options.part.split("/"))
        compile_all(part, parts, options.seconds, options.rows)
        return 0
    if options.what == "host":
        row = {**facts(__doc__), "host_us": host()}
        print("row host", json.dumps(row["host_us"]), flush=True)
        options.out.write_text(json.dumps(row, indent=1) + "\n")
        return 0
    return time_all(options)


if __name__ == "__main__":
    sys.exit(main())
