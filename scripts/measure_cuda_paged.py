"""Check and time `cuda.paged_decode` beside `triton.split_kv` and torch's sdpa on one Hopper GPU.

    python scripts/measure_cuda_paged.py {check,compile,time,host} [--part I/N] [--only WORD] [--out FILE] [--seconds S]

`check` compares small calls with the reference, the simplest first; part I of N has every N-th. `compile` makes the
kernels that `time` needs. `time`: in CUDA graphs of calls over caches of their own, medians of samples that alternate;
each form is compared with the reference before it is timed, and each launch of the chosen one is timed alone.
FlashAttention-3 is timed where it is installed. torch's sdpa has dense keys, sequence after sequence. The roof is the
bytes of the keys and values that are seen over 4.29 TB/s. `host`: microseconds of the host for an eager call.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from alternating import attempt, facts, host_us, measured, medians, options_of
from torch.nn.functional import scaled_dot_product_attention

import kernelhub
from kernelhub.backends.cuda.attention import decode
from kernelhub.backends.shared.launches import WATCHED
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.models.shapes import AttentionModel

_BYTES_PER_S = 4.29e12
CUDA, TRITON, FA3, SDPA = "cuda.paged_decode", "triton.split_kv", "flash_attn.fa3", "torch sdpa, dense"
_TRY_AGAIN = 3  # the exit status where a row failed, since a failed capture spoils those after it
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LLAMA = AttentionModel("llama", 32, 8, 128, 128)
QWEN = AttentionModel("qwen", 32, 4, 128, 128)
GPT_OSS = AttentionModel("gpt-oss", 64, 8, 64, 64, sinks=True)
GPT_OSS_WINDOW = dataclasses.replace(GPT_OSS, window=127)
WIDE = AttentionModel("wide", 16, 8, 256, 256)
ONE_OF_8 = AttentionModel("70b of one of 8", 8, 1, 128, 128)
ALONE = AttentionModel("without groups", 32, 32, 128, 128)


class Shape(NamedTuple):
    """A row of the table."""

    model: AttentionModel
    kv_dtype: torch.dtype
    lengths: tuple[int, ...]
    tokens: int | None = None
    page_size: int = 16
    kv_layout: str = "NHD"
    forms: bool = False  # whether all forms are timed


def _mixed(sequences: int, most: int = 8192) -> tuple[int, ...]:
    return tuple(torch.randint(256, most, (sequences,), generator=torch.Generator().manual_seed(0)).tolist())


SHAPES: dict[str, Shape] = {
    "llama 64 x 4096 bf16": Shape(LLAMA, BF16, (4096,) * 64, forms=True),
    "llama 64 x 4096 fp8": Shape(LLAMA, E4M3, (4096,) * 64),
    "llama 16 x 4096 bf16": Shape(LLAMA, BF16, (4096,) * 16, forms=True),
    "llama 1 x 8192 bf16": Shape(LLAMA, BF16, (8192,)),
    "llama 16 x 4096 fp8": Shape(LLAMA, E4M3, (4096,) * 16),
    "llama 64 of 256 to 8191 fp8": Shape(LLAMA, E4M3, _mixed(64)),
    "llama 64 of 256 to 8191 bf16": Shape(LLAMA, BF16, _mixed(64)),
    "llama 1 x 1024 bf16": Shape(LLAMA, BF16, (1024,)),
    "llama 8 x 512 bf16": Shape(LLAMA, BF16, (512,) * 8),
    "llama 64 x 4096 bf16, 4 tokens": Shape(LLAMA, BF16, (4096,) * 64, 4),
    "llama 64 x 4096 fp8, 4 tokens": Shape(LLAMA, E4M3, (4096,) * 64, 4),
    "gpt-oss window 32 x 8192 bf16": Shape(GPT_OSS_WINDOW, BF16, (8192,) * 32),
    "gpt-oss full 64 x 4096 fp8": Shape(GPT_OSS, E4M3, (4096,) * 64),
    "gpt-oss full 64 x 4096 bf16": Shape(GPT_OSS, BF16, (4096,) * 64),
    "qwen 64 x 4096 fp8": Shape(QWEN, E4M3, (4096,) * 64),
    "qwen 64 x 4096 bf16": Shape(QWEN, BF16, (4096,) * 64),
    "llama 256 x 1024 fp8": Shape(LLAMA, E4M3, (1024,) * 256),
    "llama 256 x 1024 bf16": Shape(LLAMA, BF16, (1024,) * 256),
    "llama 1 x 131072 bf16": Shape(LLAMA, BF16, (131072,)),
    "llama 1 x 8192 fp8": Shape(LLAMA, E4M3, (8192,)),
    "llama 8 x 512 fp8": Shape(LLAMA, E4M3, (512,) * 8),
    "70b of one of 8 GPUs, 64 x 4096 bf16": Shape(ONE_OF_8, BF16, (4096,) * 64),
    "70b of one of 8 GPUs, 64 x 4096 fp8": Shape(ONE_OF_8, E4M3, (4096,) * 64),
    "wide 64 x 2048 fp8": Shape(WIDE, E4M3, (2048,) * 64),
    "wide 64 x 2048 bf16": Shape(WIDE, BF16, (2048,) * 64),
    "llama 64 x 4096 fp8, HND of 64": Shape(LLAMA, E4M3, (4096,) * 64, None, 64, "HND"),
    "without groups 32 x 2048 bf16": Shape(ALONE, BF16, (2048,) * 32),
    "llama 256 x 128 bf16": Shape(LLAMA, BF16, (128,) * 256),
    "llama 16 x 4096 fp8, 4 tokens": Shape(LLAMA, E4M3, (4096,) * 16, 4),
    "llama 16 x 4096 bf16, 4 tokens": Shape(LLAMA, BF16, (4096,) * 16, 4),
    "llama 1 x 1024 fp8": Shape(LLAMA, E4M3, (1024,)),
}


def forms_of(shape: Shape) -> dict[str, dict[str, Any]]:
    """What differs from the chosen form: attributes of the adapter."""
    if not shape.forms:
        return {}
    rows = (shape.tokens or 1) * shape.model.num_q_heads // shape.model.num_kv_heads
    of = decode.tiles_of(shape.model.head_dim_qk, shape.kv_dtype.itemsize, rows)
    made: dict[str, dict[str, Any]] = {"uneven": {"alike": False}}
    made["3 blocks"] = {"tiles": of._replace(stages=max(2, of.stages * 2 // 3), blocks=3)}
    return made


def form(given: dict[str, Any]) -> Any:
    """The class of adapters of a form."""
    return type("Form", (decode.Decode,), given)


def explained(shape: Shape, lengths: tuple[int, ...], device: str = "cuda") -> tuple[dict[str, Any], Any]:
    """Arguments of a call, and its problem."""
    arguments = paged_attention_inputs(
        shape.model,
        seq_lens=lengths,
        q_lens=shape.tokens,
        page_size=shape.page_size,
        kv_layout=shape.kv_layout,
        kv_dtype=shape.kv_dtype,
        device=device,
    )
    return arguments, kernelhub.paged_attention.explain(**arguments, backend=CUDA).problem


def compile_one(name: str) -> str:
    """The kernels of a row; in a process of a pool."""
    began, shape = time.monotonic(), SHAPES[name]
    arguments, problem = explained(shape, (40, 200))
    for given in forms_of(shape).values():
        form(given)(problem)
    done = {kernel: attempt(functools.partial(called, arguments, kernel)) for kernel in (CUDA, TRITON)}
    torch.cuda.synchronize()
    return f"compiled {name} in {time.monotonic() - began:.1f} s {done}"


def called(arguments: dict[str, Any], kernel: str) -> torch.Tensor:
    made: torch.Tensor = kernelhub.paged_attention(**arguments, backend=kernel)
    return made


def compile_all(only: str) -> None:
    distinct = {shape._replace(lengths=()): name for name, shape in reversed(SHAPES.items()) if only in name}
    names = [*reversed(distinct.values())]
    workers = max(2, min(14, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(compile_one, name) for name in names]:
            try:
                print(done.result(), flush=True)
            except Exception as error:
                print(f"Error: {type(error).__name__}: {error}"[:300], flush=True)


CHECKS: tuple[tuple[AttentionModel, Any, tuple[int, ...], int | None, dict[str, Any]], ...] = (
    (LLAMA, BF16, (16,), None, {}),
    (LLAMA, E4M3, (32,), None, {}),
    (LLAMA, BF16, (300, 1, 4096), None, {}),
    (LLAMA, E4M3, (300, 1, 4096), None, {}),
    (GPT_OSS, BF16, (100, 1000), None, {}),
    (GPT_OSS_WINDOW, E4M3, (100, 0, 1000), None, {}),
    (QWEN, E4M3, (5000, 77), 4, {}),
    (LLAMA, BF16, (2000, 129, 63), 4, {}),
    (WIDE, BF16, (1000, 3), None, {}),
    (WIDE, E4M3, (1000, 3), 2, {}),
    (LLAMA, E4M3, (1000,) * 70, None, {"softcap": 20.0}),
    (LLAMA, BF16, (1500, 64), None, {"kv_layout": "HND", "page_size": 64}),
)


def check(part: int, parts: int) -> int:
    """Small calls, the simplest first."""
    wrong = 0
    for at, (model, kv_dtype, lengths, tokens, more) in enumerate(CHECKS):
        if at % parts != part:
            continue
        pages = {name: more[name] for name in ("kv_layout", "page_size") if name in more}
        more = {name: value for name, value in more.items() if name != "page_size"}
        arguments = (
            paged_attention_inputs(model, seq_lens=lengths, q_lens=tokens, kv_dtype=kv_dtype, device="cuda", **pages)
            | more
        )
        want, want_lse = kernelhub.paged_attention.reference(**arguments, return_lse=True)
        got, lse = kernelhub.paged_attention(**arguments, return_lse=True, backend=CUDA)
        torch.cuda.synchronize()
        found, of_lse = compare_out(got, want, largest_value(arguments)), compare_lse(lse, want_lse)
        ok = found.ok and of_lse <= lse_tolerance(got.dtype)
        wrong += not ok
        name = f"{model.name} {str(kv_dtype)[6:]} {lengths[:4]} x {len(lengths)}, {tokens} tokens {more}"
        print(f"check {name}: {'right' if ok else 'WRONG'}, {found}, lse off by {of_lse:.1e}", flush=True)
        if not ok:
            off = (got.float() - want.float()).abs()
            print("  rows", [round(float(x), 3) for x in off.flatten(0, -2).amax(1)[:64]], flush=True)
            print("  columns", [round(float(x), 3) for x in off.flatten(0, -2).amax(0)[::4]], flush=True)
    print(f"check: {wrong} wrong", flush=True)
    return wrong


def beside(shape: Shape, vendors: bool = True) -> dict[str, Any]:
    """A row of the table: calls over caches of their own, all by one block table."""
    small, problem = explained(shape, (40, 200))
    model, lengths, size = shape.model, shape.lengths, shape.page_size
    sequences, longest = len(lengths), -(-max(lengths) // size)
    dims = (size, model.num_kv_heads) if shape.kv_layout == "NHD" else (model.num_kv_heads, size)
    bytes_of_one = 2 * sequences * longest * size * model.num_kv_heads * model.head_dim_qk * shape.kv_dtype.itemsize
    count = max(2, min(24, -(-(200 << 20) // bytes_of_one)))
    caches = []
    for _ in range(count):
        pair = []
        for _ in "kv":
            cache = torch.empty(sequences * longest, *dims, model.head_dim_qk, device="cuda", dtype=BF16).normal_()
            pair.append((cache * 32).to(E4M3) if shape.kv_dtype is E4M3 else cache)
        caches.append(pair)
    heads = (sequences, model.num_q_heads) if shape.tokens is None else (sequences, shape.tokens, model.num_q_heads)
    q = torch.randn(*heads, model.head_dim_qk, device="cuda", dtype=BF16)
    table = torch.randperm(sequences * longest, device="cuda").int().view(sequences, longest)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    more: dict[str, Any] = {name: small[name] for name in ("sinks", "window") if name in small}
    if shape.kv_dtype is E4M3:
        more |= {"k_scale": 1 / 32, "v_scale": 1 / 32}
    common = {"q": q, "block_table": table, "seq_lens": seq_lens, "kv_layout": shape.kv_layout, **more}
    few = min(sequences, 4)  # compared with the reference
    asked = {**common, "k_cache": caches[0][0], "v_cache": caches[0][1], "q": q[:few], "block_table": table[:few]}
    want = kernelhub.paged_attention.reference(**asked | {"seq_lens": seq_lens[:few]})
    largest = largest_value(asked)
    scale = more.get("k_scale")
    values = Values(model.head_dim_qk**-0.5, model.window or -1, -1, 0.0, more.get("sinks"), scale, scale)
    values = values._replace(window_right=0 if shape.tokens else -1)

    def empty() -> torch.Tensor:
        return torch.full_like(q, torch.nan)

    def launched(made: Any, out: torch.Tensor, at: int) -> torch.Tensor:
        made.launch(q, *caches[at], PagedStep(table, seq_lens), values, out, None)
        return out

    def public(kernel: str, out: torch.Tensor, at: int) -> torch.Tensor:
        k, v = caches[at]
        return called({**common, "k_cache": k, "v_cache": v, "out": out}, kernel)

    def right(out: torch.Tensor) -> bool:
        return compare_out(out[:few].bfloat16(), want, largest).ok

    calls: dict[str, Any] = {CUDA: functools.partial(public, CUDA, empty())}
    for name, given in forms_of(shape).items():
        calls[name] = functools.partial(launched, form(given)(problem), empty())
    if vendors and shape.kv_dtype is BF16 and importlib.util.find_spec("flash_attn_3"):
        calls[FA3] = functools.partial(public, FA3, empty())
    calls[TRITON] = functools.partial(public, TRITON, empty())
    row = {"calls": count, **measured(calls, count, 8.0, right)}
    seen = sum(min(n, (model.window or n) + (shape.tokens or 1)) for n in lengths)
    row["roof_ms"] = 2 * seen * model.num_kv_heads * model.head_dim_qk * shape.kv_dtype.itemsize / _BYTES_PER_S * 1e3
    if row["right"].get(CUDA):
        row["launches_us"] = alone(functools.partial(launched, form({})(problem), empty(), 0))
    if vendors and shape.forms:
        dense = [
            [cache.view(sequences, -1, *cache.shape[2:]).transpose(1, 2).contiguous() for cache in pair]
            for pair in caches
        ]
        rows = q.view(sequences, model.num_kv_heads, -1, model.head_dim_qk)

        def sdpa(at: int) -> torch.Tensor:
            k, v = dense[at]
            return scaled_dot_product_attention(rows, k, v)

        for at in range(count):  # what it makes at a first call cannot be captured
            sdpa(at)
        row["kernels_ms"] |= medians({SDPA: sdpa}, count, 8.0)
    return row


def alone(call: Callable[[], Any]) -> list[float]:
    """Microseconds of each launch of a call."""
    WATCHED.launches = []
    call()
    watched: Any = WATCHED.launches
    WATCHED.launches = None
    runs = {
        str(at): functools.partial(_again, one.launcher, one.variant, one.programs, one.arguments)
        for at, one in enumerate(watched)
    }
    return [round(1000 * ms, 2) for ms in medians(runs, 4, 3.0).values()]


def _again(launcher: Any, variant: Any, programs: int, arguments: Any, _: int) -> None:
    device, threads = variant
    launcher(device, programs, threads, *arguments)


def host(batches: int) -> dict[str, float]:
    """Microseconds of an eager call, the least of many batches; a plan of a step, too."""
    found = {}
    arguments = paged_attention_inputs(LLAMA, seq_lens=(64,) * 4, device="cuda")
    out = torch.empty_like(arguments["q"])
    for kernel in (TRITON, CUDA):
        forms: dict[str, Callable[[], Any]] = {
            "result": functools.partial(kernelhub.paged_attention, **arguments, backend=kernel),
            "destination": functools.partial(kernelhub.paged_attention, **arguments, out=out, backend=kernel),
        }
        given = {name: arguments[name] for name in ("q", "k_cache", "v_cache")}
        plan = kernelhub.paged_attention.prepare(**arguments, backend=kernel)
        step = plan.begin(arguments["block_table"], arguments["seq_lens"])
        forms["step"] = functools.partial(step.run, *given.values(), out=out)
        for name, call in forms.items():
            found[f"{kernel}, {name}"] = round(host_us(call, batches), 2)
    return found


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("what", choices=("check", "compile", "time", "host"))
    options = parser.parse_args()
    os.makedirs("build", exist_ok=True)
    torch.manual_seed(0)
    if options.what == "check":
        part, parts = map(int, options.part.split("/"))
        return check(part, parts)
    if options.what == "compile":
        compile_all(options.only)
        return 0
    if options.what == "host":
        row = {**facts(__doc__), "host_us": host(40)}
        print(json.dumps(row["host_us"]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(row, indent=1) + "\n")
        return 0
    return time_all(options)


def time_all(options: Any) -> int:
    """Rows that a file does not have yet. One that fails is the last of this process, to come again without vendors."""
    began, about = time.monotonic(), facts(__doc__)
    rows: dict[str, Any] = {}
    if options.out and options.out.exists():
        rows = {row["case"]: row for row in json.loads(options.out.read_text())["rows"]}
    for name, shape in SHAPES.items():
        before = rows.get(name, {})
        if options.only not in name or time.monotonic() - began > options.seconds:
            continue
        if before and ("error" not in before or "again" in before):
            continue
        row: dict[str, Any] = {"case": name, **({"again": before["error"]} if before else {})}
        try:
            row |= beside(shape, vendors=not before)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        rows[name] = row
        times, roof = row.get("kernels_ms", {}), row.get("roof_ms", 0.0)
        said = {of: f"{1000 * ms:.1f} {100 * roof / ms:.0f}%" for of, ms in times.items()}
        wrong = [of for of, agrees in row.get("right", {}).items() if not agrees]
        more = [row[key] for key in ("failed", "launches_us", "error", "again") if key in row]
        print(f"row {name}: roof {1000 * roof:.1f} {said}{f' WRONG {wrong}' if wrong else ''}", *more, flush=True)
        if options.out:
            options.out.write_text(json.dumps({**about, "rows": [*rows.values()]}, indent=1) + "\n")
        if "error" in row:
            return _TRY_AGAIN
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
