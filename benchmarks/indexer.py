"""Every kernel of the indexer and of linear attention that can run here, against torch and the machine's roofs.

    python benchmarks/indexer.py [--quick] [--json] [--out FILE] [--plot FILE.png] [--show FILE]

How kernels are timed and what the roofs are: roofline.py. Shapes are DeepSeek-V3.2's indexer, 64 heads of 128 in
float8 and 2048 of the keys, and MiniMax-Text-01's linear attention, 64 heads of 128.

torch.topk gives no order of places and any of equal elements; it has no logits of an indexer and no linear attention.
A case's operations are those of the scores that are seen, or of the state's update and its use; its bytes those of the
operands and results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from roofline import Case, drawn_on, main

from kernelhub.ops.linear_attention.inputs import slopes
from kernelhub.ops.models.shapes import INDEXERS, LINEAR_ATTENTION

MODEL = INDEXERS["deepseek-v3.2"]
HEADS, WIDTH = MODEL.num_heads, MODEL.head_dim
LINEAR = LINEAR_ATTENTION["minimax-text-01"]
PAGE = 64
FP8 = torch.float8_e4m3fn


def logits(tokens: int, keys: int, device: torch.device) -> Case:
    """The last queries of a sequence, causally."""
    ends = torch.arange(keys - tokens, keys, device=device, dtype=torch.int32) + 1
    arguments = {
        "q": torch.randn(tokens, HEADS, WIDTH, **drawn_on(device)).to(FP8),
        "k": torch.randn(keys, WIDTH, **drawn_on(device)).to(FP8),
        "k_scale": torch.rand(keys, **drawn_on(device)) + 0.5,
        "weights": torch.randn(tokens, HEADS, **drawn_on(device)),
        "cu_seqlen_ks": torch.zeros_like(ends),
        "cu_seqlen_ke": ends,
    }
    return Case(
        f"mqa_logits, {tokens} x {keys}",
        "mqa_logits",
        arguments,
        {},
        bytes=tokens * HEADS * (WIDTH + 4) + keys * (WIDTH + 4) + 4 * tokens * keys,
        operations=2 * HEADS * WIDTH * (tokens * keys - tokens * (tokens - 1) // 2),
        float8=True,
        disagreement=seen_disagree,
    )


def paged(batch: int, keys: int, device: torch.device) -> Case:
    """A step of decode."""
    pages = batch * -(-keys // PAGE)
    arguments = {
        "q": torch.randn(batch, 1, HEADS, WIDTH, **drawn_on(device)).to(FP8),
        "k_cache": torch.randn(pages, PAGE, WIDTH, **drawn_on(device)).to(FP8),
        "k_scale_cache": torch.rand(pages, PAGE, **drawn_on(device)) + 0.5,
        "weights": torch.randn(batch, HEADS, **drawn_on(device)),
        "block_table": torch.randperm(pages, **drawn_on(device)).int().view(batch, -1),
        "seq_lens": torch.full((batch,), keys, dtype=torch.int32, device=device),
        "max_seq_len": keys,
    }
    return Case(
        f"paged_mqa_logits, {batch} x {keys}",
        "paged_mqa_logits",
        arguments,
        {},
        bytes=batch * keys * (WIDTH + 8),
        operations=2 * batch * keys * HEADS * WIDTH,
        float8=True,
        disagreement=seen_disagree,
    )


def seen_disagree(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference in 5 % of the largest logit that is seen."""
    seen = want.isfinite()
    if not torch.equal(seen, got.isfinite()):
        return float("inf")
    return float((got - want)[seen].abs().max() / (0.05 * want[seen].abs().max()))


def topk(rows: int, keys: int, device: torch.device) -> Case:
    """The best 2048 keys of each row."""
    x = torch.randn(rows, keys, **drawn_on(device))
    k = min(MODEL.k, keys)
    return Case(
        f"topk_indices, {rows} x {keys}",
        "topk_indices",
        {"logits": x, "k": k},
        {"topk, in no order": lambda: torch.topk(x, k, sorted=False).indices},
        bytes=4 * rows * (keys + k),
        operations=0,
    )


def linear(batch: int, tokens: int, device: torch.device) -> Case:
    """Prefill, or with one token decode."""
    shape = (batch, tokens, LINEAR.num_heads, LINEAR.head_dim)
    q, k, v = (torch.randn(*shape, **drawn_on(device)).to(torch.bfloat16) for _ in range(3))
    arguments = {"q": q, "k": k * LINEAR.head_dim**-0.5, "v": v, "decay": slopes(LINEAR.num_heads).to(device)}
    states = batch * LINEAR.num_heads * LINEAR.head_dim * LINEAR.value_dim * 4
    if tokens == 1:
        arguments["state"] = torch.randn(states // 4, **drawn_on(device)).view(batch, LINEAR.num_heads, *2 * [128])
    return Case(
        f"linear_attention, {batch} x {tokens}",
        "linear_attention",
        arguments,
        {},
        bytes=4 * q.numel() * 2 + (states if tokens == 1 else 0),
        operations=4 * q.numel() * LINEAR.value_dim,
    )


def cases(device: torch.device, quick: bool) -> list[Callable[[], Case]]:
    """What is timed: small enough for a CPU, or as an engine runs it on a GPU."""
    if device.type == "cpu":
        sizes = [(logits, 16, 1024), (paged, 2, 1024), (topk, 4, 8192), (linear, 1, 128)]
    else:
        sizes = [(logits, 1024, 8192), (paged, 64, 8192), (topk, 64, 8192), (topk, 64, 65536), (linear, 1, 4096)]
        if not quick:
            sizes += [(paged, 1, 65536), (paged, 64, 65536)]
            sizes += [(topk, 1, 32768), (topk, 1, 131072), (topk, 8, 131072), (topk, 1024, 8192), (topk, 4096, 32768)]
            sizes += [(linear, 8, 2048), (linear, 64, 1)]
    return [lambda make=make, a=a, b=b: make(a, b, device) for make, a, b in sizes]


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], cases))
