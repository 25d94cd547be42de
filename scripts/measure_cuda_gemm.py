"""Check and time forms of `cuda.fp8_gemm` beside `gluon.fp8_gemm` and DeepGEMM on one Hopper GPU.

    python scripts/measure_cuda_gemm.py {check,compile,time,eager} [--only WORD] [--part I/N] [--out FILE] [--seconds S]

`check` compares each form with the reference at small and odd sizes, ten calls each, which have the same bits. `time`:
in CUDA graphs of two calls, medians of samples that alternate, the cache not flushed; each form is compared with the
reference before it is timed, and a line has DeepGEMM's time, and the others' shares of its speed. Scales of rows come
side by side down the rows, as DeepGEMM and `cuda.fp8_gemm` read them, but in cases "by row", in which both copy them
first. `compile` makes the calls of all cases once, the I-th of N parts of them. `eager`: microseconds of the host for
an eager call.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from alternating import Calls, Checked, compile_calls, facts, host_us, options_of, run_case, time_cases
from measure_gluon_tiles import quantised

import kernelhub
from kernelhub.backends.cuda.gemm.fp8 import HIGH, LOW, MIDDLE, Form
from kernelhub.backends.cuda.gemm.fp8 import Fp8Gemm as CudaGemm
from kernelhub.backends.gluon.gemm.fp8.adapter import Fp8Gemm as GluonGemm
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.reference import fp8_gemm_reference
from kernelhub.ops.gemm.fp8.tolerance import compare, expected_of

VENDOR = "deep_gemm.fp8_blocks"
FORMS = {
    "256 early": HIGH,
    "256": replace(HIGH, early=False),
    "192 a": MIDDLE,
    "192": replace(MIDDLE, sharing=1),
    "128": LOW,
    "128 a": replace(LOW, sharing=2),
}


def adapter_of(form: Form | None) -> type[CudaGemm]:
    """The adapter with a form; None: that which the adapter chooses."""
    return type("Formed", (CudaGemm,), {"form": form})


def problem_of(arguments: dict[str, Any], kernel: str) -> Any:
    return kernelhub.fp8_gemm.explain(**arguments, backend=kernel).problem


SIZES = (
    (256, 128, 128, False),
    (256, 256, 1024, False),
    (1, 136, 144, True),
    (300, 576, 512, True),
    (257, 200, 400, False),
    (1000, 2120, 1536, False),
    (641, 1153, 640, True),
    (3000, 4608, 2304, False),
)


def check() -> int:
    """Each form, the simplest call first."""
    wrong = 0
    for tokens, n, k, bias in SIZES:
        arguments = fp8_gemm_inputs(tokens=tokens, n=n, k=k, bias=bias, device="cuda")
        operands: dict[str, Any] = {name: arguments.get(name) for name in ("a", "b", "a_scale", "b_scale", "bias")}
        problem = problem_of(arguments, "cuda.fp8_gemm")
        given = {**operands, "out_dtype": torch.bfloat16}
        expected = expected_of(fp8_gemm_reference, given)
        for name, form in {**FORMS, "chosen": None}.items():
            made: Any = adapter_of(form)(problem)
            outs = [torch.full((tokens + 2, n), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(10)]
            for out in outs:
                made.launch(*operands.values(), out[1:-1])
            torch.cuda.synchronize()
            agreement = compare(outs[0][1:-1], fp8_gemm_reference, given, matrix_instructions=True, expected=expected)
            same = all(torch.equal(out.view(torch.int16), outs[0].view(torch.int16)) for out in outs)
            beside = all(bool((out[0] == 7).all() and (out[-1] == 7).all()) for out in outs)
            ok = agreement.ok and same and beside
            wrong += not ok
            if not ok or name == "chosen":
                said = "right" if ok else "WRONG"
                print(f"check {tokens} x {n} x {k}, {name}: {said} {agreement} {same} {beside}", flush=True)
            if not ok and tokens <= 300:
                off = ~(outs[0][1:-1].double() - expected.exact).abs().le(0.02 * expected.mass)
                rows = sorted({int(at) // 8 * 8 for at in off.any(1).nonzero().flatten()})
                columns = sorted({int(at) // 8 * 8 for at in off.any(0).nonzero().flatten()})
                print(f"  rows {rows[:40]} columns {columns[:40]} {outs[0][1, :6].tolist()}", flush=True)
                print(f"  {expected.exact[0, :6].tolist()}", flush=True)
    print(f"check: {wrong} wrong", flush=True)
    return min(wrong, 50)


def product(rows: int, n: int, k: int, by_row: bool = False) -> Calls:
    a, a_scale = quantised(rows, k, 1)
    b, b_scale = quantised(-(-n // 128) * 128, k, 128)
    b = b[:n]
    if not by_row:
        a_scale = a_scale.t().contiguous().t()
    arguments: dict[str, Any] = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    some = torch.linspace(0, rows - 1, 96, device="cuda").long()  # of every tile of rows
    few = arguments | {"a": a[some], "a_scale": a_scale[some]}
    expected = functools.cache(lambda: expected_of(fp8_gemm_reference, few))

    def right(out: torch.Tensor) -> bool:
        made = out[some].bfloat16()
        agreement = compare(made, fp8_gemm_reference, few, matrix_instructions=True, expected=expected())
        return agreement.ok and bool(torch.isfinite(out).all())

    out = torch.full((rows, n), torch.nan, dtype=torch.bfloat16, device="cuda")

    def launched(made: Any) -> torch.Tensor:
        made.launch(a, b, a_scale, b_scale, None, out)
        return out

    calls: Calls = {VENDOR: functools.partial(kernelhub.fp8_gemm, **arguments, out=out, backend=VENDOR)}
    calls["gluon"] = functools.partial(launched, GluonGemm(problem_of(arguments, "gluon.fp8_gemm")))
    if rows <= 1024:
        calls["triton"] = functools.partial(kernelhub.fp8_gemm, **arguments, out=out, backend="triton.fp8_gemm")
    problem = problem_of(arguments, "cuda.fp8_gemm")
    for name, form in {**FORMS, "chosen": None}.items():
        calls[name] = functools.partial(launched, adapter_of(form)(problem))
    return Checked(calls, right, VENDOR, 18.0 if rows > 1024 else 6.0)


def eager() -> dict[str, float]:
    """Microseconds of the host for an eager call, the least of many batches."""
    found = {}
    for rows in (256, 4096):
        a, a_scale = quantised(rows, 512, 1)
        b, b_scale = quantised(512, 512, 128)
        given: dict[str, Any] = {"a": a, "b": b, "a_scale": a_scale.t().contiguous().t(), "b_scale": b_scale}
        out = torch.empty(rows, 512, dtype=torch.bfloat16, device="cuda")
        for kernel in ("gluon.fp8_gemm", "cuda.fp8_gemm"):
            for name in ("result", "destination"):
                more: dict[str, Any] = {"out": out} if name == "destination" else {}
                call = functools.partial(kernelhub.fp8_gemm, **given, **more, backend=kernel)
                found[f"{kernel}, {rows} rows, {name}"] = round(host_us(call), 2)
    return found


def compile_forms() -> None:
    """Each form's machine code into the cache, before processes share it."""
    began = time.monotonic()
    arguments = fp8_gemm_inputs(tokens=8, n=128, k=128, device="cuda")
    for bias in (False, True):
        given = arguments | ({"bias": torch.zeros(128, dtype=torch.bfloat16, device="cuda")} if bias else {})
        problem = problem_of(given, "cuda.fp8_gemm")
        for name, form in FORMS.items():
            adapter_of(form)(problem)._kernel(form)
            print(f"compiled {name}, bias {bias}, at {time.monotonic() - began:.1f} s", flush=True)


