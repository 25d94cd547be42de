"""Check and time `cuda.fp4_gemm` beside `triton.fp4_gemm` and torch's bfloat16 product on one Hopper GPU.

    python scripts/measure_cuda_fp4.py {check,compile,warm,time,host} [--only WORD] [--part I/N] [--out FILE]
        [--seconds S]

`check` compares forms at small and odd sizes with float64, of weights whose scales are hostile, too. `time`: in CUDA
graphs, ms of a call, medians of samples that alternate, each call of a graph with another weight, together more than L2
holds. Each form is compared with float64 before it is timed: `off` is the error over what the op's tolerance allows.
`host`: microseconds of the host for an eager call. `compile` compiles the forms without a GPU, `warm` Triton's kernels.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from alternating import attempt, facts, host_us, medians, options_of

import kernelhub
from kernelhub.backends.cuda.gemm.fp4 import FORMS, Fp4Gemm, constants_of, form_for
from kernelhub.backends.cuda.nvrtc import compiled as compiled_source
from kernelhub.ops.formats import from_e2m1, from_e8m0
from kernelhub.ops.gemm.fp4.adapter import Activations, Weights
from kernelhub.ops.gemm.fp4.problem import GROUP, Fp4GemmProblem
from kernelhub.ops.gemm.fp4.tolerance import error_allowed
from kernelhub.probes.device import facts as device_facts
from kernelhub.probes.device import simulated

SHAPES = {
    "10240x8192": ("nvfp4", 10240, 8192),
    "4096x6144": ("nvfp4", 4096, 6144),
    "5760x2880": ("mxfp4", 5760, 2880),
    "8192x28672": ("nvfp4", 8192, 28672),
}
ROWS = (256, 64, 4096, 16, 128, 512, 1024, 192, 1)
_MOST_BYTES = 200 << 20
_SAMPLE_MS = 4.0
_DTYPES = ("bfloat16", "float16", "float32")


def forms(rows: int) -> list[int]:
    """What is tried for so many rows, the selected form first: rows of activations of a tile."""
    first = form_for(rows)
    return [first, *(form for form in FORMS if form != first and form >= min(rows, 128) and (rows > 64 or form <= 64))]


def name_of(form: int) -> str:
    return f"t{form}"


def adapter_of(form: int | None, problem: Fp4GemmProblem, counts: bool = True) -> Fp4Gemm:
    return type("Formed", (Fp4Gemm,), {"form": form, "counts": counts})(problem)


def problem_of(form: str, n: int, k: int, dtype: str = "bfloat16", bias: bool = False, cpu: bool = False) -> Any:
    device = simulated("H200") if cpu else device_facts(torch.device("cuda"))
    return Fp4GemmProblem(device=device, b_format=form, n=n, k=k, out_dtype=dtype, bias=bias)


def weight(n: int, k: int, form: str, seed: int, hostile: bool = False) -> Weights:
    draw = torch.Generator(device="cuda").manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), generator=draw, device="cuda", dtype=torch.uint8)
    groups = k // GROUP[form]
    if form == "nvfp4":
        low, high = (0, 256) if hostile else (40, 127)
        scale = torch.randint(low, high, (n, groups), generator=draw, device="cuda", dtype=torch.uint8)
        scale[(scale & 127) == 127] = 60
        if hostile:
            scale[5::16, groups // 2] = 127  # NaN
            scale[6::16] = 0
            scale[7::16] = 1
            scale[8::16] = 126
        return Weights(codes, scale.view(torch.float8_e4m3fn), torch.full((1,), 2.0**-8, device="cuda"))
    scale = torch.randint(110, 125, (n, groups), generator=draw, device="cuda", dtype=torch.uint8)
    if hostile:
        for at, raw in enumerate((0, 1, 2, 64, 126, 127, 128, 129, 131, 132, 133, 200, 250, 253, 254)):
            scale[at::16] = raw
        scale[15::16, groups // 2] = 255
    return Weights(codes, scale, None)


def full_of(w: Weights, form: str) -> torch.Tensor:
    """The weight in float64."""
    scale = w.scale.double() if form == "nvfp4" else from_e8m0(w.scale).double()
    full = from_e2m1(w.codes).double() * scale.repeat_interleave(GROUP[form], 1)
    return full if w.global_scale is None else full * w.global_scale.double()


class Judged:
    """The exact product of activations and a weight, and how far results are from it."""

    def __init__(self, a: torch.Tensor, full: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        more = torch.zeros((), dtype=torch.float64, device=a.device) if bias is None else bias.double()
        self.k, self.want = a.shape[1], a.double() @ full.t() + more
        self.sums = a.double().abs() @ full.abs().t() + more.abs()

    def off(self, out: torch.Tensor) -> float:
        """The largest error over what is allowed, of sums that are numbers of float32."""
        most = 60000.0 if out.dtype is torch.float16 else 2.0**126
        checked, nan = ~(self.sums >= most), self.want.isnan()
        if not torch.equal(out.isnan() & checked, nan & checked):
            return float("inf")
        allowed = error_allowed(self.want, self.sums, self.k, out.dtype)
        ratio = ((out.double() - self.want).abs() / allowed)[checked & ~nan]
        return float(ratio.nan_to_num(nan=1e9).max()) if ratio.numel() else 0.0


def check(only: str, seconds: float) -> int:
    """Each form, the simplest sizes first."""
    wrong, began = 0, time.monotonic()
    every = {name_of(form): form for form in FORMS}
    sizes = (
        (64, 128, 64),
        (64, 128, 512),
        (256, 256, 1024),
        (1, 1, 32),
        (37, 131, 288),
        (300, 1000, 2080),
        (129, 4096, 4096),
    )
    for name, form in every.items():
        if only not in name or time.monotonic() - began > seconds:
            continue
        found = []
        for b_format in GROUP:
            if b_format == "mxfp8":
                continue
            for at, (rows, n, k) in enumerate(sizes):
                dtype = getattr(torch, _DTYPES[at % 3])
                for hostile in (False, True):
                    w = weight(n, k, b_format, at, hostile)
                    a = torch.randn(rows, k, device="cuda").bfloat16()
                    bias = torch.randn(n, device="cuda") if at % 2 else None
                    made = adapter_of(form, problem_of(b_format, n, k, _DTYPES[at % 3], bias is not None), at % 4 != 3)
                    around = torch.full((rows + 2, n + 16), 7.0, dtype=dtype, device="cuda")
                    out = around[1:-1, 8 : 8 + n]
                    made.launch(Activations(a, None, None), w, bias, out)
                    torch.cuda.synchronize()
                    far = Judged(a, full_of(w, b_format), bias).off(out)
                    around[1:-1, 8 : 8 + n] = 7.0
                    outside = not bool((around == 7.0).all())
                    if not far <= 1.0 or outside:
                        wrong += 1
                        print(f"WRONG {name} {b_format} {rows}x{n}x{k} {dtype} hostile {hostile}: {far:.3g}, "
                              f"outside {outside}", flush=True)  # fmt: skip
                    found.append(far)
        print(f"check {name}: largest {max(found):.3f} of what is allowed, {len(found)} products", flush=True)
    print(f"check: {wrong} wrong of {len(every)} forms", flush=True)
    return min(wrong, 99)


def compiled(form: int, b_format: str, dtype: str) -> str:
    """One form, compiled into the cache; in a process of a pool."""
    began = time.monotonic()
    try:
        problem = problem_of(b_format, 4096, 4096, dtype, cpu=True)
        compiled_source("sm_90/fp4_gemm.cu", {"OVERLAPS": 1, **constants_of(form, problem)}, (9, 0), specific=True)
    except Exception as error:
        return f"FAILED {name_of(form)} {b_format} {dtype}: {error}"[:300]
    return f"compiled {name_of(form)} {b_format} {dtype} in {time.monotonic() - began:.1f} s"


def compile_all() -> int:
    """The forms that are checked and timed."""
    asked = [(form, f, d) for form in FORMS for f in ("nvfp4", "mxfp4") for d in _DTYPES]
    with ProcessPoolExecutor(max(2, min(15, (os.cpu_count() or 2) - 1))) as pool:
        done = [one.result() for one in [pool.submit(compiled, *one) for one in asked]]
    failed = [one for one in done if one.startswith("FAILED")]
    print("\n".join(failed or done[-3:]), f"\n{len(done)} asked, {len(failed)} failed", flush=True)
    return len(failed)


def row_of(form: str, n: int, k: int, rows: int, copies: int) -> dict[str, Any]:
    """A row of a table."""
    weights = [weight(n, k, form, seed) for seed in range(copies)]
    full = full_of(weights[0], form)
    plain = [
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        for _ in range(max(2, min(copies, _MOST_BYTES // (2 * n * k) + 1)))
    ]
    a = torch.randn(rows, k, device="cuda").bfloat16()
    problem = problem_of(form, n, k)
    outs: dict[str, torch.Tensor] = {}

    def destination(name: str) -> torch.Tensor:
        return outs.setdefault(name, torch.full((rows, n), torch.nan, dtype=torch.bfloat16, device="cuda"))

    def torchs(at: int) -> torch.Tensor:
        return torch.mm(a, plain[at % len(plain)].t(), out=destination("torch"))

    def public(at: int) -> torch.Tensor:
        w = weights[at]
        return kernelhub.fp4_gemm(a, w.codes, b_scale=w.scale, b_global_scale=w.global_scale, out=destination("triton"),
                                  backend="triton.fp4_gemm")  # fmt: skip

    def launched(made: Fp4Gemm, name: str, at: int) -> torch.Tensor:
        out = destination(name)
        made.launch(Activations(a, None, None), weights[at], None, out)
        return out

    calls: dict[str, Callable[[int], Any]] = {"torch": torchs, "triton": public}
    for one in forms(rows):
        calls[name_of(one)] = functools.partial(launched, adapter_of(one, problem), name_of(one))
    calls["two launches"] = functools.partial(launched, adapter_of(forms(rows)[0], problem, False), "two launches")
    some = torch.tensor(sorted({*range(min(rows, 256)), *range(max(0, rows - 256), rows)}), device="cuda")
    judged = Judged(a[some], full)
    row: dict[str, Any] = {"copies": copies, "off": {}, "failed": {}}
    for name, call in list(calls.items()):
        failure = attempt(lambda call=call: call(0))  # type: ignore[misc]
        torch.cuda.synchronize()
        if failure is not None:
            row["failed"][name] = failure
        elif name != "torch":
            row["off"][name] = round(judged.off(outs[name][some]), 3)
        if failure is not None or row["off"].get(name, 0.0) > 1.0:
            calls.pop(name)  # what is wrong is not timed
    del full, judged
    return row | {"kernels_ms": medians(calls, copies, _SAMPLE_MS)}


def host(batches: int) -> dict[str, float]:
    """Microseconds of an eager call, the least of many batches."""
    found = {}
    for rows in (16, 256):
        w = weight(4096, 4096, "nvfp4", 0)
        a = torch.randn(rows, 4096, device="cuda").bfloat16()
        out = torch.empty(rows, 4096, device="cuda", dtype=torch.bfloat16)
        for kernel in ("triton.fp4_gemm", "cuda.fp4_gemm"):
            given = {"b_scale": w.scale, "b_global_scale": w.global_scale, "backend": kernel}
            for name, call in {
                "result": functools.partial(kernelhub.fp4_gemm, a, w.codes, **given),
                "destination": functools.partial(kernelhub.fp4_gemm, a, w.codes, **given, out=out),
            }.items():
                found[f"{kernel}, {rows} rows, {name}"] = round(host_us(call, batches, calls=20), 2)
    return found


def warm(part: str) -> None:
    """A call of Triton's kernel of each size, for what it compiles."""
    index, count = map(int, part.split("/"))
    todo = [(shape, rows) for shape in SHAPES for rows in ROWS]
    for shape, rows in todo[index::count]:
        form, n, k = SHAPES[shape]
        w = weight(n, k, form, 0)
        a = torch.zeros(rows, k, device="cuda", dtype=torch.bfloat16)
        kernelhub.fp4_gemm(a, w.codes, b_scale=w.scale, b_global_scale=w.global_scale, backend="triton.fp4_gemm")
    torch.cuda.synchronize()
    print(f"warm {part}", flush=True)


