"""Kernels for sm_90 for long: random lengths and features, each call repeated; every repetition has the same bits.

    python -m tests.gluon.soak [--kernels OP/KERNEL ...] [--calls 20000] [--draws 20] [--seconds 120] [--json FILE]
    python -m tests.gluon.soak --together --draws 4

Each draw has lengths, zero among them, and features of its own. Its first result is compared with the reference, and
those of calls / draws repetitions with the first one. Each kernel runs in a process that ends after `--seconds`: one
that hangs costs no more. With `--together` all of them run at once, so the GPU switches between them within launches.
Prints an object for each kernel; it fails if one was wrong, differed, or did not end.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.gluon import kernels
from kernelhub.evidence.cases import CASES
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.ops.moe.experts.inputs import moe_inputs

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ANY_WIDTH = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))


class Scale(NamedTuple):
    """How large draws are: of a GPU, or of the emulator."""

    device: str
    length: int  # of a sequence, at most
    tokens: int  # of a product, at most
    widths: tuple[int, ...]  # of products, multiples of 128
    heads: tuple[int, ...]  # of latent attention


ON_A_GPU = Scale("cuda", 2500, 4096, (512, 1536, 2304), (16, 32, 64, 128))
EMULATED = Scale("cpu", 150, 150, (128, 256), (6,))


def _lengths(draw: random.Random, most: int, count: int) -> list[int]:
    return [draw.choice((0, 1, draw.randint(1, most), draw.randint(1, most))) for _ in range(count)]


def _features(draw: random.Random, model: AttentionModel, windows: bool, scale: Scale) -> dict[str, Any]:
    """Of attention: each of them in half of the draws."""
    drawn: dict[str, Any] = {"causal": draw.random() < 0.5, "return_lse": draw.random() < 0.5}
    if draw.random() < 0.5:
        drawn["softcap"] = draw.choice((2.0, 30.0))
    if draw.random() < 0.5:
        drawn["sinks"] = torch.linspace(-2, 4, model.num_q_heads, device=scale.device)
    if windows and draw.random() < 0.7:
        drawn["window"] = draw.choice((0, 63, 128, 200))
    return drawn


def _model(draw: random.Random, widths: tuple[tuple[int, int], ...]) -> AttentionModel:
    heads, kv_heads = draw.choice(((4, 2), (3, 3), (8, 1)))
    return AttentionModel("drawn", heads, kv_heads, *draw.choice(widths))


def _kv_dtype(draw: random.Random, float8: bool) -> dict[str, Any]:
    if float8:
        return {"kv_dtype": draw.choice(FLOAT8)}
    return {"dtype": draw.choice((torch.bfloat16, torch.float16))}


def _dense(widths: tuple[tuple[int, int], ...], windows: bool = False, float8: bool = False) -> Callable[..., Any]:
    def arguments(draw: random.Random, scale: Scale) -> dict[str, Any]:
        model = _model(draw, widths)
        sizes: dict[str, Any] = {"batch": 2, "q_tokens": draw.randint(1, scale.length)}
        if draw.random() < 0.7:
            sizes = {name: _lengths(draw, scale.length, 4) for name in ("q_lens", "kv_lens")}
        made = attention_inputs(
            model, **sizes, **_kv_dtype(draw, float8), device=scale.device, seed=draw.randrange(1000)
        )
        return made | _features(draw, model, windows, scale)

    return arguments


def _paged(widths: tuple[tuple[int, int], ...], windows: bool = False, float8: bool = False) -> Callable[..., Any]:
    def arguments(draw: random.Random, scale: Scale) -> dict[str, Any]:
        model, lengths = _model(draw, widths), _lengths(draw, scale.length, 4)
        queries = draw.choice((None, [draw.randint(0, length) for length in lengths]))
        made = paged_attention_inputs(
            model,
            seq_lens=lengths,
            q_lens=queries,
            page_size=draw.choice((16, 32, 64, 128, 256)),
            kv_layout=draw.choice(("NHD", "HND")),
            **_kv_dtype(draw, float8),
            device=scale.device,
            seed=draw.randrange(1000),
        )
        features = _features(draw, model, windows, scale)
        if queries is None:
            del features["causal"]
        return made | features

    return arguments


def _decoded(draw: random.Random, scale: Scale) -> dict[str, Any]:
    """Decode over pages, of one query or some for each sequence, or ragged: of up to so many."""
    model, tokens = _model(draw, ((64, 64), (128, 128), (256, 256))), draw.choice((None, None, 2, 4))
    lengths = [max(length, tokens or 0) for length in _lengths(draw, scale.length, 6)]
    ragged = draw.random() < 0.5 and [draw.randint(0, tokens or 1) for _ in lengths]
    made = paged_attention_inputs(
        model,
        seq_lens=lengths,
        q_lens=ragged or tokens,
        page_size=draw.choice((16, 32, 64, 128, 256)),
        kv_layout=draw.choice(("NHD", "HND")),
        **_kv_dtype(draw, draw.random() < 0.5),
        device=scale.device,
        seed=draw.randrange(1000),
    )
    features = _features(draw, model, True, scale)
    if ragged:
        made["max_seqlen_q"] = tokens or 1
    elif tokens is None:
        del features["causal"]
    return made | features


def _latent(listed: bool, float8: bool) -> Callable[..., Any]:
    def arguments(draw: random.Random, scale: Scale) -> dict[str, Any]:
        lengths, tokens = _lengths(draw, scale.length, 5), draw.choice((None, 2, 4))
        lengths = [max(length, tokens or 0) for length in lengths]
        made = mla_attention_inputs(
            num_heads=draw.choice(scale.heads),
            seq_lens=lengths,
            q_lens=tokens,
            topk=draw.choice((64, 200, 512)) if listed else None,
            page_size=draw.choice((16, 64, 128)) if listed else 64,
            kv_dtype=FLOAT8[0] if float8 else None,
            device=scale.device,
            seed=draw.randrange(1000),
        )
        return made | {"return_lse": draw.random() < 0.5}

    return arguments


def _fp8_gemm(scalings: tuple[str, ...]) -> Callable[..., Any]:
    def arguments(draw: random.Random, scale: Scale) -> dict[str, Any]:
        return fp8_gemm_inputs(
            tokens=draw.randint(1, scale.tokens),
            n=draw.choice(scale.widths) + draw.choice((0, 8, 72)),
            k=draw.choice(scale.widths) + draw.choice((0, 16)),
            scaling=draw.choice(scalings),
            bias=draw.random() < 0.5,
            device=scale.device,
            seed=draw.randrange(1000),
        )

    return arguments


def _fp4_gemm(draw: random.Random, scale: Scale) -> dict[str, Any]:
    return fp4_gemm_inputs(
        tokens=draw.choice((draw.randint(1, 64), draw.randint(1, 300), draw.randint(1, scale.tokens))),
        n=draw.choice(scale.widths) + draw.choice((0, 8, 75)),
        k=draw.choice(scale.widths) + draw.choice((0, 32)),
        b_format=draw.choice(("nvfp4", "mxfp4")),
        bias=draw.random() < 0.5,
        out_dtype=draw.choice((torch.bfloat16, torch.float16, torch.float32)),
        device=scale.device,
        seed=draw.randrange(1000),
    )


def _grouped(formats: tuple[str, ...]) -> Callable[..., Any]:
    def arguments(draw: random.Random, scale: Scale) -> dict[str, Any]:
        return grouped_gemm_inputs(
            sizes=_lengths(draw, scale.tokens // 8, draw.choice((1, 5, 12))),
            n=draw.choice(scale.widths) + draw.choice((0, 8)),
            k=draw.choice(scale.widths),
            format=draw.choice(formats),
            masked=draw.random() < 0.5,
            bias=draw.random() < 0.5,
            device=scale.device,
            seed=draw.randrange(1000),
        )

    return arguments


def _experts(weights: str) -> Callable[..., Any]:
    def arguments(draw: random.Random, scale: Scale) -> dict[str, Any]:
        return moe_inputs(
            tokens=draw.randint(1, scale.tokens // 2),
            weights=weights,
            num_experts=draw.choice((5, 16)),
            top_k=draw.choice((1, 4)),
            hidden_size=draw.choice(scale.widths),
            intermediate_size=draw.choice(scale.widths),
            device=scale.device,
            seed=draw.randrange(1000),
        )

    return arguments


def _names() -> list[tuple[str, str]]:
    return [(kernel.op, kernel.name.removeprefix("gluon.")) for kernel in kernels.KERNELS]


DRAWS: dict[tuple[str, str], Callable[[random.Random, Scale], dict[str, Any]]] = {
    ("attention", "prefill_pipelined"): _dense(ANY_WIDTH[1:], windows=True),
    ("attention", "prefill_pipelined_any"): _dense(ANY_WIDTH, windows=True),
    ("attention", "prefill_fp8"): _dense(((96, 96), (128, 128)), float8=True),
    ("attention", "prefill_fp8_any"): _dense(ANY_WIDTH[:3], windows=True, float8=True),
    ("paged_attention", "prefill_pipelined"): _paged(ANY_WIDTH[1:], windows=True),
    ("paged_attention", "prefill_pipelined_any"): _paged(ANY_WIDTH, windows=True),
    ("paged_attention", "prefill_fp8"): _paged(((64, 64), (128, 128)), float8=True),
    ("paged_attention", "prefill_fp8_any"): _paged(ANY_WIDTH[:3], windows=True, float8=True),
    **{(op, name): _latent("listed" in name, "fp8" in name) for op, name in _names() if op == "mla_attention"},
    ("fp8_gemm", "fp8_gemm"): _fp8_gemm(("tensor", "row", "block")),
    ("grouped_gemm", "grouped_fp8"): _grouped(("tensor", "channel", "block")),
    ("grouped_gemm", "grouped_halves"): _grouped(("bfloat16", "float16")),
    ("fused_moe", "experts"): _experts("fp8_block"),
    ("fused_moe", "experts_halves"): _experts("plain"),
}

OF_CUDA: dict[tuple[str, str], Callable[..., Any]] = {  # which are no kernels of Gluon's
    ("mla_attention", "cuda.decode"): _latent(False, False),
    ("fp4_gemm", "cuda.fp4_gemm"): _fp4_gemm,
    ("paged_attention", "cuda.paged_decode"): _decoded,
    ("fp8_gemm", "cuda.fp8_gemm"): _fp8_gemm(("block",)),
}


class Outcome(NamedTuple):
    """Of one draw."""

    right: bool
    unequal: int  # repetitions whose bits differ from those of the first call
    figures: str


def soak(op: str, kernel: str, backend: str, seed: int, repeats: int, scale: Scale) -> Outcome:
    """One draw of a kernel, called once and again `repeats` times."""
    arguments = (DRAWS | OF_CUDA)[op, kernel](random.Random(seed), scale)
    shapes = CASES[op].destinations(arguments)
    named = kernel if "." in kernel else f"{backend}.{kernel}"

    def poisoned() -> dict[str, Tensor]:
        return {
            name: torch.full(shape, torch.nan, dtype=dtype, device=scale.device)
            for name, (shape, dtype) in shapes.items()
        }

    def called(results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those results, and the LSE if the call returns one."""
        made = getattr(kernelhub, op)(**arguments, **results, backend=named)
        return results | ({"lse": made[1]} if arguments.get("return_lse") else {})

    first, again = called(poisoned()), poisoned()
    unequal = torch.zeros((), dtype=torch.int64, device=scale.device)
    for _ in range(repeats):
        for out in again.values():
            out.fill_(torch.nan)
        made = called(again)
        differs = [(made[name].view(torch.uint8) != out.view(torch.uint8)).any() for name, out in first.items()]
        unequal += torch.stack(differs).any()
    judgement = CASES[op].judge(first, arguments)
    return Outcome(judgement.ok, int(unequal), judgement.figures)


