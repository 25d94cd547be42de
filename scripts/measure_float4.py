"""Time forms of products of few rows with float4 weights on one Hopper GPU, and check them beside float64.

    python scripts/measure_float4.py [--only WORD] [--compile] [--part I/N] [--out FILE] [--seconds S]
        [--selected] [--marlin FOLDER]

Forms of `triton.fp4_gemm` for up to 64 rows (kernelhub/backends/triton/gemm/fp4/few.py) beside the kernel of all sizes
and torch's product with bfloat16 weights, us of a call in CUDA graphs, medians of samples that alternate, each call of
a graph with another weight, 160 MB of them or more. `off` is the error over what the op's tolerance allows, of weights
whose scales are 0, 1, 254, 255 and numbers between. `--compile` only calls the forms once, the I-th of N parts of them.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from typing import Any
from unittest import mock

import torch
from alternating import captured, facts, options_of, sample

import kernelhub
from kernelhub.backends.triton.gemm.fp4 import few
from kernelhub.backends.triton.gemm.fp4.adapter import Fp4Gemm
from kernelhub.backends.triton.gemm.fp4.few import Form, Sliced, Split
from kernelhub.ops.formats import from_e2m1, from_e8m0
from kernelhub.ops.gemm.fp4.adapter import Activations, Weights
from kernelhub.ops.gemm.fp4.problem import GROUP, Fp4GemmProblem
from kernelhub.ops.gemm.fp4.tolerance import error_allowed
from kernelhub.probes.device import facts as device_facts
from kernelhub.runtime import counters

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FORMATS = ("mxfp4", "nvfp4")
ROWS = (1, 16, 64, 32)
_MB = 1 << 20
_HOSTILE_N = 1072
_SAMPLES, _SAMPLE_MS = 7, 1.5


def forms(size: int, form: str) -> list[Form]:
    """What is tried for up to so many rows."""
    if size <= 16:
        made: list[Form] = [Sliced(32, 4, 1, 3), Sliced(32, 4, 1, 4), Sliced(32, 8, 1, 3), Sliced(16, 4, 2, 3)]
        made += [Sliced(64, 4, 1, 3), Sliced(64, 8, 1, 3)]
        for one in (True, False):
            made += [Split(64, 4, 2, 3, 4, one), Split(64, 4, 2, 3, 2, one), Split(128, 4, 1, 3, 4, one)]
        return made
    made = [Split(128, 4, 1, 3, each, False) for each in (1, 2, 3, 4)]
    made += [Split(64, 4, 2, 3, 2, False), Split(64, 4, 2, 2, 2, False), Split(128, 8, 2, 3, 1), Split(128, 8, 2, 3, 2)]
    made += [Split(256, 8, 1, 3, 1)]
    if form == "nvfp4":
        made += [Split(64, 4, 1, 3, 2, False), Split(128, 8, 1, 3, 2)]
    return made


def name_of(form: Form) -> str:
    short = f"{type(form).__name__.lower()} {form.block_n}x{form.num_warps}w p{form.pieces} s{form.num_stages}"
    if isinstance(form, Split):
        short += f" {form.each_sm}/sm" + ("" if form.one_launch else " two")
    return short


def problem_of(form: str, n: int, k: int) -> Fp4GemmProblem:
    return Fp4GemmProblem(device=device_facts(torch.device("cuda")), b_format=form, n=n, k=k)


def adapter_of(problem: Fp4GemmProblem, form: Form | None) -> Fp4Gemm:
    """An adapter that uses the form for all sizes; the kernel of all sizes for None."""
    with mock.patch.object(few, "form_of", return_value=form):
        made = Fp4Gemm(problem)
        for rows in few.SIZES:
            made._few_rows_of(rows, True)
    return made


def weight(n: int, k: int, form: str, seed: int, hostile: bool = False) -> Weights:
    draw = torch.Generator(device="cuda").manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), generator=draw, device="cuda", dtype=torch.uint8)
    groups = k // GROUP[form]
    if form == "nvfp4":
        scale = torch.randint(0 if hostile else 40, 127, (n, groups), generator=draw, device="cuda", dtype=torch.uint8)
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


@functools.lru_cache(4)
def hostile(form: str, k: int, rows: int) -> tuple[Weights, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """A weight with hostile scales; activations, exact results, and sums of sizes."""
    w = weight(_HOSTILE_N, k, form, 7, hostile=True)
    scale = w.scale.float() if form == "nvfp4" else from_e8m0(w.scale)
    full = from_e2m1(w.codes).double() * scale.double().repeat_interleave(GROUP[form], 1)
    if w.global_scale is not None:
        full = full * w.global_scale.double()
    given = [(torch.randn(rows, k, device="cuda") * size).bfloat16() for size in (1.0, 2.0**-14)]
    return w, [(a, a.double() @ full.t(), a.double().abs() @ full.abs().t()) for a in given]


def off(one: Form | None, form: str, k: int, rows: int) -> float:
    """The largest error over what is allowed, of rows of a hostile weight whose sums are numbers of float32."""
    worst = 0.0
    made = adapter_of(problem_of(form, _HOSTILE_N, k), one)
    w, given = hostile(form, k, rows)
    for a, want, sums in given:
        out = torch.full((rows, _HOSTILE_N), 7.0, dtype=torch.float32, device="cuda").bfloat16()
        made.launch(Activations(a, None, None), w, None, out)
        checked = sums < 2.0**126
        nan = want.isnan()
        if not torch.equal(out.isnan() & (checked | nan), nan):
            return float("inf")
        allowed = error_allowed(want, sums, k, torch.bfloat16)
        ratio = ((out.double() - want).abs() / allowed)[checked & ~nan]
        worst = max(worst, float(ratio.nan_to_num(nan=1e9).max()))
    return worst


def compile_part(only: str, part: str) -> None:
    index, count = map(int, part.split("/"))
    todo = [(form, size, one) for form in FORMATS for size in few.SIZES for one in forms(size, form)]
    for form, size, one in todo[index::count]:
        if only in name_of(one):
            for n, k in (*SHAPES.values(), *((_HOSTILE_N, k) for k in (4096, 14336))):
                try:
                    w = weight(n, k, form, 0)
                    a = torch.zeros(size, k, dtype=torch.bfloat16, device="cuda")
                    out = torch.empty(size, n, dtype=torch.bfloat16, device="cuda")
                    adapter_of(problem_of(form, n, k), one).launch(Activations(a, None, None), w, None, out)
                    torch.cuda.synchronize()
                except Exception as error:
                    print(form, size, name_of(one), f"{type(error).__name__}: {error}"[:200])
                    break


def marlin(form: str, n: int, k: int, a: torch.Tensor, weights: list[Weights]) -> Any:
    """Calls of vLLM's Marlin, or None without it."""
    try:
        packed = []
        for w in weights:
            scale = w.scale if form == "nvfp4" else w.scale.view(torch.float8_e8m0fnu)
            named = {"b": w.codes, "b_scale": scale, "b_global_scale": w.global_scale}
            named = {name: tensor for name, tensor in named.items() if tensor is not None}
            packed.append(kernelhub.fp4_gemm.prepare(a=a, **named, backend="marlin").pack(**named))
        out = torch.empty(len(a), n, dtype=a.dtype, device="cuda")

        def call(at: int) -> None:
            kernelhub.fp4_gemm(a=a, b=packed[at], out=out, backend="marlin")

        call(0)
        return call
    except Exception as error:
        print("no Marlin:", f"{type(error).__name__}: {error}"[:160])
        return None