_SIZES = (
    (4096, 7168, 18432),
    (4096, 24576, 1536),
    (4096, 7168, 2304),
    (4096, 6144, 16384),
    (4096, 2112, 7168),
    (4096, 576, 7168),
    (8192, 7168, 18432),
    (2048, 7168, 18432),
    (1024, 24576, 1536),
    (1024, 7168, 18432),
    (4096, 18432, 7168),
    *(
        (rows, n, k)
        for n, k in ((7168, 18432), (24576, 1536), (7168, 2304), (2112, 7168))
        for rows in (768, 512, 256, 128, 64)
    ),
)
CASES = {
    **{f"{rows} rows, {n} x {k}": functools.partial(product, rows, n, k) for rows, n, k in _SIZES},
    "4096 rows, 7168 x 18432, by row": lambda: product(4096, 7168, 18432, by_row=True),
    "4096 rows, 7168 x 2304, by row": lambda: product(4096, 7168, 2304, by_row=True),
}


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("what", choices=("check", "compile", "time", "eager"))
    options = parser.parse_args()
    os.makedirs("build", exist_ok=True)
    torch.manual_seed(0)
    if options.what == "check":
        return check()
    if options.what == "eager":
        row = {**facts(__doc__), "host_us": eager()}
        print(json.dumps(row["host_us"]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(row, indent=1) + "\n")
        return 0
    if options.what == "compile":
        if options.part.startswith("0/"):
            compile_forms()
        return compile_calls(options, {name: functools.partial(_of_libraries, make) for name, make in CASES.items()})
    return time_cases(__doc__, options, CASES, functools.partial(run_case, count=2))


def _of_libraries(make: Any) -> Calls:
    """What compiles for each size: DeepGEMM, Gluon and Triton."""
    return {name: call for name, call in make().items() if name in (VENDOR, "gluon", "triton")}


if __name__ == "__main__":
    sys.exit(main())
