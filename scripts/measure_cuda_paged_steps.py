"""Check and time ragged and small steps of `cuda.paged_decode` beside `triton.split_kv` on one Hopper GPU.

    python scripts/measure_cuda_paged_steps.py {check,compile,time} [--part I/N] [--merging] [--only WORD] [--out FILE]

`check` compares small calls with the reference, with --merging in one launch; part I of N has every N-th. `compile`
makes the kernels that `time` needs. `time`: in CUDA graphs of calls over caches of their own, medians of samples that
alternate; each form is compared with the reference before it is timed. Ragged steps have one query of each sequence,
and are timed beside the same step that is not ragged. "few" steps are timed with other numbers of parts, too.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from alternating import attempt, facts, measured, options_of
from measure_cuda_paged import BF16, CUDA, E4M3, GPT_OSS_WINDOW, LLAMA, QWEN, TRITON, WIDE

import kernelhub
from kernelhub.backends.cuda.attention import decode
from kernelhub.backends.cuda.attention.decode import Decode
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.models.shapes import AttentionModel

_PAGE = 16
_BYTES = 200 << 20  # of the caches of all calls of a graph, so that L2 holds none
_COMPARED = 4  # sequences
_DTYPES = {"bf16": BF16, "fp8": E4M3}


class OneLaunch(Decode):
    """The last block of a sequence merges its parts."""

    merges = True


class TwoLaunches(Decode):
    """A second launch does."""

    merges = False


def in_parts(parts: int) -> type[Decode]:
    """The adapter whose first call of a kind, which the launcher repeats, has so many parts."""

    def launch_anew(self: Any, *given: Any) -> None:
        chosen, decode.parts_of = decode.parts_of, lambda *_: parts
        try:
            TwoLaunches._launch_anew(self, *given)
        finally:
            decode.parts_of = chosen

    return type("InParts", (TwoLaunches,), {"_launch_anew": launch_anew})


def other_parts(row: Row) -> list[int]:
    """Some and as many of each sequence, beside those of the adapter: 264 blocks at once of 8 heads."""
    sequences, most = len(row.lengths), 33
    each = {most // sequences * part // 8 * sequences for part in (2, 3, 4, 5, 6, 7)}
    return sorted({*each, most * 2 // 3, most * 2} - {0, most})


def _mixed(sequences: int) -> tuple[int, ...]:
    return tuple(torch.randint(256, 8192, (sequences,), generator=torch.Generator().manual_seed(0)).tolist())


class Row(NamedTuple):
    """A row of the table."""

    lengths: tuple[int, ...]
    kv_dtype: torch.dtype
    ragged: bool
    idle: int = 0  # more sequences of as many keys, without a query


_RAGGED = {"64 x 4096": (4096,) * 64, "64 of 256 to 8191": _mixed(64), "256 x 512": (512,) * 256, "8 x 512": (512,) * 8}
_SMALL = {
    "1 x 1024": (1024,),
    "4 x 512": (512,) * 4,
    "256 x 128": (128,) * 256,
    "1 x 4096": (4096,),
    "8 x 512": (512,) * 8,
    "64 x 4096": (4096,) * 64,
    "16 x 4096": (4096,) * 16,
    "1 x 131072": (131072,),
    "64 of 256 to 8191": _mixed(64),
}
_FEW_KEYS = {
    "1 x 1024": (1024,),
    "1 x 4096": (4096,),
    "1 x 256": (256,),
    "1 x 9000": (9000,),
    "2 x 1024": (1024,) * 2,
    "4 x 1024": (1024,) * 4,
    "8 x 512": (512,) * 8,
    "1 x 2048": (2048,),
    "2 x 4096": (4096,) * 2,
    "4 x 256": (256,) * 4,
    "8 x 2048": (2048,) * 8,
    "1 x 16384": (16384,),
}
ROWS: dict[str, Row] = {
    **{f"ragged {name} bf16": Row(of, BF16, True) for name, of in _RAGGED.items()},
    **{f"small {name} bf16": Row(of, BF16, False) for name, of in list(_SMALL.items())[:4]},
    **{f"ragged {name} fp8": Row(of, E4M3, True) for name, of in _RAGGED.items()},
    "ragged 64 x 4096 beside 64 without a query bf16": Row((4096,) * 64, BF16, True, idle=64),
    **{f"small {name} fp8": Row(of, E4M3, False) for name, of in _SMALL.items()},
    **{f"small {name} bf16": Row(of, BF16, False) for name, of in list(_SMALL.items())[4:]},
    **{f"few {name} {of}": Row(lengths, _DTYPES[of], False) for name, lengths in _FEW_KEYS.items() for of in _DTYPES},
}

# Lengths, queries (None: one each, not ragged; a number: so many), and a bound on them.
_FEW = (300, 1, 4096, 0, 77)
CHECKS: tuple[tuple[AttentionModel, torch.dtype, tuple[int, ...], Any, int | None, dict[str, Any]], ...] = (
    (LLAMA, BF16, (16, 40), [1, 1], 1, {}),
    (LLAMA, BF16, (16,), None, None, {}),
    (LLAMA, E4M3, _FEW, [1, 0, 1, 1, 1], 1, {}),
    (LLAMA, BF16, _FEW, None, None, {}),
    (LLAMA, BF16, _FEW, [1, 0, 4, 2, 3], 4, {}),
    (LLAMA, E4M3, _FEW, None, None, {}),
    (QWEN, E4M3, _FEW, [16, 1, 5, 3, 0], 16, {}),
    (WIDE, BF16, (3000, 3, 0), None, None, {}),
    (GPT_OSS_WINDOW, E4M3, _FEW, [1, 1, 0, 1, 5], 6, {}),
    (LLAMA, BF16, (8191, 3, 0, 4097), 4, None, {}),
    (WIDE, E4M3, (3000, 3, 0), [1, 0, 1], 1, {}),
    (GPT_OSS_WINDOW, BF16, (1000, 0, 5), None, None, {}),
    (LLAMA, E4M3, (700, 64, 0) * 40, [1, 0, 1] * 40, 1, {"softcap": 20.0}),
    (LLAMA, E4M3, (700, 64, 0) * 40, None, None, {"softcap": 20.0}),
)


def check(part: int, parts: int, merging: bool) -> int:
    """Small calls, the simplest first; each three times, of which the last is repeated by the launcher."""
    wrong, Decode.merges = 0, merging
    for at, (model, kv_dtype, lengths, queries, most, more) in enumerate(CHECKS):
        if at % parts != part:
            continue
        held = [max(n, queries if isinstance(queries, int) else 0) for n in lengths]
        inputs = paged_attention_inputs(model, seq_lens=held, q_lens=queries, kv_dtype=kv_dtype, device="cuda")
        arguments = inputs | ({"max_seqlen_q": most} if most else {}) | more
        count = arguments["q"].shape[0]
        if most:
            q = arguments["q"]
            arguments["q"] = torch.cat([q, torch.full_like(q[:1], torch.nan).expand(3, *q.shape[1:])])
        want, want_lse = kernelhub.paged_attention.reference(**arguments, return_lse=True)
        said = "right"
        for _ in range(3):
            out = torch.full_like(arguments["q"], torch.nan)
            got, lse = kernelhub.paged_attention(**arguments, out=out, return_lse=True, backend=CUDA)
            torch.cuda.synchronize()
            found = compare_out(got[:count], want[:count], largest_value(arguments))
            of_lse = compare_lse(lse[..., :count], want_lse[..., :count]) if most else compare_lse(lse, want_lse)
            if not found.ok or of_lse > lse_tolerance(got.dtype) or not out[count:].isnan().all():
                said = f"WRONG, {found}, lse off by {of_lse:.1e}, beyond {bool(out[count:].isnan().all())}"
        wrong += said != "right"
        name = f"{model.name} {str(kv_dtype)[6:]} {lengths[:5]} x {len(lengths)}, queries {str(queries)[:20]} {more}"
        print(f"check {name}, {'one launch' if merging else 'two'}: {said}", flush=True)
    print(f"check: {wrong} wrong", flush=True)
    return wrong


def problems_of(row: Row) -> tuple[Any, Any]:
    """Of the step, and of the same one that is not ragged."""
    small = paged_attention_inputs(LLAMA, seq_lens=(40, 200), kv_dtype=row.kv_dtype, device="cuda")
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
    explain = functools.partial(kernelhub.paged_attention.explain, **small, backend=CUDA)
    return explain(cu_seqlens_q=offsets, max_seqlen_q=1).problem, explain().problem


def compile_one(name: str) -> str:
    """The kernels of a row; in a process of a pool."""
    began, row = time.monotonic(), ROWS[name]
    found = [attempt(functools.partial(Decode, problem)) for problem in problems_of(row)]
    small = paged_attention_inputs(LLAMA, seq_lens=(40, 200), kv_dtype=row.kv_dtype, device="cuda")
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
    bound = {"cu_seqlens_q": offsets, "max_seqlen_q": 1} if row.ragged else {}
    found.append(attempt(functools.partial(kernelhub.paged_attention, **small, **bound, backend=TRITON)))
    return f"compiled {name} in {time.monotonic() - began:.1f} s {[one for one in found if one]}"


def compile_all(only: str) -> None:
    distinct = {row._replace(lengths=(), idle=0): name for name, row in ROWS.items() if only in name}
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(compile_one, name) for name in distinct.values()]:
            try:
                print(done.result(), flush=True)
            except Exception as error:
                print(f"Error: {type(error).__name__}: {error}"[:300], flush=True)


def timed(row: Row, others: bool = False) -> dict[str, Any]:
    """Calls over caches of their own, all by one block table."""
    sequences, longest = len(row.lengths), -(-max(row.lengths) // _PAGE)
    shape = (sequences * longest, _PAGE, LLAMA.num_kv_heads, LLAMA.head_dim_qk)
    count = max(2, min(24, _BYTES // (2 * row.kv_dtype.itemsize * shape[0] * _PAGE * shape[2] * shape[3]) + 1))
    caches = []
    for _ in range(count):
        pair = [torch.empty(*shape, device="cuda", dtype=BF16).normal_() for _ in "kv"]
        caches.append([(one * 32).to(E4M3) for one in pair] if row.kv_dtype is E4M3 else pair)
    q = torch.randn(sequences, LLAMA.num_q_heads, LLAMA.head_dim_qk, device="cuda", dtype=BF16)
    table = torch.randperm(shape[0], device="cuda").int().view(sequences, longest)
    lengths = torch.tensor(row.lengths, dtype=torch.int32, device="cuda")
    offsets = torch.arange(sequences + 1, dtype=torch.int32, device="cuda")
    table_of, lengths_of, offsets_of = table, lengths, offsets
    if row.idle:
        table_of, lengths_of = torch.cat([table, table[: row.idle]]), torch.cat([lengths, lengths[: row.idle]])
        offsets_of = torch.cat([offsets, offsets[-1:].expand(row.idle)])
    scales = {"k_scale": 1 / 32, "v_scale": 1 / 32} if row.kv_dtype is E4M3 else {}
    scale = scales.get("k_scale")
    values = Values(LLAMA.head_dim_qk**-0.5, -1, -1, 0.0, None, scale, scale)
    few = {"q": q[:_COMPARED], "k_cache": caches[0][0], "v_cache": caches[0][1], "block_table": table[:_COMPARED]}
    few |= {"seq_lens": lengths[:_COMPARED], **scales}
    want, largest = kernelhub.paged_attention.reference(**few), largest_value(few)
    of_ragged, of_regular = problems_of(row)

    def launched(made: Any, ragged: bool, out: torch.Tensor, at: int) -> torch.Tensor:
        if ragged:
            step, given = PagedStep(table_of, lengths_of, offsets_of, 1), values._replace(window_right=0)
        else:
            step, given = PagedStep(table, lengths), values
        made.launch(q, *caches[at], step, given, out, None)
        return out

    def public(out: torch.Tensor, at: int) -> torch.Tensor:
        k, v = caches[at]
        given = {"q": q, "k_cache": k, "v_cache": v, **scales, "out": out, "backend": TRITON}
        if row.ragged:
            metadata = {"block_table": table_of, "seq_lens": lengths_of, "cu_seqlens_q": offsets_of, "max_seqlen_q": 1}
        else:
            metadata = {"block_table": table, "seq_lens": lengths}
        made: torch.Tensor = kernelhub.paged_attention(**given, **metadata)
        return made

    def empty() -> torch.Tensor:
        return torch.full_like(q, torch.nan)

    def right(out: torch.Tensor) -> bool:
        return bool(out.isfinite().all()) and compare_out(out[:_COMPARED].bfloat16(), want, largest).ok

    calls: dict[str, Any] = {
        "one launch": functools.partial(launched, OneLaunch(of_regular), False, empty()),
        "two": functools.partial(launched, TwoLaunches(of_regular), False, empty()),
    }
    if row.ragged:
        calls = {
            "ragged": functools.partial(launched, TwoLaunches(of_ragged), True, empty()),
            "ragged, one launch": functools.partial(launched, OneLaunch(of_ragged), True, empty()),
            "regular": calls["two"],
        }
    calls["triton"] = functools.partial(public, empty())
    if others:
        for parts in other_parts(row):
            calls[f"p{parts}"] = functools.partial(launched, in_parts(parts)(of_regular), False, empty())
    return {"calls": count, **measured(calls, count, 5.0, right)}


def time_all(options: Any) -> int:
    """Rows that the file does not have yet; one that fails is the last of this process."""
    began, about = time.monotonic(), facts(__doc__)
    rows: dict[str, Any] = {}
    if options.out and options.out.exists():
        rows = {row["case"]: row for row in json.loads(options.out.read_text())["rows"]}
    for name, row in ROWS.items():
        if name in rows or options.only not in name or time.monotonic() - began > options.seconds:
            continue
        found: dict[str, Any] = {"case": name}
        try:
            found |= timed(row, name.startswith("few"))
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[:300]
        rows[name] = found
        times = " ".join(f"{of} {1000 * ms:.2f}" for of, ms in found.get("kernels_ms", {}).items())
        wrong = [of for of, agrees in found.get("right", {}).items() if not agrees]
        more = [found[key] for key in ("failed", "error") if key in found]
        print(f"row {name}, us: {times}{f' WRONG {wrong}' if wrong else ''}", *more, flush=True)
        if options.out:
            options.out.write_text(json.dumps({**about, "rows": [*rows.values()]}, indent=1) + "\n")
        if "error" in found:
            return 3
        torch.cuda.empty_cache()
    return 0


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--merging", action="store_true")
    parser.add_argument("what", choices=("check", "compile", "time"))
    options = parser.parse_args()
    os.makedirs("build", exist_ok=True)
    torch.manual_seed(0)
    if options.what == "check":
        part, parts = map(int, options.part.split("/"))
        return check(part, parts, options.merging)
    if options.what == "compile":
        compile_all(options.only)
        return 0
    return time_all(options)


if __name__ == "__main__":
    sys.exit(main())