def _one(op: str, kernel: str, calls: int, draws: int, seed: int) -> dict[str, Any]:
    began, wrong, unequal = time.monotonic(), [], 0
    for drawn in range(draws):
        outcome = soak(op, kernel, "gluon", seed + drawn, calls // draws - 1, ON_A_GPU)
        unequal += outcome.unequal
        if not outcome.right:
            wrong.append({"seed": seed + drawn, "figures": outcome.figures})
    seconds = round(time.monotonic() - began, 1)
    calls = calls // draws * draws
    return {
        "op": op,
        "kernel": kernel,
        "calls": calls,
        "draws": draws,
        "wrong": wrong,
        "unequal": unequal,
        "s": seconds,
    }


def _in_a_process(op: str, kernel: str, options: argparse.Namespace) -> dict[str, Any]:
    sizes = ["--calls", str(options.calls), "--draws", str(options.draws), "--seed", str(options.seed)]
    command = [sys.executable, "-m", "tests.gluon.soak", "--here", "--kernels", f"{op}/{kernel}", *sizes]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds)
    except subprocess.TimeoutExpired:
        return {"op": op, "kernel": kernel, "error": f"did not end in {options.seconds} s"}
    if not answer.stdout.strip():
        return {"op": op, "kernel": kernel, "error": answer.stderr.strip()[-600:] or f"exit {answer.returncode}"}
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = ["/".join(names) for names in (*DRAWS, *OF_CUDA)]
    parser.add_argument("--kernels", nargs="+", default=every, help="OP/KERNEL; all")
    parser.add_argument("--calls", type=int, default=20_000, help="of each kernel")
    parser.add_argument("--draws", type=int, default=20, help="of lengths and features, for each kernel")
    parser.add_argument("--seconds", type=float, default=120, help="most, of each kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the objects there, after each kernel")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--here", action="store_true", help="in this process, without a limit")
    where.add_argument("--together", action="store_true", help="all kernels at once")
    options = parser.parse_args()

    def soaked(name: str) -> dict[str, Any]:
        op, _, kernel = name.partition("/")
        if options.here:
            return _one(op, kernel, options.calls, options.draws, options.seed)
        return _in_a_process(op, kernel, options)

    found = []
    with ThreadPoolExecutor(len(options.kernels) if options.together else 1) as threads:
        for one in threads.map(soaked, options.kernels):
            found.append(one)
            print(json.dumps(one), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    return any("error" in one or one["wrong"] or one["unequal"] for one in found)


if __name__ == "__main__":
    sys.exit(main())
