"""Small calls of Gluon's prefill and of its decode of float8 lists, for compute-sanitizer.

    python -m tests.gpu.prefill_sanitized [I/N]

The I-th of N parts of the calls. Each is made twice, since the second is made by the launcher alone. Run it once
without the sanitizer before, so that Triton finds its kernels compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import kernelhub
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import AttentionModel

PREFILL, LISTED = "gluon.prefill_pipelined", "gluon.decode_listed_fp8"
# Heads, heads of keys, widths of keys and values, tokens of a page (0: none), causal, and window.
PREFILLS = (
    (8, 2, 128, 128, 0, True, None),
    (8, 2, 128, 128, 16, True, 100),
    (4, 4, 192, 128, 0, True, None),
    (8, 2, 64, 64, 64, True, None),
    (4, 4, 96, 96, 0, False, None),
    (4, 2, 256, 256, 64, True, None),
)
LISTS = ((128, None), (64, 2))  # heads, and queries of each sequence
LENGTHS = (300, 0, 129, 17)  # of sequences: several tiles, none, one and a row, part of one


def prefill(
    heads: int, kv_heads: int, width: int, value_width: int, page: int, causal: bool, window: int | None, device: str
) -> tuple[str, Any, dict[str, Any], float]:
    """What the call is, the op, its arguments and the largest value."""
    model = AttentionModel("small", heads, kv_heads, width, value_width)
    op: Any = kernelhub.paged_attention if page else kernelhub.attention
    if page:
        arguments = paged_attention_inputs(model, seq_lens=LENGTHS, q_lens=LENGTHS, page_size=page, device=device)
    else:
        arguments = attention_inputs(model, q_lens=LENGTHS, kv_lens=LENGTHS, device=device)
    arguments |= {"causal": causal, "window": window}
    return f"{heads} heads of {width}, pages of {page}", op, arguments, largest_value(arguments)


def lists(heads: int, tokens: int | None, device: str) -> tuple[str, Any, dict[str, Any], float]:
    """The same of lists of 64 tokens."""
    arguments = mla_attention_inputs(
        num_heads=heads, seq_lens=LENGTHS, q_lens=tokens, topk=64, kv_dtype=torch.float8_e4m3fn, device=device
    )
    return f"lists, {heads} heads", kernelhub.mla_attention, arguments, 4.5


def main(device: str = "cuda", kernels: tuple[str, str] = (PREFILL, LISTED)) -> None:
    part, parts = map(int, sys.argv[1].split("/")) if sys.argv[1:] else (0, 1)
    calls: list[tuple[str, Callable[[], Any]]] = [(kernels[0], partial(prefill, *case, device)) for case in PREFILLS]
    calls += [(kernels[1], partial(lists, *case, device)) for case in LISTS]
    for kernel, make in calls[part::parts]:
        name, op, arguments, largest = make()
        for call in ("first", "again"):
            got, _ = op(**arguments, return_lse=True, backend=kernel)
            agreement = compare_out(got, op.reference(**arguments), largest)
            print(f"{name}, {call}: {'right' if agreement.ok else 'WRONG'} {agreement}", flush=True)


if __name__ == "__main__":
    main()
