"""Time paged decode of one to four sequences as a server's CUDA graph has it, on the GPU that is here.

    python scripts/measure_few.py [--seconds 60] [--cold] [--kernel NAME] [--label TEXT] [--out results.json]

Heads of Llama 3.1 8B, pages of 16 tokens, block tables with room for far more tokens than there are. A graph has one
call for each of 30 layers, whose caches differ, so that no call finds its keys in a cache of the GPU. With `--cold`
each call follows a kernel that reads 128 MB, as a layer's weights: lengths, block table and the kernel's own code have
to be fetched anew, too; the time of those kernels alone is subtracted. Of each batch one result is compared with
float32 ("error": the largest difference).

Where vLLM can be imported, its FlashAttention-3 is timed with bfloat16 caches in the same rounds, called as vLLM does
in graphs: with a schedule made beforehand, and up to 32 parts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

import kernelhub
from kernelhub.runtime import counters

LAYERS, PAGE, KV_HEADS, GROUP, WIDTH = 30, 16, 8, 4, 128
ROOM, WIDE_ROOM = 9472, 131072
BATCHES = (
    *(((keys,), ROOM) for keys in (1024, 4096, 9000, 500, 2048)),
    *(((keys,) * 2, ROOM) for keys in (1024, 4096, 9000)),
    *(((keys,) * 4, ROOM) for keys in (1024, 4096, 9000, 500)),
    ((2048, 1024, 700), ROOM),
    ((9000, 500, 500, 500), ROOM),
    *(((keys,), WIDE_ROOM) for keys in (1024, 9000)),
    *(((keys,) * 4, WIDE_ROOM) for keys in (1024, 9000)),
)
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
MOST_PAGES = max(sum(-(-keys // PAGE) for keys in lengths) for lengths, _ in BATCHES)


def caches_of(dtype: torch.dtype) -> torch.Tensor:
    """Keys and values of all layers: [LAYERS, 2, pages, PAGE, KV_HEADS, WIDTH]."""
    caches = torch.empty(LAYERS, 2, MOST_PAGES, PAGE, KV_HEADS, WIDTH, dtype=dtype, device="cuda")
    for cache in caches:
        drawn = torch.randn(cache.shape, device="cuda", dtype=torch.bfloat16)
        cache.copy_(drawn if dtype.itemsize == 2 else drawn * 50)
    return caches


def calls_of(lengths: Sequence[int], room: int, caches: torch.Tensor) -> list[dict[str, Any]]:
    """The arguments of a call of each layer, whose pages are in random order."""
    pages = [-(-keys // PAGE) for keys in lengths]
    table = torch.zeros(len(lengths), -(-room // PAGE), dtype=torch.int32, device="cuda")
    named = torch.randperm(MOST_PAGES, device="cuda")[: sum(pages)].int().split(pages)
    for row, entries in zip(table, named, strict=True):
        row[: len(entries)] = entries
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    queries = torch.randn(LAYERS, len(lengths), KV_HEADS * GROUP, WIDTH, device="cuda").bfloat16()
    scales = {"k_scale": 0.02, "v_scale": 0.02} if caches.itemsize == 1 else {}
    return [
        {"q": q, "k_cache": cache[0], "v_cache": cache[1], "block_table": table, "seq_lens": seq_lens, **scales}
        for q, cache in zip(queries, caches, strict=True)
    ]


def reference(arguments: dict[str, Any]) -> torch.Tensor:
    """The result in float32."""
    found = []
    for q, row, keys in zip(arguments["q"], arguments["block_table"], arguments["seq_lens"].tolist(), strict=True):
        named = row[: -(-keys // PAGE)].long()
        k, v = (
            arguments[f"{name}_cache"].view(torch.int16 if arguments["q"].dtype == of.dtype else torch.int8)[named]
            .view(of.dtype).flatten(0, 1)[:keys].float() * arguments.get(f"{name}_scale", 1.0)
            for name, of in (("k", arguments["k_cache"]), ("v", arguments["v_cache"]))
        )  # fmt: skip
        scores = torch.einsum("hgd,nhd->hgn", q.float().view(KV_HEADS, GROUP, WIDTH), k) * WIDTH**-0.5
        found.append(torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v).flatten(0, 1))
    return torch.stack(found)


def flash_attention_3(lengths: Sequence[int], room: int) -> Callable[..., Any]:
    """vLLM's, with the schedule that it makes once for all layers of a step."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    count, parts = len(lengths), 32
    cu_seqlens_q = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    schedule = get_scheduler_metadata(
        batch_size=count,
        max_seqlen_q=1,
        max_seqlen_k=room,
        num_heads_q=KV_HEADS * GROUP,
        num_heads_kv=KV_HEADS,
        headdim=WIDTH,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=cu_seqlens_q,
        page_size=PAGE,
        causal=True,
        num_splits=parts,
    )

    def call(q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, out: Any) -> None:
        flash_attn_varlen_func(
            q=q,
            k=k_cache,
            v=v_cache,
            max_seqlen_q=1,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_k=room,
            seqused_k=seq_lens,
            softmax_scale=WIDTH**-0.5,
            causal=True,
            block_table=block_table,
            out=out,
            scheduler_metadata=schedule,
            num_splits=parts,
            fa_version=3,
        )

    return call