def summary(row: dict[str, Any]) -> str:
    times = row.get("kernels_ms", {})
    us = " | ".join(f"{name} {1000 * ms:.1f}" for name, ms in times.items())
    wrong = {name: far for name, far in row.get("off", {}).items() if not far <= 1.0}
    more = f" WRONG {wrong}" if wrong else ""
    return f"row {row['case']}: {us}{more} {row.get('failed') or row.get('error', '')}"


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("what", choices=("check", "compile", "time", "host", "warm"))
    options = parser.parse_args()
    os.makedirs("build", exist_ok=True)
    torch.manual_seed(0)
    if options.what == "check":
        return check(options.only, options.seconds)
    if options.what == "compile":
        return compile_all()
    if options.what == "warm":
        warm(options.part)
        return 0
    if options.what == "host":
        row = {**facts(__doc__), "host_us": host(40)}
        print("row host", json.dumps(row["host_us"]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(row, indent=1) + "\n")
        return 0
    began, found, about = time.monotonic(), [], facts(__doc__)
    for rows in ROWS:
        for shape, (form, n, k) in SHAPES.items():
            if options.only not in shape or time.monotonic() - began > options.seconds:
                continue
            row: dict[str, Any] = {"case": f"{shape} {form}, {rows} rows", "rows": rows, "n": n, "k": k, "form": form}
            try:
                copies = max(2, min(16, -(-(160 << 20) // (n * k * 9 // 16))))
                row |= row_of(form, n, k, rows, copies)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            torch.cuda.empty_cache()
            row["at_s"] = round(time.monotonic() - began, 1)
            found.append(row)
            print(summary(row), flush=True)
            if options.out:
                options.out.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
