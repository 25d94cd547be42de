"""Every attention kernel that can run here, against torch's best and against the machine's roofs.

    python benchmarks/attention.py [--quick] [--json] [--out FILE] [--plot FILE.png] [--show FILE]

For each case all kernels that accept it are timed in turn with torch's own ways of computing the same, so that
what else the machine does slows all alike. torch's best is the fastest of scaled_dot_product_attention with
enable_gqa, with KV heads expanded beforehand, and with the heads of a group packed as rows (decode only). A
paged call is held against torch over dense KV of equal size, which has no pages to gather.

On a GPU the time that a call keeps the host is told too; a CUDA graph takes it away.

The roofs are measured in the same run: bytes read per second by a sum over memory much larger than the caches,
and bfloat16 operations per second of a large matrix product. A case's time at the roof is the larger of its KV
and query bytes over the first and its operations over the second.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kernelhub
from kernelhub.cli.measure import time_calls
from kernelhub.ops.attention.inputs import MODELS, AttentionModel, attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.mla.inputs import concat_inputs
from kernelhub.probes.device import facts


@dataclass(frozen=True)
class Case:
    """One call to time.

    Attributes:
        label: shown and stored.
        op: name of the op.
        arguments: of the call.
        peers: torch's ways of computing the same, by name; none where torch lacks a feature.
        bytes: KV, query and output bytes that must move.
        operations: multiplications and additions that must be done.
    """

    label: str
    op: str
    arguments: dict[str, Any]
    peers: dict[str, Callable[[], Tensor]]
    bytes: int
    operations: int


def prefill(model: AttentionModel, tokens: int, batch: int, device: torch.device, dtype: torch.dtype) -> Case:
    arguments = attention_inputs(model, batch=batch, q_tokens=tokens, dtype=dtype, device=device)
    q, k, v = (arguments[name].transpose(1, 2) for name in ("q", "k", "v"))
    group = model.num_q_heads // model.num_kv_heads
    expanded = [t.repeat_interleave(group, 1) for t in (k, v)]
    plain = not any(name in arguments for name in ("window", "softcap", "sinks"))
    seen = tokens * tokens / 2 if model.window is None else min(tokens * tokens / 2, tokens * (model.window + 1))
    width = model.head_dim_qk + model.head_dim_vo
    return Case(
        f"prefill {model.name}, {batch} x {tokens}, {str(dtype)[6:]}",
        "attention",
        arguments,
        {
            "sdpa, enable_gqa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            "sdpa, KV expanded": lambda: scaled_dot_product_attention(q, *expanded, is_causal=True),
        }
        if plain
        else {},
        bytes=sum(arguments[name].numel() * dtype.itemsize for name in ("q", "k", "v")) + q.numel() * dtype.itemsize,
        operations=int(2 * batch * model.num_q_heads * seen * width),
    )


def decode(
    model: AttentionModel,
    kv_tokens: int,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    paged: bool,
    fp8: bool = False,
) -> Case:
    kv_dtype = torch.float8_e4m3fn if fp8 else dtype
    if paged:
        arguments = paged_attention_inputs(
            model, seq_lens=(kv_tokens,) * batch, dtype=dtype, kv_dtype=kv_dtype, device=device
        )
        q = arguments["q"].unsqueeze(2)
    else:
        arguments = attention_inputs(
            model, batch=batch, q_tokens=1, kv_tokens=kv_tokens, dtype=dtype, kv_dtype=kv_dtype, device=device
        )
        q = arguments["q"].transpose(1, 2)
    heads = (batch, model.num_kv_heads, kv_tokens)
    k = torch.randn(*heads, model.head_dim_qk, device=device).to(dtype)
    v = torch.randn(*heads, model.head_dim_vo, device=device).to(dtype)
    group = model.num_q_heads // model.num_kv_heads
    expanded = [t.repeat_interleave(group, 1) for t in (k, v)]
    packed = q.reshape(batch, model.num_kv_heads, group, model.head_dim_qk)
    plain = not any(name in arguments for name in ("window", "softcap", "sinks"))
    seen = kv_tokens if model.window is None else min(kv_tokens, model.window + 1)
    width = model.head_dim_qk + model.head_dim_vo
    kind = "paged decode" if paged else "decode"
    return Case(
        f"{kind} {model.name}, {batch} x {kv_tokens}, {str(kv_dtype)[6:]} KV",
        "paged_attention" if paged else "attention",
        arguments,
        {
            "sdpa, enable_gqa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
            "sdpa, KV expanded": lambda: scaled_dot_product_attention(q, *expanded),
            "sdpa, heads packed by hand": lambda: scaled_dot_product_attention(packed, k, v),
        }
        if plain
        else {},
        bytes=batch * model.num_kv_heads * seen * width * kv_dtype.itemsize,
        operations=2 * batch * model.num_q_heads * seen * width,
    )


def merge(tokens: int, parts: int, device: torch.device, dtype: torch.dtype) -> Case:
    arguments = merge_inputs(parts=parts, tokens=tokens, dtype=dtype, device=device, empty=False)
    values = arguments["outs"][0].numel()

    def in_torch() -> Tensor:
        weights = torch.stack(arguments["lses"]).softmax(0).transpose(1, 2).unsqueeze(-1)
        return sum(part * weight for part, weight in zip(arguments["outs"], weights, strict=True)).to(dtype)

    return Case(
        f"merge of {parts} x {tokens} tokens, 128 heads of 128, {str(dtype)[6:]}",
        "merge_attention_states",
        arguments,
        {"a softmax and a weighted sum": in_torch},
        bytes=(parts + 1) * values * dtype.itemsize + parts * values // 128 * 4,
        operations=2 * parts * values,
    )


def concat(tokens: int, device: torch.device, dtype: torch.dtype) -> Case:
    arguments = concat_inputs(tokens=tokens, dtype=dtype, device=device)
    k_nope, shared = arguments["k_nope"], arguments["k_rope"].expand(-1, arguments["k_nope"].shape[1], -1)
    values = k_nope.numel() + shared.numel()
    return Case(
        f"concat_mla_k of {tokens} tokens, 128 heads of 128 + 64, {str(dtype)[6:]}",
        "concat_mla_k",
        arguments,
        {"torch.cat": lambda: torch.cat([k_nope, shared], 2)},
        bytes=(values + k_nope.numel() + arguments["k_rope"].numel()) * dtype.itemsize,
        operations=0,
    )


def cases(device: torch.device, quick: bool) -> list[Callable[[], Case]]:
    """What is timed: small enough for a CPU, or as an engine runs it on a GPU."""
    bf16, llama = torch.bfloat16, MODELS["llama-3.1-8b"]
    made: list[Callable[[], Case]] = []
    if device.type == "cpu":
        for tokens in (512,) if quick else (512, 2048):
            made.append(lambda tokens=tokens: prefill(llama, tokens, 1, device, bf16))
        made.append(lambda: prefill(MODELS["gpt-oss-120b"], 1024, 1, device, bf16))
        if not quick:
            made.append(lambda: prefill(MODELS["gemma-2-9b"], 512, 1, device, bf16))
            made.append(lambda: prefill(llama, 512, 1, device, torch.float32))
        for batch in (8,) if quick else (1, 8):
            made.append(lambda batch=batch: decode(llama, 2048, batch, device, bf16, paged=False))
            made.append(lambda batch=batch: decode(llama, 2048, batch, device, bf16, paged=True))
        if not quick:
            made.append(lambda: decode(llama, 2048, 8, device, torch.float32, paged=True))
            made.append(lambda: decode(llama, 2048, 8, device, torch.float16, paged=True))
            made.append(lambda: decode(llama, 2048, 8, device, bf16, paged=True, fp8=True))
            made.append(lambda: decode(MODELS["gpt-oss-120b"], 2048, 8, device, bf16, paged=True))
            made.append(lambda: merge(512, 2, device, bf16))
            made.append(lambda: concat(512, device, bf16))
        return made
    for tokens in (2048,) if quick else (1024, 2048, 4096, 8192, 16384):
        made.append(lambda tokens=tokens: prefill(llama, tokens, max(1, 16384 // tokens), device, bf16))
    for name in ("gpt-oss-120b", "gemma-2-9b", "deepseek-v3.2 prefill"):
        made.append(lambda name=name: prefill(MODELS[name], 4096, 2, device, bf16))
    for batch, kv_tokens in ((32, 4096),) if quick else ((1, 8192), (1, 131072), (16, 4096), (64, 4096), (256, 2048)):
        made.append(lambda b=batch, n=kv_tokens: decode(llama, n, b, device, bf16, paged=True))
    for batch, kv_tokens in ((32, 4096),) if quick else ((1, 8192), (32, 4096), (128, 2048)):
        made.append(lambda b=batch, n=kv_tokens: decode(llama, n, b, device, bf16, paged=False))
    made.append(lambda: decode(llama, 4096, 64, device, bf16, paged=True, fp8=True))
    made.append(lambda: decode(MODELS["gpt-oss-120b"], 8192, 32, device, bf16, paged=True))
    for tokens, parts in ((8192, 2),) if quick else ((128, 2), (8192, 2), (8192, 4)):
        made.append(lambda t=tokens, p=parts: merge(t, p, device, bf16))
    made.append(lambda: concat(8192, device, bf16))
    return made


def roofs(device: torch.device, budget_s: float) -> dict[str, float]:
    """Bytes and bfloat16 operations per second that this machine reaches."""
    memory = torch.ones((256 << 20) // 4 if device.type == "cpu" else (4 << 30) // 4, device=device)
    rows = 1024 if device.type == "cpu" else 8192
    a = torch.randn(rows, 4096, device=device).to(torch.bfloat16)
    b = torch.randn(4096, rows, device=device).to(torch.bfloat16)
    read, product = time_calls((lambda: memory.sum(), lambda: a @ b), device, budget_s)
    return {
        "bytes_per_s": memory.numel() * 4 / read.median_s,
        "operations_per_s": 2 * rows * 4096 * rows / product.median_s,
    }


def measure(case: Case, device: torch.device, budget_s: float, roof: dict[str, float]) -> dict[str, Any]:
    """Milliseconds of every kernel that accepts the case, of torch's ways, and at the roof."""
    function = getattr(kernelhub, case.op)
    verdict = function.explain(**case.arguments)
    able = [decision.kernel for decision in verdict.decisions if decision.accepted]
    chosen = function(**case.arguments)
    largest = _largest(case.arguments)
    for name in able[1:]:
        agreement = compare_out(function(**case.arguments, backend=name), chosen.float(), 2 * largest)
        assert agreement.largest <= agreement.largest_allowed, f"{case.label}: {name} disagrees: {agreement}"
    plans = {name: _call(function, case, name) for name in able}
    timings = time_calls([*plans.values(), *case.peers.values()], device, budget_s)
    ms = [1e3 * timing.median_s for timing in timings]
    roof_ms = 1e3 * max(case.bytes / roof["bytes_per_s"], case.operations / roof["operations_per_s"])
    return {
        "case": case.label,
        "op": case.op,
        "chosen": verdict.selected,
        "kernels_ms": dict(zip(plans, ms[: len(plans)], strict=True)),
        "torch_ms": dict(zip(case.peers, ms[len(plans) :], strict=True)),
        "roof_ms": roof_ms,
        "host_us": {name: host_us(plans[name]) for name in plans} if device.type == "cuda" else {},
    }


