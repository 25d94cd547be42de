"""Time `gluon.prefill_pipelined` and forms of it beside `gluon.prefill`, FlashAttention-3 and torch on a Hopper GPU.

    python scripts/measure_prefill_forms.py [--only WORD] [--compile] [--part I/N] [--out FILE] [--seconds S]

Launches of adapters with other static arguments, and calls of the public functions, in CUDA graphs of two calls,
medians of samples that alternate, the cache not flushed. `off` is how far a result is from the last one's. The cases
are the prefills of benchmarks/attention.py, keys of 192 with values of 128, and pages. `--compile` only calls forms
once. `--part` takes the I-th of N parts of the cases, or with `--compile` of the calls. The file is written after every
case.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from alternating import attempt, facts, measured, options_of
from torch.nn.functional import scaled_dot_product_attention

import kernelhub
from kernelhub.backends.gluon.attention import pipelined_adapter
from kernelhub.backends.gluon.attention.adapter import Prefill
from kernelhub.backends.gluon.attention.pipelined_adapter import PipelinedPrefill
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.models.shapes import ATTENTION, AttentionModel

CALLS = 2  # in a graph
Calls = dict[str, Callable[[], Any]]
_MB = 1 << 20
# Static arguments; whether tiles are handed out by counters; bytes of a section.
FORMS: dict[str, tuple[dict[str, Any], bool, int]] = {
    "pipelined": ({}, True, pipelined_adapter._IN_L2),
    "pipelined, warpgroups in turns": ({"IN_TURNS": True}, True, pipelined_adapter._IN_L2),
    "pipelined, every n-th tile": ({}, False, pipelined_adapter._IN_L2),
    "pipelined, sections of 16 MB": ({}, True, 16 * _MB),
    "pipelined, one section": ({}, True, 1 << 60),
    "pipelined, 4 stages": ({"STAGES": 4}, True, pipelined_adapter._IN_L2),
    "pipelined, one buffer of queries": ({"Q_STAGES": 1}, True, pipelined_adapter._IN_L2),
    "pipelined, one buffer of queries, warpgroups in turns": (
        {"Q_STAGES": 1, "IN_TURNS": True},
        True,
        pipelined_adapter._IN_L2,
    ),
}
_FEW = (
    "pipelined",
    "pipelined, warpgroups in turns",
    "pipelined, one buffer of queries",
    "pipelined, one buffer of queries, warpgroups in turns",
)
_WIDE = tuple(name for name in FORMS if "stages" not in name)  # for which shared memory has no more stages


def arguments_of(model: AttentionModel, batch: int, tokens: int, page: int, ragged: bool) -> dict[str, Any]:
    drawn = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(0)}
    lengths = (tokens,) * batch
    if page:
        made = paged_attention_inputs(model, seq_lens=lengths, q_lens=lengths, page_size=page, **drawn)
        return made | {"causal": True}
    if ragged:
        return attention_inputs(model, q_lens=lengths, kv_lens=lengths, **drawn)
    return attention_inputs(model, batch=batch, q_tokens=tokens, **drawn)


def calls_of(
    model: AttentionModel, batch: int, tokens: int, page: int = 0, ragged: bool = False, forms: Any = _WIDE
) -> Calls:
    arguments = arguments_of(model, batch, tokens, page, ragged)
    op = kernelhub.paged_attention if page else kernelhub.attention
    problem = op.explain(**arguments, backend="gluon.prefill_pipelined").problem
    names = ("k_cache", "v_cache") if page else ("k", "v")
    q, k, v = arguments["q"], *(arguments[name] for name in names)
    step: Any = DenseStep(arguments.get("cu_seqlens_q"), arguments.get("cu_seqlens_k"))
    if page:
        step = PagedStep(arguments["block_table"], arguments["seq_lens"], arguments.get("cu_seqlens_q"))
    window = arguments.get("window", -1)
    values = Values(
        model.head_dim_qk**-0.5,
        window[0] if isinstance(window, tuple) else window,
        0,
        softcap=arguments.get("softcap") or 0.0,
        sinks=arguments.get("sinks"),
    )
    out = torch.empty(*q.shape[:-1], model.head_dim_vo, dtype=q.dtype, device="cuda")

    def launched(adapter: Prefill, counted: bool, in_l2: int) -> torch.Tensor:
        with mock.patch.object(pipelined_adapter, "_IN_L2", in_l2):
            if counted:
                adapter.launch(q, k, v, step, values, out, None)
            else:
                with mock.patch.object(pipelined_adapter, "counters_of", return_value=None):
                    adapter.launch(q, k, v, step, values, out, None)
        return out

    calls: Calls = {}
    for name in forms:
        static, counted, in_l2 = FORMS[name]
        made = PipelinedPrefill(problem)
        made._static.update(static)
        calls[name] = functools.partial(launched, made, counted, in_l2)
    calls["gluon.prefill"] = functools.partial(launched, Prefill(problem), True, 0)
    calls["triton.prefill"] = functools.partial(op, **arguments, backend="triton.prefill")
    if importlib.util.find_spec("flash_attn_interface") is not None:
        calls["flash_attn.fa3"] = functools.partial(op, **arguments, backend="flash_attn.fa3")
    if not page and not ragged and not {"window", "softcap", "sinks"} & arguments.keys():
        heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        calls["torch.sdpa"] = lambda: scaled_dot_product_attention(
            *heads_first, is_causal=True, enable_gqa=True
        ).transpose(1, 2)
    return calls


_LLAMA, _DEEPSEEK = ATTENTION["llama-3.1-8b"], ATTENTION["deepseek-v3.2 prefill"]
_QWEN = AttentionModel("64 heads to 8 of 128", 64, 8, 128, 128)
CASES: dict[str, Callable[[], Calls]] = {
    "deepseek-v3.2 prefill, 2 x 4096": lambda: calls_of(_DEEPSEEK, 2, 4096),
    "llama-3.1-8b, 4 x 4096": lambda: calls_of(_LLAMA, 4, 4096),
    "llama-3.1-8b, 16 x 1024": lambda: calls_of(_LLAMA, 16, 1024),
    "paged, 64 heads to 8 of 128, 2 x 4096": lambda: calls_of(_QWEN, 2, 4096, page=64),
    "llama-3.1-8b, 1 x 16384": lambda: calls_of(_LLAMA, 1, 16384),
    **{
        f"deepseek-v3.2 prefill, {batch} x {tokens}": functools.partial(calls_of, _DEEPSEEK, batch, tokens)
        for batch, tokens in ((1, 1024), (1, 2048), (1, 4096), (2, 8192))
    },
    **{
        f"llama-3.1-8b, {16384 // tokens} x {tokens}": functools.partial(calls_of, _LLAMA, 16384 // tokens, tokens)
        for tokens in (2048, 8192)
    },
    "gemma-2-9b, 2 x 4096": lambda: calls_of(ATTENTION["gemma-2-9b"], 2, 4096, forms=_FEW),
    "gpt-oss-120b, 2 x 4096": lambda: calls_of(
        ATTENTION["gpt-oss-120b"], 2, 4096, forms=(*_FEW, "pipelined, 4 stages")
    ),
    "ragged, deepseek-v3.2 prefill, 4 x 2048": lambda: calls_of(_DEEPSEEK, 4, 2048, ragged=True, forms=_FEW),
    "paged, llama-3.1-8b, 4 x 4096, pages of 16": lambda: calls_of(_LLAMA, 4, 4096, page=16, forms=_FEW),
}


def _again(call: Callable[[], Any], _: int) -> Any:
    """Each call of a graph is the same."""
    return call()


def main() -> int:
    options = options_of(__doc__).parse_args()
    began = time.monotonic()
    part, parts = map(int, options.part.split("/"))
    rows: list[dict[str, Any]] = []
    about = facts(__doc__)
    number = 0
    for at, (name, make) in enumerate(CASES.items()):
        if options.only not in name or time.monotonic() - began > options.seconds:
            continue
        if not options.compile and at % parts != part:
            continue
        row: dict[str, Any] = {"case": name}
        try:
            calls = make()
            if options.compile:
                for call in calls.values():
                    number += 1
                    if number % parts == part and (error := attempt(call)):
                        print(name, error, flush=True)
                torch.cuda.synchronize()
            else:
                row |= measured({form: functools.partial(_again, call) for form, call in calls.items()}, CALLS)
        except Exception:
            row["error"] = traceback.format_exc()[-600:]
        calls = {}
        torch.cuda.empty_cache()
        row["at_s"] = round(time.monotonic() - began, 1)
        rows.append(row)
        if not options.compile:
            print(json.dumps(row), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(f"part {options.part}: {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
