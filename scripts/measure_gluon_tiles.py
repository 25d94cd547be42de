"""Time tiles, stages and orders of Gluon's products, float8 prefill and lists of latents on one Hopper GPU.

    python scripts/measure_gluon_tiles.py [--only WORD] [--compile] [--part I/N] [--out FILE] [--seconds S]

Variants of a kernel's adapter beside the other kernels of the op, in CUDA graphs of two calls, medians of samples that
alternate, the cache not flushed. `off` is how far a result is from the last one's. `--compile` only calls variants
once, the I-th of N parts of them; `--part` else takes a part of the cases. The file is written after every case. The
results of products that are not grouped are compared with the reference before they are timed; a line has DeepGEMM's
time, and the others' shares of its speed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from alternating import Calls, Checked, run_cases

import kernelhub
from kernelhub.backends.gluon.attention.float8_adapter import PrefillOfFloat8
from kernelhub.backends.gluon.gemm.fp8 import adapter as fp8_adapter
from kernelhub.backends.gluon.gemm.fp8.adapter import Fp8Gemm
from kernelhub.backends.gluon.gemm.fp8.tiles import HIGH, Tiles
from kernelhub.backends.gluon.gemm.grouped.adapter import GroupedFp8, GroupedHalves, Tile
from kernelhub.backends.gluon.launch import Launcher
from kernelhub.backends.gluon.mla.listed_adapter import ListedFloat8
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.gemm.fp8.reference import fp8_gemm_reference
from kernelhub.ops.gemm.fp8.tolerance import compare, expected_of
from kernelhub.ops.gemm.grouped.adapter import GroupedOperands
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.models.shapes import AttentionModel

CALLS = 2  # in a graph
_WIDE, _LOW = Tile(128, 256, 64), Tile(64, 256, 64)


def lengths_of(groups: int, rows: int) -> torch.Tensor:
    return torch.full((groups,), rows, dtype=torch.int32)


def routed(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """Rows of each expert, where tokens choose at random."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.rand(tokens, experts, generator=draw).topk(top_k, 1).indices
    return torch.bincount(ids.flatten(), minlength=experts).int()


def altered(adapter: type[Any], tile: Tile | None = None, **static: Any) -> type[Any]:
    """An adapter of grouped products with another tile and other static arguments."""

    class Altered(adapter):
        def tile(self, rows: int) -> Tile:
            return tile or super().tile(rows)

        def launcher(self, of: Tile) -> Launcher:
            made = super().launcher(of)
            return Launcher(made.kernel, {**made.static, **static})

    return Altered


def halves(counts: torch.Tensor, n: int, k: int, masked: bool = False, dtype: torch.dtype = torch.bfloat16) -> Calls:
    groups, device = len(counts), "cuda"
    lead = (groups, int(counts.max())) if masked else (int(counts.sum()),)
    a = torch.empty(*lead, k, dtype=dtype, device=device).normal_()
    b = torch.empty(groups, n, k, dtype=dtype, device=device).normal_()
    ends = counts.cumsum(0).int().to(device)
    lengths = {"group_sizes": counts.to(device)} if masked else {"offsets": ends}
    arguments = {"a": a, "b": b, **lengths}
    variants = {
        "128 x 256": altered(GroupedHalves, _WIDE),
        "64 x 256": altered(GroupedHalves, _LOW),
        "128 x 256, stored by registers": altered(GroupedHalves, _WIDE, BY_LINES=False),
        "128 x 256, 3 stages": altered(GroupedHalves, _WIDE, STAGES=3),
        "128 x 256, all rows share": altered(GroupedHalves, _WIDE, GROUP=1 << 16),
        "128 x 256, 4 share": altered(GroupedHalves, _WIDE, GROUP=4),
    }
    calls = of_grouped("gluon.grouped_halves", arguments, variants, torch.bfloat16)
    if not masked:
        calls["torch._grouped_mm"] = lambda: torch._grouped_mm(a, b.transpose(1, 2), offs=ends)
    calls["triton.grouped"] = public(kernelhub.grouped_gemm, arguments, "triton.grouped")
    return calls


