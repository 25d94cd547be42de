"""Time Gluon's decode of latent attention over float8 and bfloat16 caches beside Triton's, on one Hopper GPU.

    python scripts/measure_gluon_mla.py [--only WORD] [--compile] [--part I/N] [--out FILE] [--seconds S]

Forms of `gluon.decode_fp8` and the other kernels of the op, in CUDA graphs of so many calls that their caches, each
call's its own, are larger than L2; medians of samples that alternate. `off` is how far a result is from the last one's.
`--compile` only calls each once, the I-th of N parts of them. The file is written after every case.
"""

from __future__ import annotations

import functools
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from alternating import Call, attempt, facts, measured, options_of

import kernelhub
from kernelhub.backends.gluon.mla.adapter import DecodeFloat8
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaValues

_BYTES, _MOST_CALLS = 160 << 20, 48  # of caches in a graph, and calls
_SCALE = 192**-0.5


class Tiles(DecodeFloat8):
    """Tiles of 64 rows, also for few rows."""

    few = False


OF_FEW = {"few rows": DecodeFloat8}
FORMS = {"tiles of 64": Tiles}


def decode(
    heads: int, sequences: int, length: int, float8: bool = True, tokens: int = 1
) -> tuple[dict[str, Call], int]:
    """Calls by the number of their cache, and how many caches there are."""
    pages = -(-length // 64)
    count = max(2, min(_MOST_CALLS, -(-_BYTES // (sequences * pages * 64 * 576 * (1 if float8 else 2)))))
    shape = (count * sequences * pages, 64, 576)
    if float8:
        cache = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
        for part in cache.split(1024):
            part.copy_((torch.randn(part.shape, device="cuda", dtype=torch.float16) * 64).clamp(-448, 448))
    else:
        cache = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
    rows = (sequences, tokens, heads) if tokens > 1 else (sequences, heads)
    q = torch.randn(*rows, 576, device="cuda", dtype=torch.bfloat16) * 2 / (_SCALE * 24)
    tables = torch.randperm(len(cache), device="cuda").int().view(count, sequences, pages)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")
    out = torch.empty(*rows, 512, device="cuda", dtype=torch.bfloat16)
    more = {"kv_scale": 1 / 64} if float8 else {}
    common = {"q": q, "kv_cache": cache, "seq_lens": lengths, "scale": _SCALE, "out": out, **more}

    def public(kernel: str, at: int) -> torch.Tensor:
        return kernelhub.mla_attention(**common, block_table=tables[at], backend=kernel)

    def launched(made: DecodeFloat8, at: int) -> torch.Tensor:
        step = PagedStep(tables[at], lengths)
        made.launch(q, cache, None, step, MlaValues(_SCALE, None, 1 / 64), out, None)
        return out

    calls: dict[str, Call] = {}
    if float8:
        asked = {**common, "block_table": tables[0], "backend": "gluon.decode_fp8"}
        problem = kernelhub.mla_attention.explain(**asked).problem
        forms = OF_FEW | FORMS if heads * tokens <= 16 else FORMS
        calls |= {name: functools.partial(launched, of(problem)) for name, of in forms.items()}
    else:
        calls["gluon.decode"] = functools.partial(public, "gluon.decode")
    calls["triton.split_kv"] = functools.partial(public, "triton.split_kv")
    return calls, count


def _cases(heads: int, batches: list[tuple[int, int]], **more: Any) -> dict[str, Callable[[], Any]]:
    kind = "bfloat16" if more.get("float8") is False else "float8"
    return {
        f"{kind}, {heads} heads, {sequences} x {length}": functools.partial(decode, heads, sequences, length, **more)
        for sequences, length in batches
    }


_SMALL = [(1, 1024), (1, 256), (1, 2048), (4, 1024)]
CASES = {
    **_cases(128, [(32, 8192), (1, 1024), (8, 8192), (32, 1024), (64, 4096), (128, 2048), (1, 8192), (4, 1024)]),
    **_cases(16, [(32, 8192), (1, 1024), (8, 8192), (32, 1024), (64, 4096), (128, 2048), (1, 8192), (4, 1024)]),
    "float8, 16 heads, 32 x 4096, 2 tokens": functools.partial(decode, 16, 32, 4096, tokens=2),
    **_cases(64, [(32, 8192), (128, 2048), (1, 1024)]),
    "float8, 128 heads, 32 x 4096, 2 tokens": functools.partial(decode, 128, 32, 4096, tokens=2),
    **_cases(128, _SMALL, float8=False),
    **_cases(16, _SMALL, float8=False),
}


def main() -> int:
    options = options_of(__doc__).parse_args()
    began = time.monotonic()
    if options.compile:
        return compile_part(*map(int, options.part.split("/")), began)
    rows: list[dict[str, Any]] = []
    about = facts(__doc__)
    for name, make in CASES.items():
        if options.only not in name or time.monotonic() - began > options.seconds:
            continue
        row: dict[str, Any] = {"case": name}
        try:
            torch.manual_seed(0)
            calls, count = make()
            row |= {"calls": count, **measured(calls, count)}
        except Exception:
            row["error"] = traceback.format_exc()[-600:]
        calls = {}
        torch.cuda.empty_cache()
        row["at_s"] = round(time.monotonic() - began, 1)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


def compile_part(part: int, parts: int, began: float) -> int:
    """Small calls that compile what the cases need."""
    number = 0
    for heads in (128, 16, 64):
        for name in (*(OF_FEW if heads <= 16 else ()), *FORMS, "triton.split_kv"):
            number += 1
            if number % parts == part:
                for sequences, length in ((2, 256), (32, 1024), (1, 1024)):
                    call = decode(heads, sequences, length)[0][name]
                    print(name, heads, attempt(functools.partial(call, 0)) or "", flush=True)
    torch.cuda.synchronize()
    print(f"part {part}/{parts}: {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
