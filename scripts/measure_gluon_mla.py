"""Time Gluon's decode of latent attention beside Triton's over float8, and FlashMLA's, on one Hopper GPU.

    python scripts/measure_gluon_mla.py [--only WORD] [--compile] [--part I/N] [--out FILE] [--seconds S]

Forms of `gluon.decode_fp8` and the other kernels of the op, in CUDA graphs of so many calls that their caches, each
call's its own, are larger than L2; medians of samples that alternate. `off` is how far a result is from the last one's.
`--compile` only calls each once, the I-th of N parts of them; `--part` else takes a part of the cases. The file is
written after every case. "beside FlashMLA": forms of `gluon.decode` are compared with the reference before they are
timed, and each of their launches is timed alone; a line has FlashMLA's time, and the others' shares of its speed. "A
schedule" is FlashMLA where all calls of a graph share the schedule of a step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from alternating import Call, attempt, launches_us, measured, options_of, time_cases

import kernelhub
from kernelhub.backends.gluon.mla.adapter import Decode, DecodeFloat8
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.reference import mla_attention_reference

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


class Most(Decode):
    """As many parts as the device runs at once, wherever they cut a sequence."""

    alike = False


# The last is compared with.
DECODES = {"most parts": Most, "as it is": Decode}
VENDOR = "flash_mla.dense"


def beside_flash_mla(heads: int, lengths: tuple[int, ...], tokens: int = 1) -> dict[str, Any]:
    """A row of a table: calls over caches of their own, all by one block table."""
    sequences, pages = len(lengths), -(-max(lengths) // 64)
    count = max(8, min(_MOST_CALLS, -(-_BYTES // (sequences * pages * 64 * 576 * 2))))
    caches = torch.empty(count, sequences * pages, 64, 576, device="cuda", dtype=torch.bfloat16)
    for cache in caches:
        cache.normal_()
    rows = (sequences, tokens, heads) if tokens > 1 else (sequences, heads)
    q = torch.randn(*rows, 576, device="cuda", dtype=torch.bfloat16) * 2 / (_SCALE * 24)
    table = torch.randperm(sequences * pages, device="cuda").int().view(sequences, pages)
    common = {"q": q, "block_table": table, "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cuda")}
    asked = {**common, "kv_cache": caches[0], "scale": _SCALE}
    problem = kernelhub.mla_attention.explain(**asked, backend="gluon.decode").problem
    want = mla_attention_reference(**asked)
    largest = float(caches[0].abs().max())

    def empty() -> torch.Tensor:
        return torch.full((*rows, 512), torch.nan, device="cuda", dtype=torch.bfloat16)

    def launched(made: Decode, out: torch.Tensor, at: int) -> torch.Tensor:
        step = PagedStep(table, common["seq_lens"])
        made.launch(q, caches[at], None, step, MlaValues(_SCALE), out, None)
        return out

    def public(out: torch.Tensor, at: int) -> torch.Tensor:
        return kernelhub.mla_attention(**common, kv_cache=caches[at], scale=_SCALE, out=out, backend=VENDOR)

    def right(out: torch.Tensor) -> bool:
        return compare_out(out.bfloat16(), want, largest).ok

    made = {name: functools.partial(launched, of(problem), empty()) for name, of in DECODES.items()}
    calls: dict[str, Call] = {VENDOR: functools.partial(public, empty())}
    failed = attempt(functools.partial(calls[VENDOR], 0))
    if failed is None:
        calls["flash_mla.dense, a schedule"] = _of_a_step(asked, caches, empty())
    row = {"vendor": VENDOR, "calls": count, **measured({**calls, **made}, count, 12.0, right)}
    row["launches_us"] = {
        name: launches_us(functools.partial(launched, of(problem), empty(), 0)) for name, of in DECODES.items()
    }
    return row


def _of_a_step(asked: dict[str, Any], caches: torch.Tensor, out: torch.Tensor) -> Call:
    """FlashMLA's calls of one step; a capture makes the step's schedule once."""
    plan = kernelhub.mla_attention.prepare(**asked, backend=VENDOR)
    step = plan.begin(asked["block_table"], asked["seq_lens"])
    return lambda at: step.run(asked["q"], caches[at], out=out)


def _cases(heads: int, batches: list[tuple[int, int]], **more: Any) -> dict[str, Callable[[], Any]]:
    kind = "bfloat16" if more.get("float8") is False else "float8"
    return {
        f"{kind}, {heads} heads, {sequences} x {length}": functools.partial(decode, heads, sequences, length, **more)
        for sequences, length in batches
    }


def _mixed(sequences: int) -> tuple[int, ...]:
    return tuple(torch.randint(256, 8192, (sequences,), generator=torch.Generator().manual_seed(0)).tolist())


def _beside(heads: int, *batches: tuple[int, int], tokens: int = 1) -> dict[str, Callable[[], Any]]:
    more = f", {tokens} tokens" if tokens > 1 else ""
    return {
        f"beside FlashMLA, {heads} heads, {sequences} x {length}{more}": functools.partial(
            beside_flash_mla, heads, (length,) * sequences, tokens=tokens
        )
        for sequences, length in batches
    }


_SMALL = [(1, 1024), (1, 256), (1, 2048), (4, 1024)]
CASES = {
    **_beside(128, (64, 4096), (32, 8192), (128, 2048), (128, 8192)),
    "beside FlashMLA, 128 heads, 64 of 256 to 8191": functools.partial(beside_flash_mla, 128, _mixed(64)),
    **_beside(128, (32, 4096), tokens=2),
    **_beside(16, (64, 4096), (32, 8192), (128, 2048), (128, 8192)),
    **_beside(64, (128, 2048)),
    **_beside(128, (32, 1024), (64, 4090), (8, 8192)),
    "beside FlashMLA, 128 heads, 32 of 256 to 8191": functools.partial(beside_flash_mla, 128, _mixed(32)),
    **_cases(128, [(32, 8192), (1, 1024), (8, 8192), (32, 1024), (64, 4096), (128, 2048), (1, 8192), (4, 1024)]),
    **_cases(16, [(32, 8192), (1, 1024), (8, 8192), (32, 1024), (64, 4096), (128, 2048), (1, 8192), (4, 1024)]),
    "float8, 16 heads, 32 x 4096, 2 tokens": functools.partial(decode, 16, 32, 4096, tokens=2),
    **_cases(64, [(32, 8192), (128, 2048), (1, 1024)]),
    "float8, 128 heads, 32 x 4096, 2 tokens": functools.partial(decode, 128, 32, 4096, tokens=2),
    **_cases(128, _SMALL, float8=False),
    **_cases(16, _SMALL, float8=False),
}


def row_of(case: Callable[[], Any]) -> dict[str, Any]:
    if case.func is beside_flash_mla:  # type: ignore[attr-defined]
        return case()
    calls, count = case()
    return {"calls": count, **measured(calls, count)}


def main() -> int:
    options = options_of(__doc__).parse_args()
    if options.compile:
        return compile_part(*map(int, options.part.split("/")), "FlashMLA" in options.only)
    return time_cases(__doc__, options, CASES, row_of)


def compile_part(part: int, parts: int, of_flash_mla: bool) -> int:
    """Small calls that compile what the cases need."""
    if of_flash_mla:
        some = [case for name, case in CASES.items() if case.func is beside_flash_mla]
        kinds = {(case.args[0], case.keywords.get("tokens", 1)) for case in some}
        for heads, tokens in sorted(kinds)[part::parts]:
            print(heads, tokens, beside_flash_mla(heads, (128, 256), tokens).get("failed", ""), flush=True)
        return 0
    number = 0
    for heads in (128, 16, 64):
        for name in (*(OF_FEW if heads <= 16 else ()), *FORMS, "triton.split_kv"):
            number += 1
            if number % parts == part:
                for sequences, length in ((2, 256), (32, 1024), (1, 1024)):
                    call = decode(heads, sequences, length)[0][name]
                    print(name, heads, attempt(functools.partial(call, 0)) or "", flush=True)
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