def float8(counts: torch.Tensor, n: int, k: int) -> Calls:
    groups, device, rows = len(counts), "cuda", int(counts.sum())
    arguments = {
        "a": codes(rows, k),
        "b": codes(groups, n, k),
        "a_scale": 0.5 + torch.rand(rows, k // 128, device=device),
        "b_scale": 0.5 + torch.rand(groups, n // 128, k // 128, device=device),
        "offsets": counts.cumsum(0).int().to(device),
    }
    named = {f"{share} share": altered(GroupedFp8, GROUP=share) for share in (4, 8, 1 << 16)}
    calls = of_grouped("gluon.grouped_fp8", arguments, named, torch.bfloat16)
    calls["triton.grouped"] = public(kernelhub.grouped_gemm, arguments, "triton.grouped")
    return calls


def of_grouped(kernel: str, arguments: dict[str, Any], variants: dict[str, Any], dtype: torch.dtype) -> Calls:
    problem = kernelhub.grouped_gemm.explain(**arguments, backend=kernel).problem
    names = GroupedOperands._fields
    operands = GroupedOperands(*(arguments.get(name) for name in names))
    out = torch.empty(*operands.a.shape[:-1], operands.b.shape[1], dtype=dtype, device="cuda")

    def launched(made: Any) -> torch.Tensor:
        made.launch(operands, out)
        return out

    return {name: functools.partial(launched, adapter(problem)) for name, adapter in variants.items()}


class Even(Fp8Gemm):
    """As few programs as take the tiles in as many rounds: some multiprocessors less, and the last round is full."""

    def _programs(self, count: int) -> int:
        rounds = -(-count // super()._programs(count))
        return -(-count // rounds)


# Adapters of products, and their tiles; None: those that the adapter chooses.
PRODUCTS: dict[str, tuple[type[Fp8Gemm], Tiles | None]] = {
    "even rounds": (Even, None),
    "groups of 4": (Fp8Gemm, dataclasses.replace(HIGH, group=4)),
    "groups of 16": (Fp8Gemm, dataclasses.replace(HIGH, group=16)),
    "even rounds, groups of 16": (Even, dataclasses.replace(HIGH, group=16)),
    "as it is": (Fp8Gemm, None),
}


def product(rows: int, n: int, k: int, by_column: bool = False) -> Calls:
    """`by_column`: scales of rows come as DeepGEMM reads them, so that neither kernel needs a copy."""
    a, a_scale = quantised(rows, k, 1)
    b, b_scale = quantised(n, k, 128)
    if by_column:
        a_scale = a_scale.t().contiguous().t()
    arguments: dict[str, Any] = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    problem = kernelhub.fp8_gemm.explain(**arguments, backend="gluon.fp8_gemm").problem
    some = torch.linspace(0, rows - 1, 96, device="cuda").long()  # of every tile of rows
    few = arguments | {"a": a[some], "a_scale": a_scale[some]}
    expected = functools.cache(lambda: expected_of(fp8_gemm_reference, few))

    def right(out: torch.Tensor) -> bool:
        made = out[some].bfloat16()
        agreement = compare(made, fp8_gemm_reference, few, matrix_instructions=True, expected=expected())
        return agreement.ok and bool(torch.isfinite(out).all())

    def launched(made: Fp8Gemm, tile: Tiles | None, out: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(fp8_adapter, "tiles", fp8_adapter.tiles if tile is None else (lambda *_: tile)):
            made.launch(a, b, a_scale, b_scale, None, out)
        return out

    def empty() -> torch.Tensor:
        return torch.full((rows, n), torch.nan, dtype=torch.bfloat16, device="cuda")

    vendor = "deep_gemm.fp8_blocks"
    calls: Calls = {vendor: functools.partial(kernelhub.fp8_gemm, **arguments, out=empty(), backend=vendor)}
    for name, (adapter, tile) in PRODUCTS.items():
        calls[name] = functools.partial(launched, adapter(problem), tile, empty())
    return Checked(calls, right, vendor, 25.0)


def quantised(rows: int, columns: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal numbers as codes, and the scales of blocks of so many rows and 128 columns."""
    values = torch.randn(rows // high, high, columns // 128, 128, device="cuda")
    scale = values.abs().amax((1, 3)) / 448
    made = (values / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return made.view(rows, columns), scale


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 0x70, shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)


def public(op: Any, arguments: dict[str, Any], kernel: str) -> Callable[[], Any]:
    return lambda: op(**arguments, backend=kernel)


def prefill(
    model: AttentionModel,
    tokens: tuple[int, ...],
    page: int,
    variants: dict[str, dict[str, Any]],
    others: tuple[str, ...] = ("triton.prefill",),
    queries: tuple[int, ...] | None = None,
    ragged: bool = False,
) -> Calls:
    drawn = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(0), "kv_dtype": torch.float8_e4m3fn}
    if page:
        arguments = paged_attention_inputs(
            model, seq_lens=tokens, q_lens=queries or tokens, page_size=page, **drawn
        ) | {"causal": True}  # fmt: skip
    elif ragged:
        arguments = attention_inputs(model, q_lens=tokens, kv_lens=tokens, **drawn)
    else:
        arguments = attention_inputs(model, batch=len(tokens), q_tokens=tokens[0], **drawn)
    for name in ("k_scale", "v_scale"):
        arguments[name] = torch.tensor([arguments[name]], device="cuda")
    op = kernelhub.paged_attention if page else kernelhub.attention
    problem = op.explain(**arguments, backend="gluon.prefill_fp8_any").problem
    values = Values(
        model.head_dim_qk**-0.5,
        arguments.get("window", -1) if not isinstance(arguments.get("window"), tuple) else arguments["window"][0],
        0,
        sinks=arguments.get("sinks"),
        k_scale=arguments.get("k_scale"),
        v_scale=arguments.get("v_scale"),
    )
    q = arguments["q"]
    keys = (arguments["k_cache"], arguments["v_cache"]) if page else (arguments["k"], arguments["v"])
    if page:
        step: Any = PagedStep(arguments["block_table"], arguments["seq_lens"], arguments.get("cu_seqlens_q"))
    else:
        step = DenseStep(arguments.get("cu_seqlens_q"), arguments.get("cu_seqlens_k"))
    out = torch.empty(*q.shape[:-1], model.head_dim_vo, dtype=q.dtype, device="cuda")

    def launched(made: PrefillOfFloat8) -> torch.Tensor:
        made.launch(q, *keys, step, values, out, None)
        return out

    calls: Calls = {}
    for name, static in variants.items():
        made = PrefillOfFloat8(problem)
        made._static.update(static)
        made._block_n = made._static["BLOCK_N"]
        calls[name] = functools.partial(launched, made)
    for name in others:
        calls[name] = public(op, arguments, name)
    return calls


def lists(heads: int, sequences: int, length: int, tokens: int = 1, topk: int = 2048, page: int = 64) -> Calls:
    """Decode over lists of float8 latents, and over lists of bfloat16 ones."""
    pages = -(-length // page)
    cache = codes(sequences * pages, page, 576)
    q = torch.randn(sequences, *((tokens,) if tokens > 1 else ()), heads, 576, dtype=torch.bfloat16, device="cuda")
    listed = torch.stack([torch.randperm(length, device="cuda")[:topk] for _ in range(sequences * tokens)])
    arguments = {
        "q": q,
        "kv_cache": cache,
        "block_table": torch.randperm(sequences * pages, device="cuda").int().view(sequences, pages),
        "seq_lens": torch.full((sequences,), length, dtype=torch.int32, device="cuda"),
        "topk_indices": listed.int().view(*q.shape[:-2], topk),
        "scale": 1e-3,
        "kv_scale": torch.tensor([2.0**-6], device="cuda"),
    }
    wide = {name: value for name, value in arguments.items() if name != "kv_scale"}
    wide["kv_cache"] = (cache.float() * 2.0**-6).bfloat16()
    problem = kernelhub.mla_attention.explain(**arguments, backend="gluon.decode_listed_fp8").problem
    step = PagedStep(arguments["block_table"], arguments["seq_lens"])
    out = torch.empty(*q.shape[:-1], 512, dtype=q.dtype, device="cuda")
    values = MlaValues(arguments["scale"], None, arguments["kv_scale"])

    def launched(made: ListedFloat8) -> torch.Tensor:
        made.launch(q, cache, arguments["topk_indices"].flatten(0, -2), step, values, out, None)
        return out

    calls: Calls = {"gluon.decode_listed_fp8": functools.partial(launched, ListedFloat8(problem))}
    calls["gluon.decode_listed, bfloat16"] = public(kernelhub.mla_attention, wide, "gluon.decode_listed")
    calls["flash_mla.sparse, bfloat16"] = public(kernelhub.mla_attention, wide, "flash_mla")
    calls["triton.split_kv, bfloat16"] = public(kernelhub.mla_attention, wide, "triton.split_kv")
    calls["triton.split_kv"] = public(kernelhub.mla_attention, arguments, "triton.split_kv")
    return calls


GPT_OSS = AttentionModel("gpt-oss", 64, 8, 64, 64, window=127, sinks=True)
GPT_OSS_WHOLE = AttentionModel("gpt-oss, all keys", 64, 8, 64, 64, sinks=True)
LLAMA = AttentionModel("llama-3.1-8b", 32, 8, 128, 128)
WIDE_WINDOW = AttentionModel("window of 1024, 128", 32, 8, 128, 128, window=1023)
OF_96 = AttentionModel("heads of 96", 32, 32, 96, 96)
_AS = {"as it is": {}}
_OF_64: dict[str, dict[str, Any]] = {
    "as it is": {},
    "all steps of 128 keys": {"Q_STAGES": 1, "BLOCK_N": 128, "OWN": False, "LATE": True},
    "2 of queries": {"BLOCK_N": 128, "OWN": False, "LATE": True},
    "2 of queries, 3 stages": {"BLOCK_N": 128, "OWN": False, "LATE": True, "STAGES": 3},
    "2 of queries, not late": {"BLOCK_N": 128, "OWN": False},
    "2 of queries, 64 keys": {"BLOCK_N": 64, "OWN": False, "LATE": True},
}
_OWN = {"Q_STAGES": 2, "BLOCK_N": 64, "OWN": True, "LATE": True}
_WINDOW = {
    **_OF_64,
    "own steps of 64 keys": _OWN,
    "own steps of 64 keys, 4 stages": {**_OWN, "STAGES": 4},
    "own steps of 64 keys, not late": {**_OWN, "LATE": False},
}
_PACKED = {"as it is": {}} | {
    f"{pack} heads a tile, {keys} keys{more}": {**_OWN, "PACK": pack, "BLOCK_N": keys, **static}
    for pack, keys, more, static in (
        (8, 64, "", {"LATE": False}),
        (8, 64, ", late", {}),
        (8, 64, ", 3 stages", {"LATE": False, "STAGES": 3}),
        (8, 32, "", {"LATE": False}),
        (8, 32, ", 4 stages", {"LATE": False, "STAGES": 4}),
        (8, 128, "", {"LATE": False}),
        (8, 64, ", all steps", {"LATE": False, "OWN": False}),
        (4, 64, "", {"LATE": False}),
        (2, 64, "", {"LATE": False}),
    )
}
_FEW_PACKED = {
    name: _PACKED[name] for name in ("as it is", "8 heads a tile, 64 keys", "8 heads a tile, 32 keys, 4 stages")
}
_WIDE_PACKED = {"as it is": {}, "2 heads a tile": {"PACK": 2}, "4 heads a tile": {"PACK": 4}}
_FEW = {name: _WINDOW[name] for name in ("as it is", "2 of queries", "own steps of 64 keys")}
_QWEN = (128, 8)
_LISTS = [(128, 32, 8192), (128, 128, 4096), (16, 32, 8192), (128, 1, 32768), (16, 128, 4096), (128, 8, 8192)]
_LISTS += [(16, 8, 8192), (64, 32, 8192), (16, 1, 32768), (64, 128, 4096)]
_PRODUCTS = [(4096, 7168, 18432), (4096, 6144, 16384), (4096, 24576, 1536), (4096, 7168, 2304), (8192, 7168, 18432)]
CASES: dict[str, Callable[[], Calls]] = {
    **{f"product, {rows} rows, {n} x {k}": functools.partial(product, rows, n, k) for rows, n, k in _PRODUCTS},
    "product, 4096 rows, 7168 x 18432, scales by column": lambda: product(4096, 7168, 18432, by_column=True),
    **{
        f"lists, {heads} heads, {sequences} x {length}": functools.partial(lists, heads, sequences, length)
        for heads, sequences, length in _LISTS
    },
    "lists, 128 heads, 2048 of 1 x 8192": lambda: lists(128, 1, 8192, tokens=2048),
    "lists, 128 heads, 2 of 32 x 8192": lambda: lists(128, 32, 8192, tokens=2),
    "lists, 16 heads, 4 of 32 x 8192, pages of 1": lambda: lists(16, 32, 8192, tokens=4, page=1),
    "halves, 128 groups of 256, 1536 x 2048": lambda: halves(lengths_of(128, 256), 1536, 2048),
    "halves, Qwen3 w13, 4096 tokens": lambda: halves(routed(4096, *_QWEN), 1536, 2048),
    "halves, Qwen3 w2, 4096 tokens": lambda: halves(routed(4096, *_QWEN), 2048, 768),
    "prefill, gpt-oss window, pages of 64, 2 x 4096": lambda: prefill(GPT_OSS, (4096,) * 2, 64, _PACKED),
    "prefill, gpt-oss window, dense, 2 x 4096": lambda: prefill(GPT_OSS, (4096,) * 2, 0, _FEW_PACKED),
    "prefill, gpt-oss all keys, pages of 64, 2 x 4096": lambda: prefill(GPT_OSS_WHOLE, (4096,) * 2, 64, _OF_64),
    "prefill, Llama 3.1 8B, dense, 4 x 4096": lambda: prefill(LLAMA, (4096,) * 4, 0, _AS),
    "prefill, Llama 3.1 8B, dense, ragged 8000": lambda: prefill(LLAMA, (4000, 1000, 2500, 500), 0, _AS, ragged=True),
    "prefill, heads of 96, pages of 64, 2 x 4096": lambda: prefill(OF_96, (4096,) * 2, 64, _AS),
    "prefill, heads of 96, dense, 4 x 4096": lambda: prefill(OF_96, (4096,) * 4, 0, _AS),
    "prefill, window of 1024 of 128, pages of 64, 2 x 8192": lambda: prefill(
        WIDE_WINDOW, (8192,) * 2, 64, _WIDE_PACKED
    ),
    "prefill, gpt-oss window, pages of 16, 16 x 1024": lambda: prefill(GPT_OSS, (1024,) * 16, 16, _FEW_PACKED),
    "halves, Qwen3 w13, 1024 tokens": lambda: halves(routed(1024, *_QWEN), 1536, 2048),
    "halves, 32 groups of 512, 4096 x 7168": lambda: halves(lengths_of(32, 512), 4096, 7168),
    "fp8, 8 groups of 4096, 4096 x 7168": lambda: float8(lengths_of(8, 4096), 4096, 7168),
    "halves, 8 groups of 4096, 4096 x 7168": lambda: halves(lengths_of(8, 4096), 4096, 7168),
    "halves, 128 groups of 1024, 1536 x 2048": lambda: halves(lengths_of(128, 1024), 1536, 2048),
    "halves, Qwen3 w13, 128 tokens": lambda: halves(routed(128, *_QWEN), 1536, 2048),
    "halves, Qwen3 w13, 16 tokens": lambda: halves(routed(16, *_QWEN), 1536, 2048),
    "halves, Qwen3 w2, 128 tokens": lambda: halves(routed(128, *_QWEN), 2048, 768),
    "halves, masked, 32 groups of 512, 4096 x 7168": lambda: halves(lengths_of(32, 512), 4096, 7168, masked=True),
    "prefill, Llama 3.1 8B, dense, 1 x 16384": lambda: prefill(LLAMA, (16384,), 0, _AS),
    "prefill, heads of 96, pages of 16, 2 x 4096": lambda: prefill(OF_96, (4096,) * 2, 16, _AS),
    "prefill, gpt-oss window, 512 of 8192, pages of 64": lambda: prefill(
        GPT_OSS, (8192,) * 4, 64, _PACKED, queries=(512,) * 4
    ),
    "prefill, gpt-oss window, 64 single and 2 x 2048": lambda: prefill(
        GPT_OSS, (2048,) * 66, 64, _PACKED, ("triton.mixed", "triton.prefill"), queries=(1,) * 64 + (2048,) * 2
    ),
}


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, CASES, CALLS))
