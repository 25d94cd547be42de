"""Check and time `cuda.decode` beside `gluon.decode` and FlashMLA on one Hopper GPU.

    python scripts/measure_cuda_mla.py {check,time,host} [--only WORD] [--out FILE] [--seconds S] [--without NAME]

`check` compares small calls with the reference, one after the other, and says how far each half of the columns is off.
`time`: in CUDA graphs of calls over caches of their own, medians of samples that alternate; each form is compared with
the reference before it is timed, and each of its launches is timed alone. "A schedule" is FlashMLA where all calls of a
graph share the schedule of a step. "One page" has every entry of the block table the same, so that L2 has all pages.
`host`: microseconds of the host for an eager call.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure_gluon_mla as of_gluon
import torch
from alternating import attempt, facts, measured, medians, options_of

import kernelhub
from kernelhub.backends.cuda.mla.decode import Decode as CudaDecode
from kernelhub.backends.gluon.launch import Launcher
from kernelhub.backends.gluon.mla.adapter import Decode as GluonDecode
from kernelhub.backends.shared.launches import WATCHED
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.attention.reference import mla_attention_reference

_SCALE = 192**-0.5
VENDOR = of_gluon.VENDOR


class Unasked(CudaDecode):
    """No page is asked for ahead."""

    prefetch = 0


class Shared(CudaDecode):
    """Each of two tiles asks for half of the rows."""

    prefetch = 2


FORMS: dict[str, Any] = {"cuda": CudaDecode, "cuda, none ahead": Unasked, "cuda, half ahead": Shared, "gluon": GluonDecode}


def asking_ahead() -> Any:
    """`gluon.decode` whose loading warps ask L2 for pages ahead: an experiment, made of its source."""
    import importlib.util

    text = Path("kernelhub/backends/gluon/mla/decode.py").read_text()
    for old, new in (
        ("from kernelhub.backends.gluon.language import (", "from kernelhub.backends.gluon.language import (\n    bring_to_cache,"),
        ("GATHERED, CONVERTED, CONVERTED_PAGES =", "LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))\nGATHERED, CONVERTED, CONVERTED_PAGES ="),
        ("q_half, q_rope, kv_piece, q_buf_left", "q_half, q_rope, kv_piece, cache, row_bytes, q_buf_left"),
        (
            "                    row = page * page_rows\n",
            """                    row = page * page_rows
                    line = (row + RIGHT * 32 + gl.arange(0, 32, LANES)).to(gl.int64) * row_bytes
                    for of in gl.static_range(9):
                        bring_to_cache(cache + line + of * 128, gl.full((32,), 1, gl.int32, LANES))
