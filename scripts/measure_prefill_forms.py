"""Time `gluon.prefill_pipelined` and forms of it beside FlashAttention-3, Triton and torch on a Hopper GPU.

    python scripts/measure_prefill_forms.py [--only WORD] [--compile] [--part I/N] [--out FILE] [--seconds S]

Launches of adapters with other static arguments, and calls of the public functions, in CUDA graphs of two calls,
medians of samples that alternate, the cache not flushed. `off` is how far a result is from the last one's. The cases
are the prefills of benchmarks/attention.py, keys of 192 with values of 128, and pages. `--compile` only calls forms
once. `--part` takes the I-th of N parts of the cases, or with `--compile` of the calls. The file is written after every
case.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from alternating import Calls, run_cases
from torch.nn.functional import scaled_dot_product_attention

import kernelhub
from kernelhub.backends.gluon.attention import pipelined_adapter
from kernelhub.backends.gluon.attention.pipelined_adapter import PipelinedPrefill
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.models.shapes import ATTENTION, AttentionModel

CALLS = 2  # in a graph
# Static arguments; bytes of a section.
FORMS: dict[str, tuple[dict[str, Any], int]] = {
    "pipelined": ({}, pipelined_adapter._IN_L2),
    "pipelined, warpgroups not in turns": ({"IN_TURNS": False}, pipelined_adapter._IN_L2),
    "pipelined, two buffers of queries": ({"Q_STAGES": 2}, pipelined_adapter._IN_L2),
    "pipelined, sections of 16 MB": ({}, 16 << 20),
}
_WIDE = tuple(name for name in FORMS if "two" not in name)  # for which shared memory has no more room


def arguments_of(model: AttentionModel, batch: int, tokens: int, page: int, ragged: bool) -> dict[str, Any]:
    drawn = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(0)}
    lengths = (tokens,) * batch
    if page:
        return paged_attention_inputs(model, seq_lens=lengths, q_lens=lengths, page_size=page, **drawn)
    if ragged:
        return attention_inputs(model, q_lens=lengths, kv_lens=lengths, **drawn)
    return attention_inputs(model, batch=batch, q_tokens=tokens, **drawn)


def calls_of(
    model: AttentionModel,
    batch: int,
    tokens: int,
    page: int = 0,
    ragged: bool = False,
    causal: bool = True,
    forms: tuple[str, ...] = ("pipelined",),
) -> Calls:
    arguments = arguments_of(model, batch, tokens, page, ragged) | {"causal": causal}
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

    def launched(adapter: PipelinedPrefill, in_l2: int) -> torch.Tensor:
        with mock.patch.object(pipelined_adapter, "_IN_L2", in_l2):
            adapter.launch(q, k, v, step, values, out, None)
        return out

    calls: Calls = {}
    for name in forms:
        static, in_l2 = FORMS[name]
        made = PipelinedPrefill(problem)
        made._static.update(static)
        calls[name] = functools.partial(launched, made, in_l2)
    calls["triton.prefill"] = functools.partial(op, **arguments, backend="triton.prefill")
    if importlib.util.find_spec("flash_attn_interface") is not None:
        calls["flash_attn.fa3"] = functools.partial(op, **arguments, backend="flash_attn.fa3")
    if not page and not ragged and not {"window", "softcap", "sinks"} & arguments.keys():
        heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        calls["torch.sdpa"] = lambda: scaled_dot_product_attention(
            *heads_first, is_causal=causal, enable_gqa=True
        ).transpose(1, 2)
    return calls


_LLAMA, _DEEPSEEK = ATTENTION["llama-3.1-8b"], ATTENTION["deepseek-v3.2 prefill"]
_QWEN = AttentionModel("64 heads to 8 of 128", 64, 8, 128, 128)
_64, _96 = AttentionModel("64 heads to 8 of 64", 64, 8, 64, 64), AttentionModel("32 heads of 96", 32, 32, 96, 96)


def _window(tokens: int) -> AttentionModel:
    return dataclasses.replace(_LLAMA, name=f"llama-3.1-8b, window of {tokens}", window=tokens - 1)


def _case(
    model: AttentionModel, batch: int, tokens: int, more: str = "", **options: Any
) -> dict[str, Callable[[], Calls]]:
    return {f"{more}{model.name}, {batch} x {tokens}": functools.partial(calls_of, model, batch, tokens, **options)}


CASES: dict[str, Callable[[], Calls]] = {
    **_case(_DEEPSEEK, 2, 4096, forms=_WIDE),
    **_case(_LLAMA, 4, 4096, forms=tuple(FORMS)),
    **_case(_LLAMA, 16, 1024, forms=tuple(FORMS)),
    **_case(_QWEN, 2, 4096, "paged, ", page=64, forms=tuple(FORMS)),
    **_case(_LLAMA, 1, 16384),
    **_case(_LLAMA, 2, 8192),
    **_case(_LLAMA, 8, 2048),
    **_case(_LLAMA, 1, 8192, "not causal, ", causal=False),
    **_case(_LLAMA, 1, 512),
    **_case(_LLAMA, 32, 256),
    **_case(_LLAMA, 4, 2000, "ragged, ", ragged=True),
    **_case(_QWEN, 4, 2000, "ragged, ", ragged=True),
    **{name: call for each in (128, 1024, 4096) for name, call in _case(_window(each), 2, 8192).items()},
    **{name: call for each in (128, 1024) for name, call in _case(_window(each), 2, 4096, "paged, ", page=64).items()},
    **_case(_64, 2, 4096),
    **_case(_64, 16, 1024),
    **_case(_64, 2, 4096, "paged, ", page=64),
    **_case(_96, 4, 4096),
    **_case(_96, 16, 1024),
    **_case(_96, 2, 4096, "paged, ", page=16),
    **_case(_DEEPSEEK, 1, 1024),
    **_case(_DEEPSEEK, 1, 4096),
    **_case(_DEEPSEEK, 2, 8192),
    **_case(_DEEPSEEK, 4, 2048, "ragged, ", ragged=True),
    **_case(ATTENTION["gemma-2-9b"], 2, 4096),
    **_case(ATTENTION["gpt-oss-120b"], 2, 4096),
    **_case(_LLAMA, 4, 4096, "pages of 16, ", page=16),
    **_case(_LLAMA, 4, 4096, "pages of 256, ", page=256),
    **_case(_LLAMA, 16, 512, "pages of 16, ", page=16),
}


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, CASES, CALLS))