def medians(calls: dict[str, Any], count: int, wrong: dict[str, Any]) -> dict[str, float]:
    """us of a call: graphs of `count` calls, whose samples take turns."""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = captured(call, count)
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:120]
            torch.cuda.synchronize()
    rounds = {name: max(1, int(_SAMPLE_MS / sample(graph, 1))) for name, graph in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_SAMPLES):
        for name, graph in graphs.items():
            times[name].append(1e3 * sample(graph, rounds[name]) / count)
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


def cell(form: str, shape: str, rows: int, only: str, selected: bool, with_marlin: bool) -> dict[str, Any]:
    n, k = SHAPES[shape]
    for place in [place for place in counters._kept if place[1]]:
        del counters._kept[place]  # of graphs that are gone: there are 256 places
    count = max(4, -(-160 * _MB // (n * k // 2)))
    weights = [weight(n, k, form, at) for at in range(count)]
    a = torch.randn(rows, k, device="cuda").bfloat16()
    out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
    size = next(size for size in few.SIZES if rows <= size)
    problem = problem_of(form, n, k)
    calls: dict[str, Any] = {}
    wrong: dict[str, Any] = {}
    activations = Activations(a, None, None)
    chosen = few.form_of(problem, size)
    tried = forms(size, form) if not selected else [] if chosen is None else [chosen]
    for one in [None, *tried]:
        name = "before" if one is None else name_of(one)
        if one is not None and only not in name:
            continue
        try:
            made = adapter_of(problem, one)
            if shape in ("o", "down"):
                wrong[name] = round(off(one, form, k, rows), 3)

            def call(at: int, made: Fp4Gemm = made) -> None:
                made.launch(activations, weights[at], None, out)

            call(0)
            calls[name] = call
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:120]
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, count // 4))]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            torch.mm(a, dense[0].t(), out=out)  # which loads cuBLAS
    torch.cuda.synchronize()
    calls["torch bfloat16"] = lambda at: torch.mm(a, dense[at % len(dense)].t(), out=out)
    if with_marlin:
        found = marlin(form, n, k, a, weights)
        if found is not None:
            calls["marlin"] = found
    times = medians(calls, count, wrong)
    roof = (n * k // 2 + n * k // GROUP[form] + 2 * rows * (n + k)) / 4.8e6
    return {
        "format": form,
        "shape": shape,
        "n": n,
        "k": k,
        "rows": rows,
        "roof": round(roof, 2),
        "us": times,
        "off": wrong,
    }


def main() -> int:
    options = options_of(__doc__)
    options.add_argument("--selected", action="store_true", help="only what is selected")
    options.add_argument("--marlin", default="", help="a folder with vLLM")
    given = options.parse_args()
    if given.compile:
        compile_part(given.only, given.part)
        return 0
    began = time.monotonic()
    found = facts(__doc__) | {"cells": []}
    with_marlin = bool(given.marlin) and os.path.isdir(given.marlin)
    if with_marlin:
        sys.path.append(given.marlin)
    for rows in ROWS:
        for shape in SHAPES:
            for form in FORMATS:
                if time.monotonic() - began > given.seconds:
                    print("out of time")
                    return 0
                made = cell(form, shape, rows, given.only, given.selected, with_marlin)
                found["cells"].append(made)
                times = made["us"]
                fixed = [name for name in ("before", "marlin", "torch bfloat16") if name in times]
                best = sorted((time, name) for name, time in times.items() if name not in fixed)
                bad = {
                    name: ratio for name, ratio in made["off"].items() if not isinstance(ratio, float) or not ratio <= 1
                }
                line = " ".join(f"{name} {times[name]}" for name in fixed) + " | "
                print(
                    form,
                    shape,
                    rows,
                    "roof",
                    made["roof"],
                    line + ", ".join(f"{name} {t}" for t, name in best[:4]),
                    bad or "",
                )
                if given.out:
                    given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
