"""Check and time `cuda.decode` beside `gluon.decode` and FlashMLA on one Hopper GPU.

    python scripts/measure_cuda_mla.py {check,compile,time,few,host} [--only WORD] [--out FILE] [--seconds S]

`check` compares small calls with the reference, one after the other, and says how far each half of the columns is off.
`time`: in CUDA graphs of calls over caches of their own, medians of samples that alternate; each form is compared with
the reference before it is timed, and each of its launches is timed alone. "A schedule" is FlashMLA where all calls of a
graph share the schedule of a step. "One page" has every entry of the block table the same, so that L2 has all pages.
`host`: microseconds of the host for an eager call; `few`
makes a few of these, for what they compile.
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

import measure_gluon_mla as of_gluon
import torch
from alternating import attempt, facts, host_us, measured, medians, options_of

import kernelhub
from kernelhub.backends.cuda.mla.decode import Decode as CudaDecode
from kernelhub.backends.gluon.launch import Launcher
from kernelhub.backends.gluon.mla.adapter import Decode as GluonDecode
from kernelhub.backends.shared.launches import WATCHED
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.mla.attention.reference import mla_attention_reference
from kernelhub.probes.device import simulated

_SCALE = 192**-0.5
VENDOR = of_gluon.VENDOR


FORMS: dict[str, dict[str, int]] = {
    "cuda": {},
    "ahead": {"PREFETCH": 1, "SCORED": 9},
    "ahead, 4": {"PREFETCH": 1, "SCORED": 4},
    "ahead, 1": {"PREFETCH": 1, "SCORED": 1},
    "ahead, 4, once": {"PREFETCH": 1, "SCORED": 4, "ONCE": 99},
    "none, 4": {"PREFETCH": 0, "SCORED": 4, "ONCE": 0},
    "none, 4, once": {"PREFETCH": 0, "SCORED": 4, "ONCE": 99},
}
UNEVEN = "ahead, 4, uneven"  # as many parts as the GPU runs at once, whatever the sequences


def form(name: str) -> Any:
    """The class of adapters of a form."""
    if name == "gluon":
        return GluonDecode
    given = FORMS["ahead, 4" if name == UNEVEN else name]
    return type("Form", (CudaDecode,), {"constants": given, "alike": name != UNEVEN})


def compiled(heads: int, name: str, causal: bool = False, lse: bool = False) -> str:
    """One form, compiled into the cache; in a process of a pool."""
    began = time.monotonic()
    form(name)(MlaProblem(device=simulated("H200"), num_heads=heads, causal=causal, lse=lse))
    return f"compiled {heads} {name} {causal} {lse} in {time.monotonic() - began:.1f} s"


def compile_all() -> None:
    """The forms that are timed and those that are called for long."""
    asked: list[tuple[Any, ...]] = [(h, n) for n in FORMS for h in (128, 16, 64)]
    asked = [(h, "cuda", c, s) for h in (128, 16, 64, 32) for c in (False, True) for s in (False, True)] + asked[3:]
    asked += [(128, n, True) for n in FORMS if n != "cuda"]
    with ProcessPoolExecutor(max(2, min(14, (os.cpu_count() or 2) - 2))) as pool:
        for done in [pool.submit(compiled, *one) for one in asked]:
            print(done.result(), flush=True)


def check() -> int:
    """Small calls, the simplest first."""
    wrong = 0
    for heads, tokens, lengths in (
        (64, None, (64,)),
        (64, None, (128,)),
        (64, None, (256,)),
        (64, None, (100,)),
        (16, None, (1, 0, 63, 65)),
        (128, None, (1024, 512)),
        (128, None, (8192,)),
        (128, 2, (700, 129, 3)),
        (16, 3, (4000, 64, 0, 129)),
        (128, None, (1000,) * 70),
    ):
        arguments = mla_attention_inputs(num_heads=heads, seq_lens=lengths, q_lens=tokens, device="cuda")
        want, want_lse = mla_attention_reference(**arguments, return_lse=True)
        got, lse = kernelhub.mla_attention(**arguments, return_lse=True, backend="cuda.decode")
        torch.cuda.synchronize()
        ok = compare_out(got, want, 4.5).ok
        wrong += not ok
        off = (got.float() - want.float()).abs()
        halves = [round(float(off[..., part].max()), 5) for part in (slice(0, 256), slice(256, 512))]
        finite = torch.isfinite(want_lse)
        of_lse = float((lse - want_lse)[finite].abs().max()) if finite.any() else 0.0
        same = bool((torch.isfinite(lse) == finite).all())
        said = "right" if ok else "WRONG"
        print(f"check {heads} heads, {tokens} tokens, {lengths[:4]} x {len(lengths)}: {said},", flush=True)
        print(f"  halves off by {halves}, nan {bool(got.isnan().any())}, lse off by {of_lse:.5f}, {same}", flush=True)
        if not ok:
            rows = off.flatten(0, -2).amax(1)[:128]
            columns = off.flatten(0, -2).amax(0)[::16]
            print("  rows", [round(float(x), 3) for x in rows[:80]], flush=True)
            print("  columns", [round(float(x), 3) for x in columns], flush=True)
    print(f"check: {wrong} wrong", flush=True)
    return wrong


def beside(heads: int, lengths: tuple[int, ...], tokens: int = 1) -> dict[str, Any]:
    """A row of a table: calls over caches of their own, all by one block table."""
    sequences, pages = len(lengths), -(-max(lengths) // 64)
    count = max(8, min(48, -(-(160 << 20) // (sequences * pages * 64 * 576 * 2))))
    caches = torch.empty(count, sequences * pages, 64, 576, device="cuda", dtype=torch.bfloat16)
    for cache in caches:
        cache.normal_()
    rows = (sequences, tokens, heads) if tokens > 1 else (sequences, heads)
    q = torch.randn(*rows, 576, device="cuda", dtype=torch.bfloat16) * 2 / (_SCALE * 24)
    table = torch.randperm(sequences * pages, device="cuda").int().view(sequences, pages)
    one = torch.zeros_like(table)
    common = {"q": q, "block_table": table, "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cuda")}
    asked = {**common, "kv_cache": caches[0], "scale": _SCALE}
    problem = kernelhub.mla_attention.explain(**asked, backend="gluon.decode").problem
    want = mla_attention_reference(**asked)
    largest = float(caches[0].abs().max())

    def empty() -> torch.Tensor:
        return torch.full((*rows, 512), torch.nan, device="cuda", dtype=torch.bfloat16)

    def launched(made: Any, out: torch.Tensor, of: torch.Tensor, at: int) -> torch.Tensor:
        made.launch(q, caches[at], None, PagedStep(of, common["seq_lens"]), MlaValues(_SCALE), out, None)
        return out

    def public(out: torch.Tensor, at: int) -> torch.Tensor:
        return kernelhub.mla_attention(**common, kv_cache=caches[at], scale=_SCALE, out=out, backend=VENDOR)

    def right(out: torch.Tensor) -> bool:
        return compare_out(out.bfloat16(), want, largest).ok

    made = {name: form(name)(problem) for name in (*FORMS, UNEVEN, "gluon")}
    calls: dict[str, Any] = {VENDOR: functools.partial(public, empty())}
    if attempt(functools.partial(calls[VENDOR], 0)) is None:
        calls[f"{VENDOR}, a schedule"] = of_gluon._of_a_step(asked, caches, empty())
    calls |= {name: functools.partial(launched, of, empty(), table) for name, of in made.items()}
    row = {"calls": count, **measured(calls, count, 12.0, right)}
    right_ones = [name for name in made if row["right"].get(name)]
    row["launches_us"] = {
        name: alone(form(name)(problem), functools.partial(launched, out=empty(), of=table, at=0))
        for name in right_ones
        if name in ("cuda", "ahead, 4", "gluon")
    }
    in_l2 = {
        name: functools.partial(launched, made[name], empty(), one)
        for name in right_ones
        if name in ("ahead", "ahead, 4", "gluon")
    }
    row["one_page_ms"] = medians(in_l2, count, 6.0)
    return row


def alone(made: Any, call: Callable[..., Any]) -> list[float]:
    """Microseconds of each launch of a call."""
    WATCHED.launches = []
    call(made)
    watched: Any = WATCHED.launches
    WATCHED.launches = None
    runs = {}
    for at, (launcher, grid, variant, arguments) in enumerate(watched):
        given = (grid, variant, *arguments) if isinstance(launcher, Launcher) else (grid, *arguments)
        runs[str(at)] = functools.partial(lambda launcher, given, _: launcher(*given), launcher, given)
    return [round(1000 * ms, 2) for ms in medians(runs, 4, 3.0).values()]


def host(batches: int) -> dict[str, float]:
    """Microseconds of an eager call, the least of many batches; a plan of a step, too."""
    found = {}
    for heads in (128, 16):
        arguments = mla_attention_inputs(num_heads=heads, seq_lens=(64,) * 4, device="cuda")
        out = torch.empty(4, heads, 512, device="cuda", dtype=torch.bfloat16)
        for kernel in ("gluon.decode", "cuda.decode"):
            forms: dict[str, Callable[[], Any]] = {
                "result": functools.partial(kernelhub.mla_attention, **arguments, backend=kernel),
                "destination": functools.partial(kernelhub.mla_attention, **arguments, out=out, backend=kernel),
            }
            given = {name: arguments[name] for name in ("q", "kv_cache")}
            plan = kernelhub.mla_attention.prepare(**arguments, backend=kernel)
            step = plan.begin(arguments["block_table"], arguments["seq_lens"])
            forms["step"] = functools.partial(step.run, given["q"], given["kv_cache"], out=out)
            for name, call in forms.items():
                found[f"{kernel}, {heads} heads, {name}"] = round(host_us(call, batches), 2)
    return found


def _mixed(sequences: int) -> tuple[int, ...]:
    return tuple(torch.randint(256, 8192, (sequences,), generator=torch.Generator().manual_seed(0)).tolist())


CASES: dict[str, tuple[Any, ...]] = {
    "128 heads, 64 x 4096": (128, (4096,) * 64),
    "16 heads, 64 x 4096": (16, (4096,) * 64),
    "128 heads, 32 x 8192": (128, (8192,) * 32),
    "64 heads, 128 x 2048": (64, (2048,) * 128),
    "128 heads, 1 x 8192": (128, (8192,)),
    "128 heads, 64 of 256 to 8191": (128, _mixed(64)),
    "128 heads, 8 x 8192": (128, (8192,) * 8),
    "16 heads, 128 x 2048": (16, (2048,) * 128),
    "128 heads, 128 x 2048": (128, (2048,) * 128),
    "16 heads, 4 x 1024": (16, (1024,) * 4),
    "128 heads, 32 x 1024": (128, (1024,) * 32),
    "128 heads, 128 x 8192": (128, (8192,) * 128),
    "16 heads, 32 x 8192": (16, (8192,) * 32),
    "128 heads, 32 x 4096, 2 tokens": (128, (4096,) * 32, 2),
}


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("what", choices=("check", "compile", "time", "host", "few"))
    options = parser.parse_args()
    os.makedirs("build", exist_ok=True)
    torch.manual_seed(0)
    if options.what == "check":
        return check()
    if options.what == "compile":
        compile_all()
        return 0
    if options.what in ("host", "few"):
        row = {**facts(__doc__), "host_us": host(60 if options.what == "host" else 1)}
        print(json.dumps(row["host_us"]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(row, indent=1) + "\n")
        return 0
    began, rows, about = time.monotonic(), [], facts(__doc__)
    for name, case in CASES.items():
        if options.only not in name or time.monotonic() - began > options.seconds:
            continue
        try:
            row = {"case": name, **beside(*case)}
        except Exception as error:
            row = {"case": name, "error": f"{type(error).__name__}: {error}"[:600]}
        torch.cuda.empty_cache()
        rows.append(row)
        times = row.get("kernels_ms", {})
        shared = times.get(f"{VENDOR}, a schedule")
        shares = {
            of: f"{1000 * ms:.1f} {100 * shared / ms:.0f}%" if shared else f"{1000 * ms:.1f}"
            for of, ms in times.items()
        }
        wrong = [of for of, agrees in row.get("right", {}).items() if not agrees]
        more = [row.get(key, "") for key in ("failed", "launches_us", "one_page_ms", "error")]
        print(f"row {name}: {shares} wrong {wrong}", *more, flush=True)
        if options.out:
            options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