""",
        ),
        ("            q_half, q_rope_desc, kv_piece, q_left,", "            q_half, q_rope_desc, kv_piece, cache, row_bytes, q_left,"),
        ("    q_half, q_rope_desc, kv_piece, out, lse,", "    q_half, q_rope_desc, kv_piece, cache, row_bytes, out, lse,"),
        ('"num_seqs", "tokens",', '"row_bytes", "num_seqs", "tokens",'),
    ):
        assert old in text, old
        text = text.replace(old, new)
    path = Path("build/decode_asking_ahead.py")
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    spec = importlib.util.spec_from_file_location("decode_asking_ahead", path)
    made = importlib.util.module_from_spec(spec)
    sys.modules["decode_asking_ahead"] = made
    spec.loader.exec_module(made)

    class Ahead(GluonDecode):
        def _launcher(self, static: dict[str, Any]) -> Any:
            launcher = Launcher(made.decode_kernel, static)

            def launch(grid: int, variant: Any, *arguments: Any) -> None:
                pages = arguments[2].base
                more = pages.view(torch.uint8), pages.stride(0) * 2
                launcher(grid, variant, *arguments[:3], *more, *arguments[3:])

            return launch

    return Ahead


def check(without: str) -> int:
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
        print(f"check {heads} heads, {tokens} tokens, {lengths[:4]} x {len(lengths)}: {'right' if ok else 'WRONG'}, "
              f"halves off by {halves}, nan {bool(got.isnan().any())}, lse off by {of_lse:.5f}, {same}", flush=True)  # fmt: skip
        if not ok:
            rows = off.flatten(0, -2).amax(1)[:128]
            print("  rows", [round(float(x), 3) for x in rows[:80]], "columns", [round(float(x), 3) for x in off.flatten(0, -2).amax(0)[::16]], flush=True)  # fmt: skip
    print(f"check: {wrong} wrong", flush=True)
    return wrong


def beside(heads: int, lengths: tuple[int, ...], tokens: int = 1, without: str = "") -> dict[str, Any]:
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

    forms = {**FORMS, "gluon, ahead": asking_ahead()}
    made = {name: of(problem) for name, of in forms.items() if not (without and name.startswith(without))}
    calls: dict[str, Any] = {VENDOR: functools.partial(public, empty())}
    if attempt(functools.partial(calls[VENDOR], 0)) is None:
        calls[f"{VENDOR}, a schedule"] = of_gluon._of_a_step(asked, caches, empty())
    calls |= {name: functools.partial(launched, of, empty(), table) for name, of in made.items()}
    row = {"calls": count, **measured(calls, count, 12.0, right)}
    right_ones = [name for name in made if row["right"].get(name)]
    row["launches_us"] = {name: alone(forms[name](problem), functools.partial(launched, out=empty(), of=table, at=0)) for name in right_ones}  # fmt: skip
    row["one_page_ms"] = medians({name: functools.partial(launched, made[name], empty(), one) for name in right_ones}, count, 6.0)  # fmt: skip
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


def host() -> dict[str, float]:
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
                for _ in range(50):
                    call()
                best = 1e9
                for _ in range(60):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    for _ in range(50):
                        call()
                    best = min(best, (time.perf_counter() - began) / 50)
                found[f"{kernel}, {heads} heads, {name}"] = round(best * 1e6, 2)
    return found


def _mixed(sequences: int) -> tuple[int, ...]:
    return tuple(torch.randint(256, 8192, (sequences,), generator=torch.Generator().manual_seed(0)).tolist())


CASES: dict[str, tuple[Any, ...]] = {
    "128 heads, 64 x 4096": (128, (4096,) * 64),
    "16 heads, 64 x 4096": (16, (4096,) * 64),
    "128 heads, 32 x 8192": (128, (8192,) * 32),
    "128 heads, 128 x 2048": (128, (2048,) * 128),
    "128 heads, 64 of 256 to 8191": (128, _mixed(64)),
    "16 heads, 128 x 2048": (16, (2048,) * 128),
    "64 heads, 128 x 2048": (64, (2048,) * 128),
    "128 heads, 32 x 4096, 2 tokens": (128, (4096,) * 32, 2),
    "128 heads, 8 x 8192": (128, (8192,) * 8),
    "128 heads, 32 x 1024": (128, (1024,) * 32),
    "128 heads, 128 x 8192": (128, (8192,) * 128),
    "16 heads, 32 x 8192": (16, (8192,) * 32),
    "16 heads, 4 x 1024": (16, (1024,) * 4),
    "128 heads, 1 x 8192": (128, (8192,)),
}


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("what", choices=("check", "time", "host"))
    parser.add_argument("--without", default="")
    options = parser.parse_args()
    os.makedirs("build", exist_ok=True)
    torch.manual_seed(0)
    if options.what == "check":
        return check(options.without)
    if options.what == "host":
        row = {**facts(__doc__), "host_us": host()}
        print(json.dumps(row["host_us"]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(row, indent=1) + "\n")
        return 0
    if options.compile:
        for heads, tokens in ((128, 1), (16, 1), (64, 1), (128, 2))[int(options.part.split("/")[0]) :: int(options.part.split("/")[1])]:
            print(heads, tokens, attempt(lambda h=heads, t=tokens: beside(h, (128, 256), t, options.without)), flush=True)
        return 0
    began, rows, about = time.monotonic(), [], facts(__doc__)
    for name, case in CASES.items():
        if options.only not in name or time.monotonic() - began > options.seconds:
            continue
        try:
            row = {"case": name, **beside(*case, without=options.without)}
        except Exception as error:
            row = {"case": name, "error": f"{type(error).__name__}: {error}"[:600]}
        torch.cuda.empty_cache()
        rows.append(row)
        times = row.get("kernels_ms", {})
        shared = times.get(f"{VENDOR}, a schedule")
        shares = {of: f"{1000 * ms:.1f} {100 * shared / ms:.0f}%" if shared else f"{1000 * ms:.1f}" for of, ms in times.items()}
        wrong = [of for of, agrees in row.get("right", {}).items() if not agrees]
        print(f"row {name}: {shares} wrong {wrong} {row.get('failed', '')} alone {row.get('launches_us')} one page {row.get('one_page_ms')} {row.get('error', '')}", flush=True)  # fmt: skip
        if options.out:
            options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