def _largest(arguments: dict[str, Any]) -> float:
    """Largest of the values that a result is made of."""
    parts = arguments.get("outs") or [
        arguments[name] for name in ("v", "v_cache", "k_nope", "k_rope") if name in arguments
    ]
    return max(float(part.float().nan_to_num().abs().max()) for part in parts) * float(arguments.get("v_scale", 1.0))


def host_us(call: Callable[[], Tensor]) -> float:
    """Microseconds that a call keeps the host, the GPU working behind it; of one that waits for it, all of them."""
    least_s, spent_s = float("inf"), 0.0
    while spent_s < 0.02:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            call()
        elapsed_s = time.perf_counter() - start
        least_s, spent_s = min(least_s, elapsed_s / 10), spent_s + elapsed_s
    torch.cuda.synchronize()
    return 1e6 * least_s


def _call(function: Any, case: Case, name: str) -> Callable[[], Tensor]:
    """A call of one kernel, which allocates its result as torch's ways do."""
    return lambda: function(**case.arguments, backend=name)


def show(rows: list[dict[str, Any]]) -> None:
    """A line per kernel: its time, its share of the roof, and its speed against torch's ways."""
    for row in rows:
        best = min(row["torch_ms"].values(), default=None)
        print(f"\n{row['case']}  (roof {row['roof_ms']:.3g} ms)")
        for name, ms in row["kernels_ms"].items():
            against = f"{best / ms:6.2f} x torch's best" if best else "   torch has no such op"
            gqa = row["torch_ms"].get("sdpa, enable_gqa")
            against += f", {gqa / ms:5.2f} x enable_gqa" if gqa else ""
            mark = "*" if name == row["chosen"] else " "
            host = f", host {row['host_us'][name]:.0f} µs" if row.get("host_us") else ""
            print(f" {mark} {name:24} {ms:10.3f} ms {100 * row['roof_ms'] / ms:5.1f} % of roof  {against}{host}")
        for name, ms in row["torch_ms"].items():
            print(f"   torch: {name:26} {ms:8.3f} ms {100 * row['roof_ms'] / ms:5.1f} % of roof")


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Every kernel's and every peer's share of the roof; peers are grey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kernels = list(dict.fromkeys(name for row in rows for name in row["kernels_ms"]))
    peers = list(dict.fromkeys(name for row in rows for name in row["torch_ms"]))
    greys = [str(0.4 + 0.5 * index / max(1, len(peers) - 1)) for index in range(len(peers))]
    colours = dict(zip(kernels, plt.get_cmap("tab10").colors, strict=False)) | dict(zip(peers, greys, strict=True))
    figure, axis = plt.subplots(figsize=(10, 0.16 * sum(1 + len(_times(row)) for row in rows) + 1.2))
    place, labels, drawn = 0.0, [], set()
    for row in rows:
        times = _times(row)
        labels.append((place + (len(times) - 1) / 2, row["case"]))
        for name, ms in times.items():
            label = None if name in drawn else f"torch: {name}" if name in peers else name
            axis.barh(place, 100 * row["roof_ms"] / ms, 0.9, color=colours[name], label=label)
            drawn.add(name)
            place += 1
        place += 1
    axis.set_yticks([at for at, _ in labels], [label for _, label in labels], fontsize=8)
    axis.set_ylim(place - 0.5, -1)
    axis.set_xlabel("% of the roof measured in the same run (longer is faster)")
    axis.set_title(title)
    axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _times(row: dict[str, Any]) -> dict[str, float]:
    return {**row["kernels_ms"], **row["torch_ms"]}


def run(quick: bool) -> dict[str, Any]:
    """Measure every case on the first GPU, or else on the CPU."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    budget_s = 0.5 if quick else 2.0 if device.type == "cuda" else 4.0
    with torch.no_grad():
        roof = roofs(device, budget_s)
        rows = [measure(make(), device, budget_s, roof) for make in cases(device, quick)]
    return {
        "device": str(facts(device)),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "roofs": roof,
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter measurements")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--show", dest="shown", type=Path, help="show this JSON of an earlier run; measure nothing")
    parser.add_argument("--plot", type=Path, help="also draw the result into this file")
    options = parser.parse_args()
    result = json.loads(options.shown.read_text()) if options.shown else run(options.quick)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        plot(result["rows"], f"{result['device']}, torch {result['torch']}, {result['date']}", options.plot)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        roof = result["roofs"]
        print(
            f"{result['device']}: reads {roof['bytes_per_s'] / 1e9:,.0f} GB/s, "
            f"{roof['operations_per_s'] / 1e9:,.0f} GFLOP/s in bfloat16"
        )
        show(result["rows"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