def graph_of(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def times_of(graphs: Sequence[torch.cuda.CUDAGraph], rounds: int = 21) -> list[float]:
    """Microseconds of a layer of each graph, which are replayed in turn: the medians of rounds after the first."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds + 1):
        for graph, found in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) * 1000 / LAYERS)
    return [statistics.median(found[1:]) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cold", action="store_true", help="read 128 MB before each call")
    parser.add_argument("--kernel", default="triton.split_kv")
    parser.add_argument("--label", default="", help="what is measured, for the file")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    until, rows = time.monotonic() + options.seconds, []
    counters.STREAMS = 1024  # each captured graph takes those of a stream
    weights = torch.ones(1 << 16, 1 << 10, dtype=torch.bfloat16, device="cuda")
    largest = torch.empty(1 << 16, dtype=torch.bfloat16, device="cuda")
    read = functools.partial(torch.amax, weights, 1, out=largest)
    caches = {dtype: caches_of(dtype) for dtype in DTYPES}
    for (lengths, room), dtype in itertools.product(BATCHES, DTYPES):
        if time.monotonic() > until:
            break
        arguments = calls_of(lengths, room, caches[dtype])
        kernels: dict[str, Callable[..., Any]] = {
            "kernelhub": functools.partial(kernelhub.paged_attention, backend=options.kernel)
        }
        if dtype == torch.bfloat16:
            try:
                kernels["FlashAttention-3"] = flash_attention_3(lengths, room)
            except ImportError as error:
                print(f"no FlashAttention-3: {error}", flush=True)
        graphs, outs = [], []
        for kernel in kernels.values():
            outs.append([torch.full_like(given["q"], torch.nan) for given in arguments])
            calls = [
                functools.partial(kernel, **given, out=out) for given, out in zip(arguments, outs[-1], strict=True)
            ]
            graphs.append(graph_of([one for call in calls for one in (read, call)] if options.cold else calls))
        times = times_of([*graphs, graph_of([read] * LAYERS)] if options.cold else graphs)
        alone = times.pop() if options.cold else 0.0
        want = reference(arguments[1])
        errors = [(out[1].float() - want).abs().nan_to_num(torch.inf).max().item() for out in outs]
        row = {"lengths": lengths, "room": room, "kv_dtype": str(dtype).removeprefix("torch."), "cold": options.cold}
        row["us"] = {name: round(us - alone, 2) for name, us in zip(kernels, times, strict=True)}
        row["error"] = {name: round(error, 5) for name, error in zip(kernels, errors, strict=True)}
        rows.append(row)
        print(
            f"{row['kv_dtype']:14} {'cold' if options.cold else ''} {lengths} of {room}: {row['us']}",
            row["error"],
            flush=True,
        )
    if options.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        result = {**facts, "date": date.today().isoformat(), "label": options.label, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
